"""A place to train in: a saved tiny target, conversations, a recipe, and launches of several processes on it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from draftsmith.recipes.schema import Recipe, load_recipe
from draftsmith.target import Target
from draftsmith.train.pace import CLOCKED

WORDS = "the cat sat on an old mat while ten men read their tea leaves and then went home".split()
CONFIGS = Path(__file__).parents[1] / "recipes" / "accelerate"


def settle(folder: Path, target: Target, rows: int = 21) -> Path:
    """Fill a folder: ``rows`` conversations to train on, of unlike lengths, and six held out."""
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    for name, own in (("train", range(rows)), ("held_out", range(rows, rows + 6))):
        lines = []
        for i in own:
            reply = " ".join(WORDS[(i * k + k) % len(WORDS)] for k in range(1, 4 + i % 5))
            lines.append(json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": reply}]}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "recipe.yaml").write_text(f"""
target: {{name: {folder}/target, dtype: float32}}
data: {{train: train.jsonl, held_out: held_out.jsonl, max_length: 60}}
head: {{kind: eagle3, depths: 2, draft_vocab: 64}}
train: {{epochs: 2, batch_size: 8, micro_batch_size: 2, lr: 1.0e-2, precision: "no", log_every: 1, eval_every: 3}}
eval: {{prompts: 0}}
output: {folder}/run
""")
    return folder


def recipe_in(place: Path, out: str, *changes: str) -> Recipe:
    return load_recipe(place / "recipe.yaml", [f"output={place}/{out}", *changes])


def start(processes: int, *program: str, config: str = "cpu") -> str:
    """Run a module or script in ``processes`` CPU processes through ``accelerate launch``; returns its stdout and stderr."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    command += ["--main_process_port", "0", "--config_file", str(CONFIGS / f"{config}.yaml")] if processes > 1 else ["--cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def launch(place: Path, processes: int, out: str, *changes: str, sharded: str | None = None) -> str:
    """Train in ``processes`` CPU processes, the head whole on each or ``sharded`` by a config; returns what they said."""
    settings = (f"--set={change}" for change in (f"output={place}/{out}", *changes))
    if sharded:
        program = ["--mixed_precision", "no", str(Path(__file__).parent / "fsdp_on_cpus.py")]
        said = start(processes, *program, str(place / "recipe.yaml"), *settings, config=sharded)
    else:
        said = start(processes, "-m", "draftsmith.train", str(place / "recipe.yaml"), *settings)
    run = json.loads((place / out / "run.json").read_text())
    assert run["processes"] == processes
    return said


def curve(run: Path, part: str = "train") -> list[dict]:
    """The logged numbers of a part, those of the clock left out."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in (*CLOCKED, "part")} for row in rows if row["part"] == part]
