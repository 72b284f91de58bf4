from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.data.chat import Encoded
from draftsmith.data.features import OnlineFeatures, remembered_bytes
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

    def counted(ids: Any, taps: Any) -> Any:
        seen.append(len(ids))
        return compute(ids, taps)

    monkeypatch.setattr(tiny_target, "features", counted)
    return seen


@pytest.mark.parametrize("remember", [False, True])
def test_case_18_a_row_does_not_feel_its_batch(tiny_target: Target, remember: bool) -> None:
    examples = rows(5, 9, 14)
    together = OnlineFeatures(tiny_target, examples, TAPS, remember).batch([0, 1, 2])
    assert together.ids.shape == together.mask.shape == (3, 14)
    assert together.features.taps.shape == (3, 14, 3 * 32) and together.features.last.shape == (3, 14, 32)
    for row, example in enumerate(examples):
        alone = OnlineFeatures(tiny_target, examples, TAPS, remember).batch([row])
        length = len(example.ids)
        assert alone.ids[0].tolist() == together.ids[row, :length].tolist() == example.ids.tolist()
        assert together.mask[row].tolist() == example.mask.tolist() + [False] * (14 - length)
        torch.testing.assert_close(together.features.taps[row, :length], alone.features.taps[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(together.features.last[row, :length], alone.features.last[0], atol=1e-5, rtol=0)
        assert not together.features.last[row, length:].any()


def test_the_states_are_the_librarys(tiny_target: Target) -> None:
    examples = rows(6)
    features = OnlineFeatures(tiny_target, examples, (0, 2, 3), False).batch([0]).features
    ids = torch.tensor(examples[0].ids, dtype=torch.long)[None]
    states = tiny_target.model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(features.taps, torch.cat([states[k] for k in (0, 2, 3)], -1))
    torch.testing.assert_close(features.last, states[-1])


def test_remembered_rows_do_not_run_the_target_again(tiny_target: Target, runs: list[int]) -> None:
    source = OnlineFeatures(tiny_target, rows(5, 9, 14), TAPS, remember=True)
    first = source.batch([0, 2])
    mixed = source.batch([2, 1, 0])
    assert runs == [2, 1]  # the second time only the new row
    assert torch.equal(mixed.features.taps[[2, 0]], first.features.taps)
    assert torch.equal(mixed.features.last[[2, 0]], first.features.last)
    again = source.batch([2, 1, 0])
    assert runs == [2, 1]
    assert torch.equal(again.features.taps, mixed.features.taps)


def test_without_remembering_the_target_runs_each_time(tiny_target: Target, runs: list[int]) -> None:
    source = OnlineFeatures(tiny_target, rows(5, 9), TAPS, remember=False)
    source.batch([0, 1])
    source.batch([0, 1])
    assert runs == [2, 2] and not source.remembered


def test_remembered_bytes_are_what_is_held(tiny_target: Target) -> None:
    examples = rows(5, 9, 14)
    source = OnlineFeatures(tiny_target, examples, TAPS, remember=True)
    source.batch([0, 1, 2])
    held = [tensor for own in source.remembered.values() for tensor in (own.taps, own.last)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == remembered_bytes(examples, tiny_target, TAPS)
    assert remembered_bytes(examples, tiny_target, TAPS) == 28 * 4 * 32 * 4
    assert {tensor.dtype for tensor in held} == {tiny_target.dtype}


def test_a_batch_without_rows(tiny_target: Target, runs: list[int]) -> None:
    batch = OnlineFeatures(tiny_target, rows(5), TAPS, remember=True).batch([])
    assert batch.ids.shape == batch.mask.shape == (0, 0)
    assert batch.features.taps.shape == (0, 0, 96) and batch.features.last.shape == (0, 0, 32)
    assert runs == []


def test_no_taps_are_allowed(tiny_target: Target) -> None:
    assert OnlineFeatures(tiny_target, rows(5), (), False).batch([0]).features.taps.shape == (1, 5, 0)


def test_rows_and_taps_beyond_the_target(tiny_target: Target) -> None:
    with pytest.raises(
        UserError, match="a conversation of 65 tokens is longer than the 64 positions of 'tiny': set max_length to at most 64."
    ):
        OnlineFeatures(tiny_target, rows(65), TAPS, False)
    with pytest.raises(UserError, match="tap 5 is outside the target"):
        OnlineFeatures(tiny_target, rows(5), (5,), False)
