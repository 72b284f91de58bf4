"""What a run tells while it goes: rows, lines, the bar, and a tracker that may break under it."""

import json
import math
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from workplace import PLAIN, SIX_STEPS, build, curve, launch, on_cpu, recipe_in, several

from draftsmith.data.tally import Tally
from draftsmith.target import Target
from draftsmith.train import log
from draftsmith.train.loop import train
from draftsmith.train.prepare import read_examples

STEPS = 6
# tensorboard's own thread, where its folder vanishes; told whenever it is collected
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    return build(tmp_path_factory.mktemp("log"), tiny_target, *SIX_STEPS, rows=21)


def rows(run: Path) -> list[dict[str, Any]]:
    read = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in read if row["part"] == "train"]


def test_the_rows_count_every_token_once_an_epoch(place: Path) -> None:
    recipe = recipe_in(place, "counted")
    train(recipe)
    read = read_examples(recipe, "train", Target.load(str(place / "target"), "float32"), Tally())
    found = rows(place / "counted")
    assert sum(row["tokens"] for row in found) == 2 * sum(len(example.ids) for example in read)
    assert sum(row["supervised_tokens"] for row in found) == 2 * sum(int(example.mask.sum()) for example in read)
    for row in found:
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(row["tokens"])
        assert row["supervised_tokens_per_s"] * row["seconds"] == pytest.approx(row["supervised_tokens"])
        assert row["peak_memory"] > 1e7
    assert found[-1]["seconds_left"] == 0 < found[0]["seconds_left"]


@pytest.mark.parametrize(("quiet", "told"), [(0, range(1, STEPS + 1)), (math.inf, (1, STEPS))])
def test_a_cluster_log_shows_life_and_is_not_flooded(
    place: Path,
    quiet: float,
    told: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(log, "QUIET", quiet)
    train(recipe_in(place, f"quiet-{quiet}"))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ") and "tokens/s" in line]
    assert [line.split(":")[0] for line in said] == [f"step {step}/{STEPS}" for step in told]
    assert all("τ-sim" in line and "supervised)" in line and "GiB" in line and line.endswith(" left") for line in said)


def test_on_a_terminal_the_bar_says_it(place: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "draftsmith.train", str(place / "recipe.yaml"), f"--set=output={place}/on-a-terminal"]
    wide = {**on_cpu(), "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL, env=wide)
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 65536):
            said += piece
    except OSError:  # how a terminal without a writer ends
        pass
    os.close(ours)
    assert process.wait() == 0
    text = said.decode()
    assert "training" in text and "tokens/s" in text and "supervised)" in text and "τ-sim" in text
    assert f"step 1/{STEPS}:" not in text, "the lines are for those without a bar"


def test_a_tracker_gets_the_numbers_and_the_recipe(place: Path) -> None:
    run = place / "tracked"
    train(recipe_in(place, "tracked", "train.tracker=tensorboard"))
    read = EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    for key in ("loss", "tau_sim", "tokens_per_s", "supervised_tokens_per_s", "seconds_left", "peak_memory"):
        logged = [(event.step, event.value) for event in read.Scalars(f"train/{key}")]
        assert logged == [(row["step"], pytest.approx(row[key])) for row in rows(run)]
    assert [event.step for event in read.Scalars("held_out/tau_sim")] == [0, 3, 6]
    assert "train.lr: 0.01" in next(run.rglob("hparams.yml")).read_text()


def test_a_tracker_that_breaks_in_the_middle_is_named_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, seen = place / "broken", []

    def score(*_: object) -> float:
        """Called at every evaluation: at the second, in the middle of training, the tracker's folder vanishes."""
        seen.append(list((run / "tensorboard").glob("events*")))
        if len(seen) == 2:
            shutil.rmtree(run / "tensorboard")
        return 1.0

    train(recipe_in(place, "broken", "train.tracker=tensorboard"), score=score)
    assert [len(files) for files in seen] == [1, 1, 0] and len(rows(run)) == STEPS
    assert capsys.readouterr().err.count("WARNING: tensorboard failed") == 1


def test_a_tracker_that_is_not_installed_stops_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    for name in ("torch.utils.tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    train(recipe_in(place, "without", "train.tracker=tensorboard"))
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("tensorboard is not installed: pip install tensorboard") == 1
    assert f"{place}/without/metrics.jsonl has all numbers" in said and len(rows(place / "without")) == STEPS


@pytest.mark.slow
def test_a_tracker_that_is_unreachable_stops_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = {"BASE_URL": "http://127.0.0.1:9", "API_KEY": "a" * 40, "MODE": "online", "INIT_TIMEOUT": "3"}
    for key, value in server.items():
        monkeypatch.setenv(f"WANDB_{key}", value)
    said = launch(place, PLAIN, "unreachable", "train.tracker=wandb")
    assert said.count("WARNING: wandb failed") == 1 and len(rows(place / "unreachable")) == STEPS
    assert (place / "unreachable" / "head" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_main_process_alone_tells_and_for_all(place: Path) -> None:
    said = launch(place, several(2), "two", "train.tracker=tensorboard")
    train(recipe_in(place, "one"))
    assert said.count(f"step 1/{STEPS}:") == 1
    assert len(list((place / "two" / "tensorboard").glob("events*"))) == 1
    for ours, both in zip(curve(place / "one"), curve(place / "two"), strict=True):
        assert (ours["tokens"], ours["supervised_tokens"]) == (both["tokens"], both["supervised_tokens"])
    for row in rows(place / "two"):
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(row["tokens"]), "of both, not of one"
