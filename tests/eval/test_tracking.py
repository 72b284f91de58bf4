"""What a tracker is told, and that a broken one costs nothing."""

import builtins
from pathlib import Path
from typing import Any

import pytest
from results import entry
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftsmith.eval.tracking import scalars, track


def test_tensorboard_reads_the_numbers_back(tmp_path: Path) -> None:
    result = entry(prompts=4)
    track([result, entry("ngram", 0.3, prompts=4)], "spec", "tensorboard", tmp_path)
    events = next(tmp_path.rglob("events.out.*"))
    read = EventAccumulator(str(events.parent))
    read.Reload()
    assert {"eval/eagle3/tau", "eval/ngram/speedup", "eval/eagle3/category/math/tau"} <= set(read.Tags()["scalars"])
    assert read.Scalars("eval/eagle3/tau")[0].value == pytest.approx(result["tau"])


def test_wandb_stays_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    track([entry(prompts=4)], "spec", "wandb", tmp_path)
    assert list(tmp_path.rglob("*.wandb"))
    captured = capsys.readouterr()
    assert not captured.out and "WARNING" not in captured.err  # stdout belongs to --json


def test_names_tell_results_apart() -> None:
    by_batch = scalars([entry(prompts=4), entry(prompts=4, batch=4)])
    assert {"eval/batch-1/tau", "eval/batch-4/tau"} <= by_batch.keys()
    assert all(isinstance(value, float) for value in by_batch.values())


def test_what_was_not_measured_is_not_logged() -> None:
    found = scalars([entry(prompts=4, speedup=None, ttft=None)])
    assert "eval/eagle3/tau" in found and not {"eval/eagle3/speedup", "eval/eagle3/ttft_mean"} & found.keys()


def test_a_tracker_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    track([entry(prompts=4)], "spec", "tensorboard", tmp_path / "file")  # no folder can be made there
    assert "tensorboard failed" in capsys.readouterr().err


def test_a_tracker_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_wandb(name: str, *rest: Any, **more: Any) -> Any:
        if name == "wandb":
            raise ModuleNotFoundError("No module named 'wandb'", name="wandb")
        return builtin(name, *rest, **more)

    builtin = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", no_wandb)
    track([entry(prompts=4)], "spec", "wandb", tmp_path)
    assert "wandb is not installed: pip install wandb" in capsys.readouterr().err
