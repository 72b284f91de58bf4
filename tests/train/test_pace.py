"""What a run counts of itself, and how that is put into words."""

import time

import pytest
import torch
from accelerate import Accelerator

from draftsmith.data.features import FeatureBatch
from draftsmith.target import Features
from draftsmith.train.pace import CLOCKED, Pace, brief, clock, peak_memory, short


def batch(lines: int, width: int, tokens: int, supervised: int) -> FeatureBatch:
    mask = torch.zeros(lines * width, dtype=torch.bool)
    mask[:supervised] = True
    states = torch.zeros(lines, width, 4)
    return FeatureBatch(
        torch.zeros(lines, width, dtype=torch.int64), mask.view(lines, width), Features(states, states), None, tokens
    )


def test_a_row_counts_what_was_read_since_the_last_one() -> None:
    pace, accelerator = Pace(), Accelerator(cpu=True)
    for _ in range(2):
        with pace.step():
            pace.count([batch(2, 10, 15, 6), batch(1, 10, 10, 4)])
    row = pace.row(accelerator, left=6)
    assert (row["tokens"], row["supervised_tokens"], row["padding"]) == (50, 20, pytest.approx(1 / 6))
    assert row["tokens_per_s"] == pytest.approx(50 / row["seconds"])
    assert row["supervised_tokens_per_s"] == pytest.approx(20 / row["seconds"])
    assert set(CLOCKED) < row.keys() and "skipped_steps" not in row
    pace.skipped += 1
    assert pace.row(accelerator, left=6).items() >= {"tokens": 0, "supervised_tokens": 0, "skipped_steps": 1}.items()
    assert "skipped_steps" not in pace.row(accelerator, left=6)


def test_the_clock_runs_in_steps_and_the_estimate_knows_what_lies_between() -> None:
    pace, accelerator = Pace(), Accelerator(cpu=True)
    time.sleep(0.1)  # before the first step: a resumed run's start
    for _ in range(4):
        with pace.step():
            time.sleep(0.01)
        time.sleep(0.02)  # an evaluation
    assert pace.began
    row, passed = pace.row(accelerator, left=8), time.perf_counter() - pace.began
    assert 0.04 <= row["seconds"] <= passed - 0.08
    assert 2 * 0.12 <= row["seconds_left"] <= 2 * passed, "eight steps more, after four"


def test_a_step_that_fails_has_taken_its_time_too() -> None:
    pace = Pace()
    with pytest.raises(RuntimeError), pace.step():
        raise RuntimeError
    assert pace.steps == 1 and pace.seconds > 0


def test_memory_is_the_most_ever_held() -> None:
    before = peak_memory()
    held = torch.ones(2**28, dtype=torch.uint8)
    del held
    assert peak_memory() >= max(before, 2**28)


@pytest.mark.parametrize(("number", "said"), [(0.4, "0"), (950, "950"), (12345, "12.3k"), (1_250_000, "1.25M")])
def test_counts_are_short(number: float, said: str) -> None:
    assert short(number) == said


@pytest.mark.parametrize(("seconds", "said"), [(0, "0:00"), (750, "12:30"), (14709, "4:05:09"), (100800, "1 d 04:00")])
def test_times_are_read_as_on_a_clock(seconds: float, said: str) -> None:
    assert clock(seconds) == said


def test_a_row_in_a_line() -> None:
    assert brief({}) == ""
    rates = {"tokens_per_s": 12345.0, "supervised_tokens_per_s": 900.0, "peak_memory": 3 * 2**30}
    told = "loss 2.346, τ-sim 1.83, 12.3k tokens/s (900 supervised), 3.0 GiB"
    assert brief({"step": 5, "loss": 2.3456, "tau_sim": 1.8349, **rates}) == told
