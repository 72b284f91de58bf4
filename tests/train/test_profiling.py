"""A trace of a few steps, and that it changes nothing."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from draftsmith.train.profiling import profiled


def traced_steps(folder: Path) -> set[int]:
    """The steps, counted from 0, of the one trace in a folder."""
    events = json.loads(gzip.decompress(next(folder.glob("*.json.gz")).read_bytes()))["traceEvents"]
    names = [event["name"] for event in events]
    assert "aten::mm" in names
    return {int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#")}


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize(
    ("asked", "first", "last", "traced", "name"),
    [
        (2, 1, 10, {3, 4}, "steps-4-5"),
        (2, 6, 10, {3, 4}, "steps-9-10"),  # up to a resumed run's end
        (4, 1, 5, {1, 2, 3, 4}, "steps-2-5"),  # no room for the whole warm-up
        (9, 4, 5, {0, 1}, "steps-4-5"),  # nor for all that was asked
    ],
)
def test_the_steps_after_a_warm_up_are_traced(
    tmp_path: Path, asked: int, first: int, last: int, traced: set[int], name: str
) -> None:
    with profiled(asked, first, last, tmp_path / "profile") as step:
        for _ in range(first, last + 1):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            step()
    assert {file.name for file in (tmp_path / "profile").iterdir()} == {f"{name}.json.gz", f"{name}.txt"}
    assert traced_steps(tmp_path / "profile") == traced
    table = (tmp_path / "profile" / f"{name}.txt").read_text()
    assert "aten::mm" in table and "Self CPU" in table


@pytest.mark.parametrize(("asked", "first"), [(0, 1), (3, 11)])
def test_nothing_is_traced_unasked_or_where_no_step_is_left(tmp_path: Path, asked: int, first: int) -> None:
    with profiled(asked, first, 10, tmp_path / "profile") as step:
        step()
    assert not list(tmp_path.iterdir())


def test_a_profile_that_cannot_be_written_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile").write_text("in the way")
    with profiled(1, 1, 5, tmp_path / "profile") as step:
        for _ in range(5):
            step()
    assert "WARNING: the profile could not be written" in capsys.readouterr().err
