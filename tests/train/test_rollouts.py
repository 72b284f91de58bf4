"""On-policy batches: the draft's own continuation behind the data's text, and what the target says there."""

import numpy as np
import pytest
import torch
from cases import make_head

from draftsmith.data.chat import Encoded
from draftsmith.data.features import FeatureBatch, OnlineFeatures
from draftsmith.eval.tree import chain
from draftsmith.heads.drafting import draft
from draftsmith.target import Target
from draftsmith.train.objectives import Objective
from draftsmith.train.rollouts import rollouts
from draftsmith.train.step import judged

LENGTH = 6


def data(target: Target, width: int | None = None) -> FeatureBatch:
    """Three examples, the second of which supervises nothing."""
    draw = np.random.default_rng(0)
    masks = [np.arange(n) % 9 > 2 for n in (14, 9, 20)]
    masks[1][:] = False
    examples = [Encoded(draw.integers(3, 111, len(mask)).astype(np.int32), mask) for mask in masks]
    return OnlineFeatures(target, examples, [1, 2, 3], width=width).batch([0, 1, 2])


@pytest.mark.parametrize("width", [None, 64])
def test_a_rollout_is_the_heads_own_draft_behind_the_datas_text(lively_target: Target, width: int | None) -> None:
    head = make_head(lively_target, "eagle3", taps=[1, 2, 3])
    batch = data(lively_target, width)
    texts = [line[:n].tolist() for line, n in zip(data(lively_target).ids, (14, 9, 20), strict=True)]
    rolled = rollouts(head, batch, lively_target, LENGTH, seed=3)
    assert len(rolled.ids) == (2 if width is None else 1)
    for ids, mask in zip(rolled.ids, rolled.mask, strict=True):
        marked = mask.nonzero().flatten().tolist()
        row = marked[0] - 1
        assert marked == list(range(row + 1, row + 2 + LENGTH))
        known = ids[: row + 2]
        (text,) = [text for text in texts if text[: row + 2] == known.tolist()]
        features = lively_target.features(torch.tensor([text]), [1, 2, 3]).rows((0, slice(0, row + 1)))
        own = draft(head, head.new_state(), features, known, chain(LENGTH), lively_target).tokens
        assert ids[row + 2 : marked[-1] + 1].tolist() == own
    again = rollouts(head, batch, lively_target, LENGTH, seed=3)
    others = [rollouts(head, batch, lively_target, LENGTH, seed=seed).ids for seed in range(4, 8)]
    assert torch.equal(again.ids, rolled.ids) and not all(torch.equal(other, rolled.ids) for other in others)


def test_a_rollout_ends_where_the_targets_context_does(lively_target: Target) -> None:
    head = make_head(lively_target, "eagle3", taps=[1, 2, 3])
    mask = np.arange(64) > 59  # all that can be taught is next to the end
    long = Encoded(np.random.default_rng(0).integers(3, 111, 64).astype(np.int32), mask)
    batch = OnlineFeatures(lively_target, [long], [1, 2, 3]).batch([0])
    for seed in range(4):
        rolled = rollouts(head, batch, lively_target, LENGTH, seed)
        assert rolled.ids.shape[1] == lively_target.max_positions and rolled.mask.any()


def test_where_nothing_is_supervised_nothing_is_rolled_out(tiny_target: Target) -> None:
    head, batch = make_head(tiny_target, "eagle3", taps=[1, 2, 3]), data(tiny_target)
    batch.mask.zero_()
    assert not rollouts(head, batch, tiny_target, LENGTH, seed=0).mask.any()


def test_learning_from_its_own_rollouts_makes_a_head_agree_with_the_target_there(lively_target: Target) -> None:
    head, batch = make_head(lively_target, "eagle3", depths=2, taps=[1, 2, 3]).train(), data(lively_target)
    optimizer, objective = torch.optim.AdamW(head.parameters(), lr=3e-3), Objective("kl")
    overlaps = []
    for step in range(80):
        rolled = rollouts(head, batch, lively_target, LENGTH, seed=step % 2)
        assert head.training
        loss, sums = judged(head, rolled, lively_target, objective, head.taught(rolled.ids, rolled.mask, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        overlaps.append(float(sums.overlap[0] / sums.rows[0]))
    assert sum(overlaps[-10:]) > 2 * sum(overlaps[:10])
