"""What training a head takes at scale, on paper: bytes, FLOPs, disk and network for an 8B, a 70B and a 1T target.

    python scripts/scale.py

Prints the tables of docs/scale.md and writes docs/results/scale.json. Everything follows from shipped recipes, from the shapes
in recipes/targets/, from train/footprint.py and from the assumptions below. Nothing is measured, no network is needed.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from draftsmith.data.precision import bytes_per_token
from draftsmith.recipes.schema import load_recipe
from draftsmith.train import footprint
from draftsmith.train.dry_run import head_of, load_skeleton

CONVERSATIONS = 1_000_000
ASSUMED: dict[str, tuple[float, str]] = {
    "tokens per conversation": (
        1000, "assumed; DSpark's published cache of 38 TB for 1.3 million prompts to Qwen3-4B (5 taps, bfloat16) is 950"
    ),
    "share of tokens taught": (1.0, "assumed: an upper bound; only the assistant's are"),
    "FLOP/s of a GPU": (989e12, "NVIDIA's data sheet of the H100 SXM: bfloat16, dense"),
    "of them used by the target's forward": (0.4, "assumed, of long batches without decoding"),
    "of them used by the head's training": (0.25, "assumed: short matrices, attention written out, float32 losses"),
    "GPUs": (8, "assumed: one machine; of the bytes, only what is gathered and the gradients' depend on it"),
    "bytes/s of one machine's disks": (10e9, "assumed: a few NVMe drives, or a parallel file system's share"),
    "bytes/s of one machine's network": (50e9, "NVIDIA's data sheet of one 400 Gb/s ConnectX-7 port"),
    "bytes/s between two GPUs": (450e9, "NVIDIA's data sheet of the H100 SXM: NVLink, 900 GB/s in both directions together"),
}  # fmt: skip
VALUE = {name: value for name, (value, _) in ASSUMED.items()}
# a mixture of experts in the 8 bits of its checkpoint; the warm start takes Llama-like layers alone
ONE_TRILLION = ["target.name=moonshotai/Kimi-K2-Instruct-0905"]
CASES: dict[
    str, tuple[str, list[str], int]
] = {  # what is computed: the recipe, what is changed in it, the bytes of a weight of the target
    "8B": ("eagle3-llama3-8b", [], 2),
    "70B": ("eagle3-llama3-70b", [], 2),
    "1T": ("eagle3-llama3-70b", [*ONE_TRILLION, "head.taps=null", "head.options.init_layer=random"], 1),
}
MODES = ("online", "store", "write-through", "engine")


def case(recipe_name: str, changes: list[str], weight_bytes: int) -> dict[str, Any]:
    """What does not depend on the mode: the sizes of target and head, bytes and FLOPs of a token."""
    recipe = load_recipe(recipe_name, changes)
    target, _ = load_skeleton(recipe.target.name)
    head, _ = head_of(recipe, target)
    trained, _ = footprint.counted(head)
    flops = footprint.arithmetic(target, head, int(VALUE["tokens per conversation"]))
    return {
        "recipe": recipe_name,
        "target": recipe.target.name,
        "taps": head.config.taps,
        "parameters": footprint.numbers(target.model),
        "target_bytes": footprint.numbers(target.model) * weight_bytes,
        "trained": trained,
        "training_bytes": 18 * trained,  # float32 weights, gradients and two moments, and the bfloat16 copies
        "epochs": recipe.train.epochs,
        "steps": recipe.train.epochs * -(-CONVERSATIONS // recipe.train.batch_size),
        "state_bytes": bytes_per_token(target.hidden_size, len(head.config.taps), "bfloat16"),
        "int8_bytes": bytes_per_token(target.hidden_size, len(head.config.taps), "int8"),
        "target_flops": flops["target"],
        "head_flops": flops["head"] + VALUE["share of tokens taught"] * (flops["teacher"] + flops["head logits"]),
        "parallel": recipe.target.parallel,
        "micro_batch_size": recipe.train.micro_batch_size,
    }


def mode(of: dict[str, Any], name: str) -> dict[str, Any]:
    """What a mode computes, keeps and moves over the whole run; seconds are those of the assumed machine."""
    epochs, gpus = of["epochs"], VALUE["GPUs"]
    tokens = CONVERSATIONS * VALUE["tokens per conversation"]
    passes = 1 if name in ("store", "write-through") else epochs
    states = tokens * of["state_bytes"]
    kept = states if name in ("store", "write-through") else 0
    read = {"store": epochs, "write-through": epochs - 1}.get(name, 0) * states
    engine = epochs * states if name == "engine" else 0
    speed = VALUE["FLOP/s of a GPU"] * gpus
    target, head = passes * tokens * of["target_flops"], epochs * tokens * of["head_flops"]
    gathered = 0.0
    if name == "online" and of["parallel"] == "fsdp":  # all layers' weights, once a micro-batch
        gathered = passes * CONVERSATIONS / of["micro_batch_size"] * of["target_bytes"] * (gpus - 1) / gpus
    return {
        "mode": name,
        "target_flops": target,
        "head_flops": head,
        "disk_bytes": kept,
        "disk_read_bytes": read,
        "engine_bytes": engine,
        "gathered_bytes": gathered,
        "gradient_bytes": of["steps"] * 2 * (gpus - 1) / gpus * 4 * of["trained"],  # of every GPU: a ring all-reduce in float32
        "target_seconds": target / speed / VALUE["of them used by the target's forward"],
        "head_seconds": head / speed / VALUE["of them used by the head's training"],
        "disk_seconds": (kept + read) / VALUE["bytes/s of one machine's disks"],
        "network_seconds": engine / VALUE["bytes/s of one machine's network"],
        "gather_seconds": gathered / gpus / VALUE["bytes/s between two GPUs"],
    }


def amount(number: float, unit: str = "B") -> str:
    """A number with three digits and a decimal prefix; a dash for nothing."""
    if not number:
        return "–"
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}" if number < 999.5 * size else f"{number / size:.0f} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g}" if seconds else "–"


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(each) + " |" for each in [heads, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def tables(found: dict[str, Any]) -> list[str]:
    """The page's tables: the assumptions, what a target and its head are, what the modes take, what they wait for."""
    cases: dict[str, dict[str, Any]] = found["cases"]
    assumed = [[name, f"{value:g}", why] for name, (value, why) in ASSUMED.items()]
    sizes = [
        [
            name,
            of["target"],
            amount(of["target_bytes"]),
            f"{of['trained'] / 1e9:.2f} billion",
            amount(of["training_bytes"]),
            *(amount(of[key]) for key in ("state_bytes", "int8_bytes")),
            *(amount(of[key], "FLOP") for key in ("target_flops", "head_flops")),
        ]
        for name, of in cases.items()
    ]
    moved = ("disk_bytes", "disk_read_bytes", "engine_bytes", "gathered_bytes", "gradient_bytes")
    taken = [
        [
            name,
            each["mode"],
            *(amount(each[key], "FLOP") for key in ("target_flops", "head_flops")),
            *(amount(each[key]) for key in moved),
        ]
        for name, of in cases.items()
        for each in of["modes"]
    ]
    waits = [
        [name, each["mode"], *(hours(each[f"{part}_seconds"]) for part in ("target", "head", "disk", "network", "gather"))]
        for name, of in cases.items()
        for each in of["modes"]
    ]
    of_sizes = ["", "target", "its weights", "trained", "weights, gradients, optimizer", "a token's states", "in int8"]
    of_sizes += ["target, a token", "head, a token"]
    of_taken = ["", "mode", "target", "head", "disk", "read from it", "from the engine", "gathered layers", "gradients, a GPU"]
    return [
        table(["assumption", "value", "from"], assumed),
        table(of_sizes, sizes),
        table(of_taken, taken),
        table(["hours", "mode", "target", "head", "disk", "network", "gathering"], waits),
    ]


def computed() -> dict[str, Any]:
    found: dict[str, Any] = {
        "command": "python scripts/scale.py",
        "conversations": CONVERSATIONS,
        "assumed": {name: {"value": value, "from": why} for name, (value, why) in ASSUMED.items()},
        "cases": {},
    }
    for name, (recipe, changes, weight_bytes) in CASES.items():
        of = case(recipe, changes, weight_bytes)
        found["cases"][name] = of | {"modes": [mode(of, each) for each in MODES]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/scale.json"))
    options = parser.parse_args()
    found = computed()
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n\n".join(tables(found)))


if __name__ == "__main__":
    main()
