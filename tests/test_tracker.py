"""A tracker that is missing, unreachable or breaks costs nothing but a warning."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftsmith.tracker import Tracker, flat

# tensorboard's own thread, on the disk that fills; told whenever it is collected
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

KEPT = "metrics.jsonl has all numbers."
SETTINGS = {"train": {"lr": 0.5, "betas": [0.9, 0.95], "max_steps": None}, "output": "runs/x"}


def tracker(kind: str, directory: Path) -> Tracker:
    return Tracker(kind, "run", directory, SETTINGS, "metrics.jsonl")


def test_tensorboard_gets_numbers_and_hyperparameters(tmp_path: Path) -> None:
    own = tracker("tensorboard", tmp_path)
    own.log({"train/loss": 2.5}, step=3)
    own.finish()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("train/loss")] == [(3, 2.5)]
    written = next(tmp_path.rglob("hparams.yml")).read_text()
    assert "train.lr: 0.5" in written and "output: runs/x" in written


def test_hyperparameters_are_one_table_of_plain_values() -> None:
    assert flat(SETTINGS) == {"train.lr": 0.5, "train.betas": "[0.9, 0.95]", "train.max_steps": "None", "output": "runs/x"}


def test_no_tracker_writes_nothing(tmp_path: Path) -> None:
    own = tracker("none", tmp_path)
    own.log({"train/loss": 2.5}, step=3)
    own.finish()
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_is_not_installed_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    for name in ("torch.utils.tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    tracker("tensorboard", tmp_path).log({"train/loss": 2.5}, step=3)
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"WARNING: tensorboard is not installed: pip install tensorboard. Nothing more is logged to it; {KEPT}"


def test_a_folder_that_cannot_be_made_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    own = tracker("tensorboard", tmp_path)
    for step in range(3):
        own.log({"train/loss": 2.5}, step=step)
    own.finish()
    said = capsys.readouterr().err
    assert said.count("WARNING") == 1 and "tensorboard failed" in said and KEPT in said


def test_a_disk_that_fills_in_the_middle_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tracker("tensorboard", tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # no file of this process can grow further
    try:
        for step in range(2000):
            own.log({"train/loss": 2.5}, step=step)
        own.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert said.count("WARNING: tensorboard failed") == 1 and own.own is None


ALONE = """
import json, sys, time
from pathlib import Path
import psutil
from draftsmith.tracker import Tracker
own = Tracker("wandb", "run", Path(sys.argv[1]), {"train": {"lr": 0.5}}, "metrics.jsonl")
began = own.own is not None
own.log({"train/loss": 2.5}, step=0)
if sys.argv[2] == "broken":
    for process in psutil.Process().children(recursive=True):  # wandb's own server
        process.kill()
        process.wait()
    for step in range(1, 50):
        own.log({"train/loss": 2.5}, step=step)
        time.sleep(0.02)
lives = own.own is not None
own.finish()
print(json.dumps([began, lives]))
"""


def wandb_alone(directory: Path, how: str, **environment: str) -> tuple[list[bool], str]:
    """A process that logs to wandb: whether its run began and was alive at the end, and what stderr said."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(directory), how],
        env={**kept, "WANDB_SILENT": "true", "HOME": str(directory), **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_wandb_without_a_key_stays_offline(tmp_path: Path) -> None:
    assert wandb_alone(tmp_path, "well") == ([True, True], "")
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_a_wandb_server_that_is_unreachable_is_named_once(tmp_path: Path) -> None:
    address = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40, "WANDB_INIT_TIMEOUT": "3"}
    found, said = wandb_alone(tmp_path, "well", **address, WANDB_MODE="online")
    assert found == [False, False] and said.count("WARNING: wandb failed") == 1 and "127.0.0.1:9" in said and KEPT in said


def test_a_wandb_that_dies_in_the_middle_is_named_once(tmp_path: Path) -> None:
    found, said = wandb_alone(tmp_path, "broken")
    assert found == [True, False] and said.count("WARNING: wandb failed") == 1 and KEPT in said
