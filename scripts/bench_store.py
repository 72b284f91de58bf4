"""What a feature store costs and what its dtype does to a head: bytes per token, and τ after training from each.

    python scripts/bench_store.py --out docs/results/store.json

Extracts the first demo conversations from SmolLM2-135M-Instruct in float32 into one store per dtype, trains the demo's EAGLE-3
head from each (same seed, so the same batches in the same order), and measures each head's τ with the verifier on held-out
prompts in float32. The other dtypes are extracted from a few conversations, for their bytes alone. Beside them stand the bytes
of the formats that other toolkits write for three taps and the last state: 4 x hidden x 2 in bfloat16.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from draftsmith.console import Progress, note
from draftsmith.data.chat import Encoded
from draftsmith.data.extract import extract
from draftsmith.data.precision import DTYPES, bytes_per_token
from draftsmith.data.tally import Tally
from draftsmith.eval.harness import measure
from draftsmith.eval.prompts import read_prompts
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.tree import parse
from draftsmith.heads.kinds import load_head
from draftsmith.recipes.schema import load_recipe, shipped
from draftsmith.target import Target
from draftsmith.train.loop import train
from draftsmith.train.prepare import read_examples

FEW = 20  # conversations for the bytes alone, and held out in training
PROMPTS, NEW_TOKENS = 32, 48


def store_of(target: Target, examples: list[Encoded], taps: list[int], out: Path, dtype: str) -> dict[str, Any]:
    with Progress(f"extracting {dtype}", sum(len(example.ids) for example in examples)) as bar:
        found = extract(target, examples, taps, out, dtype, batch_tokens=2048, progress=bar.advance)
    on_disk = sum(file.stat().st_size for file in out.iterdir())
    states = bytes_per_token(target.hidden_size, len(taps), dtype)
    return {"tokens": found["tokens"], "bytes_per_token": on_disk / found["tokens"], "states_per_token": states}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--train", nargs="*", default=["float32", "int8"], help="dtypes to train from")
    parser.add_argument("--out", type=Path, default=Path("docs/results/store.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for part, rows in (("train", options.conversations), ("heldout", FEW)):
            whole = (shipped()["demo"].parent / f"demo/{part}.jsonl").read_text().splitlines(keepends=True)
            (place / f"{part}.jsonl").write_text("".join(whole[:rows]))
        prompts = read_prompts(load_recipe("demo").sources("held_out"))[:PROMPTS]
        base = [f"data.train={place}/train.jsonl", f"data.held_out={place}/heldout.jsonl", f"train.max_steps={options.steps}"]
        base += ["target.dtype=float32", "eval.prompts=0"]
        recipe = load_recipe("demo", base)
        target = Target.load(recipe.target.name, "float32")
        examples, taps = read_examples(recipe, "train", target, Tally()), list(recipe.head.taps or [])
        peers = (len(taps) + 1) * target.hidden_size * torch.bfloat16.itemsize
        found: dict[str, dict[str, Any]] = {}
        for dtype in DTYPES:
            used = examples[: None if dtype in options.train else FEW]
            found[dtype] = store_of(target, used, taps, place / dtype, dtype)
            found[dtype]["of_the_peers"] = found[dtype]["bytes_per_token"] / peers
            if dtype not in options.train:
                continue
            began = time.perf_counter()
            named = ["data.features=store", f"data.store={place}/{dtype}", f"output={place}/run-{dtype}"]
            trained = train(load_recipe("demo", base + named))
            found[dtype] |= {"train_seconds": time.perf_counter() - began, "tau_sim": trained["tau_sim"]}
            head = load_head(place / f"run-{dtype}" / "head")
            proposer = HeadProposer(head, parse(recipe.eval.tree))
            result = measure(target, proposer, prompts, NEW_TOKENS, baseline=0, show=True)
            found[dtype] |= {key: result[key] for key in ("tau", "tau_interval", "accepted_per_position")}
            note(f"{dtype}: {found[dtype]}")
    document = {
        "command": "python scripts/bench_store.py",
        "target": recipe.target.name,
        "conversations": options.conversations,
        "steps": options.steps,
        "prompts": PROMPTS,
        "new_tokens": NEW_TOKENS,
        "threads": torch.get_num_threads(),
        "peers_bytes_per_token": peers,
        "dtypes": found,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
