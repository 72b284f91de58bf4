"""A place to train in: a tiny target, conversations and a recipe that takes a second; launches there, and how runs compare."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from draftsmith.recipes.schema import Recipe, load_recipe
from draftsmith.target import Target
from draftsmith.train.pace import CLOCKED

WORDS = "the cat sat on an old mat while ten men read their tea leaves and then went home".split()
CONFIGS = Path(__file__).parents[1] / "recipes" / "accelerate"
PLAIN = [sys.executable]
# of 21 rows; evaluated at 0, 3 and 6; four micro-batches each, but for the third and the last
SIX_STEPS = ("objective.loss=lk", "train.batch_size=8", "train.micro_batch_size=2", "train.eval_every=3")


def build(folder: Path, target: Target, *changes: str, rows: int = 20) -> Path:
    """Write target, data and recipe.yaml into ``folder``: ``rows`` conversations to train on, six held out, of unlike lengths.

    Without ``changes`` the recipe takes ten steps, evaluated at 0, 5 and 10.
    """
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    for name, own in (("train", range(rows)), ("held_out", range(rows, rows + 6))):
        lines = []
        for i in own:
            reply = " ".join(WORDS[(i * k + k) % len(WORDS)] for k in range(1, 4 + i % 4))
            lines.append(json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": reply}]}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"""
target: {{name: {folder}/target, dtype: float32}}
data: {{train: train.jsonl, held_out: held_out.jsonl, max_length: 60}}
head: {{kind: eagle3, depths: 2, draft_vocab: 64}}
objective: {{loss: ce}}
train: {{epochs: 2, batch_size: 4, micro_batch_size: 4, lr: 1.0e-2, precision: "no", log_every: 1, eval_every: 5}}
eval: {{prompts: 0}}
output: {folder}/run
""")
    if changes:
        recipe.write_text(load_recipe(recipe, list(changes)).to_yaml())
    return folder


def recipe_in(place: Path, out: str, *changes: str) -> Recipe:
    return load_recipe(place / "recipe.yaml", [f"output={place}/{out}", *changes])


def on_cpu() -> dict[str, str]:
    """The environment of processes whose runs are compared: sums are rounded by the number of threads."""
    return {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def several(processes: int, config: str = "cpu") -> list[str]:
    """What starts a program in ``processes`` CPU processes, by a file of recipes/accelerate/."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    return [*launcher, "--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(processes)]


def torchrun(processes: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]


def command(place: Path, launcher: list[str], out: str, *changes: str) -> list[str]:
    """The command line that runs the recipe; ``launcher``: what starts a program, PLAIN for one process."""
    sets = [f"--set={change}" for change in (f"output={place}/{out}", *changes)]
    program = [] if launcher[-1].endswith(".py") else ["-m", "draftsmith.train"]
    return [*launcher, *program, str(place / "recipe.yaml"), *sets]


def finished(full: list[str], environment: dict[str, str] | None = None) -> str:
    """Run a command line that must succeed; returns its stdout and stderr."""
    done = subprocess.run(full, env=environment or on_cpu(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def launch(place: Path, launcher: list[str], out: str, *changes: str) -> str:
    """Run the recipe through a launcher; returns what was said."""
    said = finished(command(place, launcher, out, *changes))
    asked = [int(launcher[i + 1]) for i, word in enumerate(launcher) if word in ("--num_processes", "--nproc_per_node")]
    assert json.loads((place / out / "run.json").read_text())["processes"] == (asked or [1])[0]
    return said


def curve(run: Path, part: str = "train") -> list[dict[str, Any]]:
    """The logged numbers of a part, those of the clock left out."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in (*CLOCKED, "part")} for row in rows if row["part"] == part]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in curve(run)]


def same_weights(*heads: Path) -> bool:
    """Whether head directories hold the same tensors to the bit."""
    first, *others = (load_file(head / "model.safetensors") for head in heads)
    return all(
        first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first) for other in others
    )


def uncut(run: Path, part: str) -> list[dict[str, Any]]:
    """The curve without what follows from how batches are cut."""
    return [{key: value for key, value in row.items() if key != "padding"} for row in curve(run, part)]
