"""What each choice of the demo's recipe is worth: one short run per choice, all else as in the recipe.

    python scripts/ablate.py [--conversations 320] [--epochs 1] [--out docs/results/ablation.json]

Every run sees the same conversations in the same order; the hidden states of all taps are computed once. Reported is the
simulated τ of the trained depths on all held-out conversations (1 + joint greedy agreement), so depth 3 can reach 4.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from draftsmith.console import note
from draftsmith.data.features import Memory, OnlineFeatures
from draftsmith.data.tally import Tally
from draftsmith.recipes.schema import load_recipe, shipped
from draftsmith.target import Features, Target
from draftsmith.train.prepare import prepare, read_examples, start

TAPS = [2, 3, 15, 27, 29]
PARTS = ("train", "held_out")
CHOICES = {
    "the recipe": [],
    "everything from random": ["head.options.init_layer=random", "head.options.init_lm_head=random"],
    "layer from random, lm_head from the target": ["head.options.init_layer=random"],
    "loss: kl": ["objective.loss=kl"],
    "teacher: full": ["objective.teacher=full"],
    "lr 1e-3": ["train.lr=1.0e-3"],
    "taps 2, 15, 27 (EAGLE-3's rule)": ["head.taps=[2,15,27]"],
    "Medusa-1, four heads": ["head.kind=medusa", "head.depths=4", "head.options={}", "head.taps=null"],
    "layer from the target, lm_head from random": ["head.options.init_lm_head=random"],
    "lr 4e-3": ["train.lr=4.0e-3"],
    "loss: ce on the data's token": ["objective.loss=ce"],
    "norm_output": ["head.options.norm_output=true"],
    "fc_norm": ["head.options.fc_norm=true"],
    "norm_before_residual": ["head.options.norm_before_residual=true"],
    "depth_decay 0.6": ["objective.depth_decay=0.6"],
    "draft vocabulary 2048": ["head.draft_vocab=2048"],
}


def shared_features(base: list[str]) -> tuple[dict[str, dict[int, Features]], Target]:
    """The hidden states of every tap in TAPS, for the training and the held-out rows."""
    recipe = load_recipe("demo", base)
    target = Target.load(recipe.target.name, recipe.target.dtype)
    found = {}
    for part in PARTS:
        examples, shelf = read_examples(recipe, part, target, Tally()), Memory()
        source = OnlineFeatures(target, examples, TAPS, shelf)
        order = sorted(range(len(examples)), key=lambda row: len(examples[row].ids))
        for first in range(0, len(order), 8):
            source.batch(order[first : first + 8])
        found[part] = shelf.rows
    return found, target


def select(features: dict[int, Features], taps: tuple[int, ...], width: int) -> dict[int, Features]:
    """The same rows with only these taps."""
    columns = [TAPS.index(tap) for tap in taps]
    return {
        row: Features(torch.cat([f.taps[:, i * width : (i + 1) * width] for i in columns] or [f.taps[:, :0]], dim=-1), f.last)
        for row, f in features.items()
    }


def run(changes: list[str], features: dict[str, dict[int, Features]], out: Path) -> dict[str, float]:
    """Train one choice and measure it on the held-out rows."""
    recipe = load_recipe("demo", changes)
    accelerator = start(recipe)
    state = prepare(recipe, accelerator, out)
    for part, source in zip(PARTS, (state.train, state.held_out), strict=True):
        assert isinstance(source, OnlineFeatures) and isinstance(source.shelf, Memory)
        source.shelf.rows = select(features[part], source.taps, state.target.hidden_size)
    began = time.perf_counter()
    for step in range(state.steps):
        state.advance(step + 1, state.global_batch(step))
    seconds = time.perf_counter() - began
    report = state.held_out_sums().report(state.shares)
    accelerator.free_memory()
    return {**report, "steps": state.steps, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="names of choices")
    parser.add_argument("--out", type=Path, default=Path("docs/results/ablation.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        few = Path(scratch) / "train.jsonl"
        whole = shipped()["demo"].parent / "demo/train.jsonl"
        few.write_text("".join(whole.read_text().splitlines(keepends=True)[: arguments.conversations]))
        base = [f"data.train={few}", f"train.epochs={arguments.epochs}", "train.max_steps=null"]
        features, _ = shared_features(base)
        rows = json.loads(arguments.out.read_text())["rows"] if arguments.only and arguments.out.exists() else {}
        for name in arguments.only or CHOICES:
            rows[name] = run(base + CHOICES[name], features, Path(scratch) / "run")
            note(f"{name}: " + " ".join(f"{key} {value:.3f}" for key, value in rows[name].items()))
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            settings = {"conversations": arguments.conversations, "epochs": arguments.epochs}
            command = "python scripts/ablate.py " + " ".join(f"--{key} {value}" for key, value in settings.items())
            arguments.out.write_text(json.dumps({"command": command, **settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
