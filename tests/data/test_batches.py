import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from draftsmith.data.batches import Place, collate, epoch_plan, pack, share
from draftsmith.data.chat import Encoded

GOLDEN = [[1, 2], [3], [0, 4]]
LENGTHS = [(i * 7919) % 500 + 1 for i in range(1003)]


def test_collate_pads_on_the_right_and_masks_the_padding() -> None:
    examples = [Encoded(np.arange(n, dtype=np.int32) + 1, np.ones(n, bool)) for n in (5, 9, 14)]
    batch = collate(examples, [2, 0], pad_id=3, width=None)
    assert batch.ids.shape == batch.mask.shape == batch.positions.shape == (2, 14)
    assert (batch.ids.dtype, batch.mask.dtype) == (torch.int64, torch.bool)
    assert batch.ids[1].tolist() == [1, 2, 3, 4, 5] + [3] * 9
    assert batch.mask.sum(1).tolist() == [14, 5]  # token 3 within the row stays supervised
    assert batch.places == {2: Place(0, slice(0, 14)), 0: Place(1, slice(0, 5))}
    assert collate(examples, [], 0, None).ids.shape == (0, 0)


def test_packed_examples_share_lines_and_keep_their_own_positions() -> None:
    examples = [Encoded(np.arange(n, dtype=np.int32) + 10 * n, np.ones(n, bool)) for n in (3, 5, 4, 2)]
    batch = collate(examples, [0, 1, 2, 3], pad_id=0, width=8)
    assert batch.ids.tolist() == [[50, 51, 52, 53, 54, 20, 21], [40, 41, 42, 43, 30, 31, 32]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 0, 1, 2]]
    assert batch.mask.tolist() == [[0, 1, 1, 1, 1, 0, 1], [0, 1, 1, 1, 0, 1, 1]], "no first token has a predecessor"
    ragged = collate(examples, [0, 1], pad_id=0, width=5)
    assert ragged.positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1]] and ragged.ids[1].tolist() == [30, 31, 32, 0, 0]
    assert {row: batch.ids[place.line, place.tokens].tolist() for row, place in batch.places.items()} == {
        row: example.ids.tolist() for row, example in enumerate(examples)
    }


def test_packing_keeps_within_its_width_and_saves_lines() -> None:
    lengths = dict(enumerate(LENGTHS[:200]))
    for width, most in ((512, 512), (300, max(lengths.values()))):
        places = pack(lengths, width)
        used = np.zeros((max(place.line for place in places.values()) + 1, most), int)
        for row, place in places.items():
            assert place.tokens.stop - place.tokens.start == lengths[row] and place.tokens.stop <= most
            used[place.line, place.tokens] += 1
        assert used.max() == 1, "no two rows overlap"
        assert len(used) <= 1.05 * sum(lengths.values()) / most + 1


def test_packed_lines_are_of_like_length() -> None:
    places = pack({row: 40 for row in range(4)}, 120)
    assert sorted((place.line, place.tokens.stop) for place in places.values()) == [(0, 40), (0, 80), (1, 40), (1, 80)]


@pytest.mark.parametrize("batch_size", [1, 4, 7, 2000])
def test_every_row_comes_once_an_epoch(batch_size: int) -> None:
    plan = epoch_plan(LENGTHS, batch_size, seed=1, epoch=0)
    assert sorted(row for batch in plan for row in batch) == list(range(len(LENGTHS)))
    sizes = sorted(map(len, plan))
    assert sizes[1:] == [batch_size] * (len(plan) - 1)
    assert sizes[0] == len(LENGTHS) % batch_size or batch_size


def test_the_plan_is_a_function_of_its_arguments() -> None:
    plan = epoch_plan(LENGTHS, 4, seed=1, epoch=2)
    random.seed(5)
    torch.manual_seed(5)
    assert plan == epoch_plan(list(LENGTHS), 4, seed=1, epoch=2)
    assert plan != epoch_plan(LENGTHS, 4, seed=1, epoch=3)
    assert plan != epoch_plan(LENGTHS, 4, seed=2, epoch=2)
    assert epoch_plan([3, 1, 2, 9, 4], 2, seed=0, epoch=0) == GOLDEN  # in another process too


def test_batches_hold_rows_of_like_length_in_random_order() -> None:
    plan = epoch_plan(LENGTHS, 8, seed=1, epoch=0)
    padded = sum(max(LENGTHS[row] for row in batch) * len(batch) for batch in plan)
    assert padded < 1.1 * sum(LENGTHS)
    longest = [max(LENGTHS[row] for row in batch) for batch in plan]
    rising = sum(b > a for a, b in pairwise(longest))
    assert 0.35 < rising / len(longest) < 0.65
    assert epoch_plan([], 4, 0, 0) == []


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_rows", [1, 2, 8])
def test_ranks_share_a_batch_and_meet_equally_often(world: int, micro_rows: int) -> None:
    for rows in ([4, 9, 1, 7, 3], [4], [4, 9, 1, 7, 3, 0, 2, 8]):
        shares = [share(rows, rank, world, micro_rows) for rank in range(world)]
        assert sorted(row for own in shares for micro in own for row in micro) == sorted(rows)
        assert len({len(own) for own in shares}) == 1
        assert all(len(micro) <= micro_rows for own in shares for micro in own)
        assert [row for micro in shares[0] for row in micro] == rows[::world]
        assert all(shares[0])  # nobody meets more often than needed


def test_a_rank_without_rows_gets_empty_micro_batches() -> None:
    assert share([5, 6, 7], 1, 2, 1) == [[6], []]
    assert share([5], 1, 2, 4) == [[]]
