"""What a run says at its end."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from workplace import SIX_STEPS, build, recipe_in

from draftsmith.target import Target
from draftsmith.train.loop import train
from draftsmith.train.summary import told


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """Its training data ends with a row that no answer is in."""
    folder = build(tmp_path_factory.mktemp("summary"), tiny_target, *SIX_STEPS, rows=21)
    with open(folder / "train.jsonl", "a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    return folder


def test_a_summary_adds_up_and_says_what_was_skipped(place: Path) -> None:
    scores = iter([1.5, 2.5, 2.5])
    found = train(recipe_in(place, "summed"), score=lambda target, head: next(scores))["summary"]
    assert json.loads((place / "summed" / "summary.json").read_text()) == found
    rows = [json.loads(line) for line in (place / "summed" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["part"] == "train"]
    assert (found["steps"], found["best_tau"], found["best_step"]) == (6, 2.5, 3), "the first of two that are as good"
    for key in ("tokens", "supervised_tokens"):
        assert found[key] == sum(row[key] for row in steps) > 0
    assert found["seconds"]["training"] == pytest.approx(sum(row["seconds"] for row in steps))
    assert sum(found["seconds"][part] for part in ("training", "evaluation")) < found["seconds"]["this_start"]
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["seconds"]["training"])
    assert found["skipped"] == {"rows": {"train": {"no assistant turn": 1}, "held_out": {}}, "damaged_rows": 0, "steps": 0}
    assert found["peak_memory"] == max(row["peak_memory"] for row in steps)
    text = told(found).splitlines()
    assert text[0].startswith("6 steps: ") and "left out: train rows dropped (no assistant turn: 1)" in text
    assert f"best head (τ 2.500, by the verifier, of step 3): {place}/summed/head" in text
    assert text[-len(found["next"]) :] == [f"  {command}" for command in found["next"]]


def test_a_resumed_run_is_summed_over_its_starts(place: Path) -> None:
    recipe = recipe_in(place, "twice", "train.checkpoint_every=4")
    first = train(recipe)["summary"]
    AcceleratorState._reset_state()
    second = train(recipe, resume=True)["summary"]
    assert first["steps"] == second["steps"] == 6 and first["tokens"] == second["tokens"]
    assert (first["best_tau"], first["best_step"]) == (second["best_tau"], second["best_step"])
    assert second["tau_by"] == "simulated"


@pytest.mark.slow
def test_the_commands_it_names_run(place: Path) -> None:
    """As they stand, from the directory that the run was started in."""
    commands = train(recipe_in(place, "a run", "eval.tree=chain:2"))["summary"]["next"]
    verbs = [shlex.split(command)[1] for command in commands]
    assert verbs == ["eval", "diagnose", "export"]
    for command in (commands[0], commands[2]):  # this target's answers are too short to diagnose
        program = [sys.executable, "-c", "from draftsmith.cli import main; main()", *shlex.split(command)[1:]]
        done = subprocess.run(program, cwd=place, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}: {done.stderr}"
