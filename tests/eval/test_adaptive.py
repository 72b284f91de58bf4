"""The length of the next draft: by hand, and that decoding with changing lengths loses nothing."""

from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency
from scripted import ScriptedHead
from torch import Tensor

from draftsmith.eval.adaptive import HOPE, KEPT, TRUST, Pace, PacedProposer, best_length, drafting
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.tree import Paced, chain
from draftsmith.eval.verifier import Request, decode
from draftsmith.heads.kinds import KINDS
from draftsmith.sampling import GREEDY, Sampling
from draftsmith.target import Target

CHEAP, DEAR = (1.0, 1.05, 1.1, 1.15, 1.2), (1.0, 1.5, 2.0, 2.5, 3.0)
UNPAYABLE = (1.0, 3.0, 5.0, 7.0, 9.0)


def pace(*passes: tuple[int, int]) -> Pace:
    found = Pace.of(4)
    for proposed, accepted in passes:
        found.count(proposed, accepted)
    return found


# -- the rule --------------------------------------------------------------------------------------------------


def test_the_rates_by_hand() -> None:
    assert Pace.of(3).rates() == pytest.approx([HOPE] * 3)  # what was never seen is hoped for
    first = (1 + TRUST * HOPE) / (1 + TRUST)
    assert pace((2, 1)).rates() == pytest.approx([first, *[(TRUST * first) / (1 + TRUST)] * 3])  # and is like the one before
    tried, right = 1 + KEPT, KEPT
    assert pace((1, 1), (1, 0)).rates()[0] == pytest.approx((right + TRUST * HOPE) / (tried + TRUST))
    assert pace((4, 4)).tokens()[1] == pytest.approx(1 + first)
    assert all(0 < rate < 1 for rate in pace(*[(4, 4)] * 99, *[(4, 0)] * 99).rates())


@pytest.mark.parametrize(
    ("passes", "costs", "length"),
    [
        ([(4, 4)] * 20, CHEAP, 4),
        ([(4, 4)] * 20, (1.0,) * 5, 4),
        ([(4, 2)] * 20, (1.0, 1.2, 1.4, 1.6, 1.8), 2),
        ([(4, 0)] * 20, CHEAP, 1),
        ([(4, 0)] * 20, DEAR, 0),
        ([(4, 1)] * 20, DEAR, 1),
        ([(4, 4)] * 20, UNPAYABLE, 0),
        ([], UNPAYABLE, 0),
        ([(4, 0)] * 20 + [(4, 4)] * 20, CHEAP, 4),  # the past is forgotten
        ([(4, 4)] * 20 + [(4, 0)] * 20, DEAR, 0),
    ],
)
def test_the_length_follows_the_drafts(passes: list[tuple[int, int]], costs: tuple[float, ...], length: int) -> None:
    assert best_length([pace(*passes)], costs) == length


def test_the_best_length_is_the_best() -> None:
    own = pace((4, 3), (4, 1), (4, 4), (4, 0))
    for each in (0.01, 0.1, 0.2, 0.4, 0.8):
        costs = [1 + each * length for length in range(5)]
        speeds = [tokens / cost for tokens, cost in zip(own.tokens(), costs, strict=True)]
        assert speeds[best_length([own], costs)] == max(speeds)


def test_hope_returns_when_nothing_is_drafted() -> None:
    own = pace(*[(4, 0)] * 20)
    waited = 0
    while not best_length([own], DEAR):
        own.count(0, 0)
        waited += 1
    assert 5 < waited < 50


def test_sequences_that_share_a_pass_are_told_the_same() -> None:
    good, bad = pace(*[(4, 4)] * 20), pace(*[(4, 0)] * 20)
    alone = best_length([good], DEAR), best_length([bad], DEAR)
    assert alone == (4, 0)
    assert best_length([good, bad], DEAR) in range(1, 5) and best_length([good, *[bad] * 9], DEAR) == 0


# -- decoding --------------------------------------------------------------------------------------------------


