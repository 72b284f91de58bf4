"""A tiny target, twenty conversations and a recipe that trains on them in a second; and how runs of it are compared."""

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


def build(folder: Path, target: Target) -> Path:
    """Write target, data and recipe.yaml into ``folder``: ten steps, evaluated at 0, 5 and 10."""
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
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


def curve(run: Path, part: str = "train") -> list[dict[str, Any]]:
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


def command(workplace: Path, launcher: list[str], out: str, *changes: str) -> list[str]:
    """The command line that runs the recipe; ``launcher``: what stands between ``python -m`` and ``-m draftsmith.train``."""
    begin = [sys.executable, "-m", *launcher, "-m"] if launcher else [sys.executable, "-m"]
    sets = [f"--set={change}" for change in (f"output={workplace}/{out}", *changes)]
    return [*begin, "draftsmith.train", str(workplace / "recipe.yaml"), *sets]


def torchrun(processes: int, port: int) -> list[str]:
    return ["torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(port)]


ON_CPU = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}


def launch(workplace: Path, launcher: list[str], out: str, *changes: str, flags: tuple[str, ...] = ()) -> str:
    """Run the recipe through a launcher, on CPU processes; returns its stderr."""
    full = [*command(workplace, launcher, out, *changes), *flags]
    done = subprocess.run(full, env=ON_CPU, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr
