from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.data.batches import collate
from draftsmith.data.chat import Encoded
from draftsmith.data.features import Memory, OnlineFeatures
from draftsmith.errors import UserError
from draftsmith.target import Target

TAPS = (1, 2, 4)


def rows(*lengths: int) -> list[Encoded]:
    draw = np.random.default_rng(0)
    return [Encoded(draw.integers(0, 128, n).astype(np.int32), draw.random(n) < 0.5) for n in lengths]


@pytest.fixture
def runs(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each run of the target had."""
    seen: list[int] = []
    compute = tiny_target.features

    def counted(ids: Any, taps: Any, positions: Any = None) -> Any:
        seen.append(len(ids))
        return compute(ids, taps, positions)

    monkeypatch.setattr(tiny_target, "features", counted)
    return seen


@pytest.mark.parametrize("width", [None, 14, 20])
@pytest.mark.parametrize("shelf", [lambda: None, Memory], ids=["online", "memory"])
def test_case_18_a_row_does_not_feel_its_batch(tiny_target: Target, shelf: Any, width: int | None) -> None:
    examples = rows(5, 9, 14)
    source = OnlineFeatures(tiny_target, examples, TAPS, shelf(), width)
    for _ in range(2):  # the second time from the shelf, where there is one
        together = source.batch([0, 1, 2])
        lines, time = together.ids.shape
        assert (lines, time) == {None: (3, 14), 14: (2, 14), 20: (2, 14)}[width] and together.tokens == 28
        assert together.features.taps.shape == (lines, time, 3 * 32) and together.features.last.shape == (lines, time, 32)
        places = collate(examples, [0, 1, 2], 0, width).places
        for row, example in enumerate(examples):
            alone = OnlineFeatures(tiny_target, examples, TAPS).batch([row])
            line, own = places[row].line, places[row].tokens
            assert alone.ids[0].tolist() == together.ids[line, own].tolist() == example.ids.tolist()
            assert together.mask[line, own].tolist()[1:] == example.mask.tolist()[1:]
            torch.testing.assert_close(together.features.taps[line, own], alone.features.taps[0], atol=1e-5, rtol=0)
            torch.testing.assert_close(together.features.last[line, own], alone.features.last[0], atol=1e-5, rtol=0)
            together.features.taps[line, own] = together.features.last[line, own] = 0
        assert not together.features.taps.any() and not together.features.last.any(), "zeros on the padding"


def test_the_states_are_the_librarys(tiny_target: Target) -> None:
    examples = rows(6)
    features = OnlineFeatures(tiny_target, examples, (0, 2, 3)).batch([0]).features
    ids = torch.tensor(examples[0].ids, dtype=torch.long)[None]
    states = tiny_target.model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(features.taps, torch.cat([states[k] for k in (0, 2, 3)], -1))
    torch.testing.assert_close(features.last, states[-1])


def test_rows_in_memory_do_not_run_the_target_again(tiny_target: Target, runs: list[int]) -> None:
    shelf = Memory()
    source = OnlineFeatures(tiny_target, rows(5, 9, 14), TAPS, shelf)
    first = source.batch([0, 2])
    mixed = source.batch([2, 1, 0])
    assert runs == [2, 1]  # the second time only the new row
    assert torch.equal(mixed.features.taps[[2, 0]], first.features.taps)
    assert torch.equal(mixed.features.last[[2, 0]], first.features.last)
    again = source.batch([2, 1, 0])
    assert runs == [2, 1]
    assert torch.equal(again.features.taps, mixed.features.taps)
    held = [tensor for own in shelf.rows.values() for tensor in (own.taps, own.last)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 28 * 4 * 32 * 4, "no view keeps a padded batch alive"
    assert {tensor.dtype for tensor in held} == {tiny_target.dtype}


def test_online_the_target_runs_each_time(tiny_target: Target, runs: list[int]) -> None:
    source = OnlineFeatures(tiny_target, rows(5, 9), TAPS)
    source.batch([0, 1])
    source.batch([0, 1])
    assert runs == [2, 2]


@pytest.mark.parametrize("width", [None, 8])
def test_a_batch_without_rows(tiny_target: Target, runs: list[int], width: int | None) -> None:
    source = OnlineFeatures(tiny_target, rows(5), TAPS, Memory(), width)
    runs.clear()
    batch = source.batch([])
    assert batch.ids.shape == batch.mask.shape == (0, 0)
    assert batch.features.taps.shape == (0, 0, 96) and batch.features.last.shape == (0, 0, 32)
    assert runs == []


def test_no_taps_are_allowed(tiny_target: Target) -> None:
    assert OnlineFeatures(tiny_target, rows(5), ()).batch([0]).features.taps.shape == (1, 5, 0)


def test_rows_and_taps_beyond_the_target(tiny_target: Target) -> None:
    with pytest.raises(
        UserError, match="a conversation of 65 tokens is longer than the 64 positions of 'tiny': set max_length to at most 64."
    ):
        OnlineFeatures(tiny_target, rows(65), TAPS)
    with pytest.raises(UserError, match="tap 5 is outside the target"):
        OnlineFeatures(tiny_target, rows(5), (5,))


def test_packing_is_refused_where_the_target_would_mix(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = tiny_target.decoder.forward
    monkeypatch.setattr(tiny_target.decoder, "forward", lambda position_ids=None, **rest: forward(**rest))
    OnlineFeatures(tiny_target, rows(5), TAPS)
    with pytest.raises(UserError, match="set data.pack to false"):
        OnlineFeatures(tiny_target, rows(5), TAPS, width=16)