class Moody(ScriptedHead):
    """Knows the texts, and says what they say in every other stretch of eight tokens; otherwise it is wrong."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__(128, torch.arange(128), taps=[1])
        self.texts = texts

    def logits(self, committed: list[int], path: list[int]) -> Tensor:
        text = next(text for text in self.texts if text[: len(committed)] == committed)
        at, row = len(committed) + len(path), torch.zeros(128)
        row[(([*text, *[0] * 9])[at] + (at // 8) % 2) % 128] = 1
        return row


PROMPTS = [[5, 9, 7], [11], [3, 4, 5, 6, 7, 8], [90, 12], [33, 44, 55]]
NEW = 40


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("costs", [CHEAP, DEAR, UNPAYABLE, (1.0,) * 5], ids=["cheap", "dear", "unpayable", "free"])
def test_the_greedy_text_stays_the_targets(lively_target: Target, costs: tuple[float, ...], batch: int) -> None:
    asked = [Request(prompt, NEW) for prompt in PROMPTS]
    plain = decode(lively_target, None, asked).generations
    head = Moody([[*prompt[1:], *own.tokens] for prompt, own in zip(PROMPTS, plain, strict=True)])
    found = decode(lively_target, drafting(head, Paced(4, costs)), asked, batch=batch).generations
    assert [own.tokens for own in found] == [own.tokens for own in plain]
    lengths = {proposed for own in found for proposed in own.proposed}
    if costs == DEAR:
        assert {0} < lengths  # it gives up, and tries again
    elif costs == UNPAYABLE:
        assert lengths == {0}
    else:
        assert 4 in lengths and (costs != CHEAP or len(lengths) > 1)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "draft_model"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)], ids=["greedy", "T=1"])
def test_every_kind_of_head_drafts_in_changing_lengths(lively_target: Target, kind: str, sampling: Sampling) -> None:
    torch.manual_seed(0)
    head = KINDS[kind].create(lively_target, KINDS[kind].Options(), None, 4, torch.arange(128)).eval()

    def asked() -> list[Request]:
        return [Request(prompt, 20, torch.Generator().manual_seed(i)) for i, prompt in enumerate(PROMPTS)]

    found = decode(lively_target, drafting(head, Paced(4, DEAR)), asked(), sampling).generations
    assert len({proposed for own in found for proposed in own.proposed}) > 1
    plain = decode(lively_target, None, asked(), sampling).generations
    assert [own.tokens for own in found] == [own.tokens for own in plain]  # one number is drawn for one token either way


def test_free_lengths_draft_as_a_fixed_chain_does(lively_target: Target) -> None:
    torch.manual_seed(0)
    head = KINDS["eagle3"].create(lively_target, KINDS["eagle3"].Options(), None, 4, torch.arange(128)).eval()
    asked = [Request(prompt, 20) for prompt in PROMPTS]
    paced = PacedProposer(HeadProposer(head, chain(4)), Paced(4, (1.0,) * 5))
    found, fixed = (decode(lively_target, each, asked).generations for each in (paced, paced.proposer))
    assert [own.proposed for own in found] == [own.proposed for own in fixed]
    assert [own.accepted for own in found] == [own.accepted for own in fixed]
    about = paced.described()
    assert about["name"] == "chain:4,adapt" and about["length"] == 4 and about["costs"] == [1.0] * 5


def test_drawn_drafts_of_changing_length_keep_the_distribution(lively_target: Target) -> None:
    """The first two tokens behind the prefill's, drawn with drafts and without: a chi-square test of the two samples."""

    class Near(ScriptedHead):
        def logits(self, committed: list[int], path: list[int]) -> Tensor:
            read = torch.tensor([[PROMPTS[0][0], *committed, *path]])
            last = lively_target.features(read, ()).last[0, -1]
            return lively_target.logits(last[None])[0] / 3

    head, sampling = Near(128, torch.arange(128)), Sampling(1.0, top_k=3)

    def drawn(head: ScriptedHead | None, seed: int) -> list[tuple[int, ...]]:
        generator = torch.Generator().manual_seed(seed)
        asked = [Request(PROMPTS[0], 4, generator) for _ in range(400)]
        proposer = drafting(head, Paced(2, (1.0, 1.4, 1.8)), drawn=True) if head else None
        return [tuple(own.tokens[1:3]) for own in decode(lively_target, proposer, asked, sampling).generations]

    ours, plain = drawn(head, 1), drawn(None, 2)
    cells = sorted({*ours, *plain})
    table = [[texts.count(cell) for cell in cells] for texts in (ours, plain)]
    common = [(a, b) for a, b in zip(*table, strict=True) if a + b >= 10]
    found: Any = chi2_contingency([list(row) for row in zip(*common, strict=True)])
    assert found.pvalue > 1e-3
