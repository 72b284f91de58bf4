"""Run by every process of a launch: what a target that the processes hold together gives beside a whole one, as JSON.

held_together.py RECIPE fsdp|tp GROUP
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from torch.distributed.tensor import DTensor

from draftsmith.eval.tree import chain
from draftsmith.eval.verifier import generate
from draftsmith.recipes.schema import load_recipe
from draftsmith.target import Target
from draftsmith.train.prepare import start
from draftsmith.train.sharding import load_target, seat

file, parallel, group = sys.argv[1:]


def written(target: Target) -> list[int]:
    return generate(target, None, [5, 9, 40, 7], chain(1), 20).tokens


recipe = load_recipe(file, [f"target.parallel={parallel}", f"target.group={group}", f"target.name={Path(file).parent}/target"])
accelerator = start(recipe)
whole, held = Target.load(recipe.target.name, "float32", "cpu"), load_target(recipe, accelerator)
ids = torch.arange(3, 63).reshape(3, 20)
taps = list(range(held.depth + 1))
ours, theirs = held.features(ids, taps), whole.features(ids, taps)
ends = [part for name, part in held.model.named_parameters() if ".layers." not in name]
own = sum(p.to_local().numel() for p in held.model.parameters() if isinstance(p, DTensor))
found = {
    "taps": (ours.taps - theirs.taps).abs().max().item() / theirs.taps.abs().max().item(),
    "logits": (held.logits(ours.last) - whole.logits(theirs.last)).abs().max().item(),
    "text": written(held) == written(whole),
    "share": own / sum(p.numel() for p in whole.layers.parameters()),
    "ends whole": not any(isinstance(part, DTensor) for part in ends),
    "weights": all(
        torch.equal(tensor, whole.weights_of(whole.layers[1])[name]) for name, tensor in held.weights_of(held.layers[1]).items()
    ),
    "same fingerprint": held.fingerprint == whole.fingerprint,
    "seat": seat(recipe, accelerator),
}
print("FOUND " + json.dumps(found), flush=True)
PartialState().wait_for_everyone()
accelerator.end_training()
