"""The training run: the same curve however it is cut, exact resume, what is left on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file

from draftsmith.errors import UserError
from draftsmith.recipes.schema import Recipe, load_recipe
from draftsmith.train.loop import train

WORDS = "the cat sat on an old mat while ten men read their tea leaves and then went home".split()


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps its state for the whole process; every run here starts from none."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tiny_target) -> Path:
    """A saved tiny target, twenty conversations and a recipe."""
    folder = tmp_path_factory.mktemp("workplace")
    tiny_target.model.save_pretrained(folder / "target")
    tiny_target.tokenizer.save_pretrained(folder / "target")
    for name, rows in (("train", range(20)), ("held_out", range(20, 26))):
        lines = []
        for i in rows:
            reply = " ".join(WORDS[(i * k + k) % len(WORDS)] for k in range(1, 4 + i % 4))
            lines.append(json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": reply}]}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    recipe = f"""
target: {{name: {folder}/target, dtype: float32}}
data: {{train: train.jsonl, held_out: held_out.jsonl, max_length: 60}}
head: {{kind: eagle3, depths: 2, draft_vocab: 64}}
objective: {{loss: ce}}
train: {{epochs: 2, batch_size: 4, micro_batch_size: 4, lr: 1.0e-2, precision: "no", log_every: 1, eval_every: 5}}
eval: {{prompts: 0}}
output: {folder}/run
"""
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def recipe_in(workplace: Path, out: str, *changes: str) -> Recipe:
    return load_recipe(workplace / "recipe.yaml", [f"output={workplace}/{out}", *changes])


def curve(run: Path, part: str = "train") -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "part")} for row in rows if row["part"] == part]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in curve(run)]


@pytest.fixture(scope="module")
def whole_run(workplace) -> Path:
    """The run all others are compared with."""
    train(recipe_in(workplace, "whole"))
    return workplace / "whole"


def test_a_run_learns_and_leaves_its_directory(whole_run):
    assert losses(whole_run)[-1] < 0.9 * losses(whole_run)[0]
    assert {path.name for path in whole_run.iterdir()} >= {"recipe.yaml", "run.json", "metrics.jsonl", "head"}
    assert load_recipe(whole_run / "recipe.yaml").train.lr == 1e-2
    assert [row["step"] for row in curve(whole_run, "held_out")] == [0, 5, 10], "the initial head is scored too"
    assert set(curve(whole_run)[0]) >= {"accuracy_0", "accuracy_1", "tau_sim", "lr"}


def test_micro_batches_do_not_change_the_curve(workplace, whole_run):
    train(recipe_in(workplace, "micro", "train.micro_batch_size=1"))
    assert losses(workplace / "micro") == pytest.approx(losses(whole_run), rel=1e-4)


def launch(workplace: Path, out: str, *launcher: str) -> None:
    """Run the recipe through a launcher, on CPU processes."""
    command = [sys.executable, "-m", *launcher, "-m", "draftsmith.train", str(workplace / "recipe.yaml")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--set", f"output={workplace}/{out}"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_accelerate_launch_runs_a_recipe(workplace, whole_run):
    launch(workplace, "launched", "accelerate.commands.launch", "--num_processes", "1")
    assert losses(workplace / "launched") == pytest.approx(losses(whole_run), rel=1e-4)


def test_two_processes_give_the_curve_of_one(workplace, whole_run):
    launch(workplace, "two", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29611")
    assert json.loads((workplace / "two" / "run.json").read_text())["processes"] == 2
    assert losses(workplace / "two") == pytest.approx(losses(whole_run), rel=1e-4)
    for one, two in zip(curve(whole_run, "held_out"), curve(workplace / "two", "held_out"), strict=True):
        assert one == pytest.approx(two, rel=1e-4)


def test_resume_is_exact(workplace, whole_run):
    changes = ["train.checkpoint_every=3", "train.keep_checkpoints=1"]
    train(recipe_in(workplace, "resumed", *changes))
    run = workplace / "resumed"
    expected = (curve(run), load_file(run / "head" / "model.safetensors"))
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-9"]
    (run / "checkpoints" / ".step-10").mkdir()  # a checkpoint that was being written when the power went
    torch.manual_seed(99)
    AcceleratorState._reset_state()
    train(recipe_in(workplace, "resumed", *changes), resume=True)
    assert curve(run) == expected[0] == curve(whole_run)
    for name, tensor in load_file(run / "head" / "model.safetensors").items():
        assert torch.equal(tensor, expected[1][name])


def test_the_best_head_is_the_best_by_the_verifier(workplace):
    scores = iter([1.5, 2.5, 1.7])
    result = train(recipe_in(workplace, "scored"), score=lambda target, head: next(scores))
    held_out = curve(workplace / "scored", "held_out")
    assert result["best_tau"] == 2.5 and [row["tau"] for row in held_out] == [1.5, 2.5, 1.7]


def test_an_existing_output_is_refused(workplace, whole_run):
    with pytest.raises(UserError, match="exists"):
        train(recipe_in(workplace, "whole"))
    with pytest.raises(UserError, match="nothing to resume"):
        train(recipe_in(workplace, "absent"), resume=True)


def test_a_refused_start_touches_nothing(workplace, whole_run):
    for out in ("whole", "never"):
        with pytest.raises(UserError, match="absent.jsonl"):
            train(recipe_in(workplace, out, "data.train=absent.jsonl"), force=True)
    assert (whole_run / "head" / "model.safetensors").is_file() and not (workplace / "never").exists()


@pytest.mark.parametrize(("tracker", "trace"), [("tensorboard", "**/events.out.*"), ("wandb", "**/*.wandb")])
def test_trackers_write_offline(workplace, monkeypatch, tracker, trace):
    run = workplace / tracker
    monkeypatch.setenv("WANDB_DIR", str(run))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(recipe_in(workplace, tracker, f"train.tracker={tracker}", "train.max_steps=2"))
    assert list(run.glob(trace))


def test_medusa_trains_too(workplace):
    changes = ["head.kind=medusa", "head.options={lm_head: shared}", "head.draft_vocab=null", "objective.loss=ce"]
    train(recipe_in(workplace, "medusa", *changes))
    assert losses(workplace / "medusa")[-1] < losses(workplace / "medusa")[0]
