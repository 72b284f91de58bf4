"""Chains that stop where they are too unlikely to be accepted, and how static shapes are filled."""

from typing import Any

import pytest
import torch
from scripted import ScriptedHead
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.base import Draft, Shape
from draftsmith.heads.confidence import Confidence
from draftsmith.heads.drafting import Adaptive, Form, draft
from draftsmith.sampling import Sampling
from draftsmith.target import Features

VOCAB = 6


class Head(ScriptedHead):
    """Gives its first choice, token ``depth``, the chance ``tops[depth]`` and shares the rest out."""

    def __init__(self, tops: list[float]) -> None:
        super().__init__(VOCAB, torch.arange(VOCAB))
        self.tops = tops

    def logits(self, committed: list[int], path: list[int]) -> Tensor:
        top = self.tops[len(path)]
        row = torch.full((VOCAB,), (1 - top) / (VOCAB - 1))
        row[len(path) % VOCAB] = top
        return row.log()


def sure_by(estimates: list[float]) -> Confidence:
    """A confidence head that says these chances at these depths, whatever it reads."""
    confidence = Confidence(VOCAB, len(estimates))
    confidence.load_state_dict({"proj.weight": torch.zeros(1, VOCAB), "proj.bias": torch.ones(1)}, strict=False)
    confidence.temperature.copy_(1 / torch.tensor(estimates).logit())
    return confidence


def written(head: Head, form: Form, sampled: Sampling | None = None, seed: int = 0) -> Draft:
    features = Features(torch.zeros(1, 0), torch.zeros(1, 1))
    target: Any = type("Nowhere", (), {"device": torch.device("cpu")})()
    generator = torch.Generator().manual_seed(seed)
    return draft(head, head.new_state(), features, torch.tensor([0, 1]), form, target, sampled, generator)


@pytest.mark.parametrize(
    ("tops", "stop", "length"),
    [
        ([0.9, 0.9, 0.9, 0.9, 0.9], 0.3, 5),  # the whole length
        ([0.9, 0.5, 0.5, 0.9, 0.9], 0.3, 2),  # 0.9, 0.45, 0.225
        ([0.9, 0.5, 0.5, 0.9, 0.9], 0.2, 4),  # …, 0.225, 0.2025, 0.18
        ([0.25, 0.9, 0.9, 0.9, 0.9], 0.3, 1),  # the first token is always drafted
        ([0.7, 0.4, 0.9, 0.9, 0.9], 0.3, 1),
    ],
)
@pytest.mark.parametrize("by", ["draft", "confidence"])
def test_a_chain_stops_where_its_path_is_too_unlikely(tops: list[float], stop: float, length: int, by: str) -> None:
    head = Head(tops if by == "draft" else [0.9] * 5)
    head.confidence = sure_by(tops) if by == "confidence" else None
    found = written(head, Adaptive(5, stop))
    assert found.tokens == list(range(length)) and found.shape.parents == tuple(range(length)) and found.q is None
    assert len(head.read) == min(length, 4)  # nothing is read behind the stop


def test_the_confidence_head_counts_and_not_the_drafts_own_probability() -> None:
    head = Head([0.2] * 5)
    head.confidence = sure_by([0.99, 0.98, 0.97, 0.96, 0.95])
    assert written(head, Adaptive(5, 0.5)).shape.length == 5
    head.confidence = None
    assert written(head, Adaptive(5, 0.5)).shape.length == 1


def test_a_drawn_chain_stops_before_its_token_is_drawn() -> None:
    """The length follows from what was drawn before, never from the token that would come next: here it is always two."""
    head = Head([0.8, 0.7, 0.5, 0.9, 0.9])
    drawn = set()
    for seed in range(40):
        found = written(head, Adaptive(5, 0.4), Sampling(1.0), seed)
        assert found.shape.length == len(found.tokens) == 2 and found.q is not None and found.q.shape == (3, VOCAB)
        torch.testing.assert_close(found.q[:2].max(-1).values, torch.tensor([0.8, 0.7]))
        drawn.add(tuple(found.tokens))
    assert len(drawn) > 5


def test_cut() -> None:
    form = Adaptive(5, 0.3)
    assert form.cut(5) is form.cut(9) is form and form.cut(2) == Adaptive(2, 0.3)
    assert (form.kind, form.nodes, form.name) == ("chain", 5, "chain:5,stop=0.3")


def test_a_shape_is_filled_with_every_nodes_best() -> None:
    shape = Shape("odd", (0, 0, 0, 2, 2, 4), (2, 0, 1, 0, 1, 0))
    head = Head([0.5] * 4)
    found = written(head, shape)
    assert found.shape is shape and found.tokens[1] == 0 and found.tokens[3] == 1 and found.tokens[5] == 2
    assert len(set(found.tokens[:3])) == 3 and len(set(found.tokens[3:5])) == 2
    assert head.read == [1, 1]  # only nodes that have children


def test_siblings_are_drawn_without_replacement() -> None:
    shape = Shape("wide", (0, 0, 0, 1, 1), (0, 1, 2, 0, 1))
    firsts = []
    for seed in range(300):
        found = written(Head([0.7, 0.4]), shape, Sampling(1.0), seed)
        assert len(set(found.tokens[:3])) == 3 and len(set(found.tokens[3:])) == 2
        assert found.q is not None and found.q[[0, 1]].sum(-1).tolist() == pytest.approx([1, 1]) and not found.q[2:].any()
        firsts.append(found.tokens[0] == 0)
    assert 0.6 < sum(firsts) / len(firsts) < 0.8


@pytest.mark.parametrize("sampled", [None, Sampling(1.0)])
def test_more_siblings_than_the_head_has_tokens_are_refused(sampled: Sampling | None) -> None:
    widest, wider = (Shape("broad", (0,) * children, tuple(range(children))) for children in (VOCAB, VOCAB + 1))
    assert len(written(Head([0.5]), widest, sampled).tokens) == VOCAB
    with pytest.raises(UserError, match="broad has 7 children under one node, and this head knows 6 tokens"):
        written(Head([0.5]), wider, sampled)
