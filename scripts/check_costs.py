"""Does the cost model predict the speed-ups that are measured?

    taskset -c 1 python scripts/check_costs.py --head runs/demo/head [--prompts spec_bench.jsonl] [--count 8]

Acceptance comes from decoding the prompts one at a time, costs from timed passes, as advise has them; from these the speed-up
of n-gram look-up, suffix decoding and the demo's EAGLE-3 head is predicted for every batch size and temperature and compared
with what ``measure`` then finds on the same prompts, interleaved with plain decoding and with other draws. Our batches are
padded: a pass reads as far back as its longest sequence, which is what its context is taken to be.
Writes docs/results/costs.json; exits with status 1 where fewer than eight of ten predictions are within 15 %.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import torch

from draftsmith.console import note
from draftsmith.eval import acceptance
from draftsmith.eval.costs import measure_drafts, measure_steps, step_surface
from draftsmith.eval.harness import measure, seeded
from draftsmith.eval.ngram import NGram
from draftsmith.eval.prompts import Prompt, read_prompts
from draftsmith.eval.proposers import HeadProposer, Proposer
from draftsmith.eval.service import ProposerFacts
from draftsmith.eval.speedup import Predictor
from draftsmith.eval.suffix import Suffix
from draftsmith.eval.tree import chain
from draftsmith.eval.verifier import Request, decode
from draftsmith.fetch import DEMO_TARGET
from draftsmith.heads.kinds import load_head
from draftsmith.outputs import write_whole
from draftsmith.sampling import Sampling
from draftsmith.target import Target

ROOT = Path(__file__).resolve().parent.parent
CLOSE, ENOUGH = 0.15, 0.8  # how near a prediction must be, and what share of them
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
LONGEST = 256  # tokens of a prompt
CELLS = [(1, 0.0), (2, 0.0), (4, 0.0), (4, 0.8)]  # batch size and temperature


def main() -> int:
    options = read_options()
    torch.set_num_threads(1)
    began = time.perf_counter()
    target, head = Target.load(DEMO_TARGET, "float32"), load_head(options.head)
    proposers: dict[str, Callable[[], Proposer]] = {
        "ngram": lambda: NGram.read("5,max=3,min=1"),
        "suffix": lambda: Suffix.read("10"),
        "eagle3": lambda: HeadProposer(head, chain(3)),
    }
    short = [prompt for prompt in read_prompts(options.prompts) if len(prompt.ids(target)) <= LONGEST]
    prompts = short[:: len(short) // options.count][: options.count]
    lengths = [len(prompt.ids(target)) for prompt in prompts]
    cells, tables = [], []
    for temperature in sorted({temperature for _, temperature in CELLS}):
        sampling = Sampling(temperature)
        facts = {}
        for name, new in proposers.items():
            note(f"temperature {temperature:g}: {name}'s acceptance, {time.perf_counter() - began:.0f} s so far")
            facts[name] = looked_at(target, new(), name, asked(target, prompts, options.max_new), sampling)
        for batch in [batch for batch, at in CELLS if at == temperature]:
            note(f"temperature {temperature:g}: {batch} at once, {time.perf_counter() - began:.0f} s so far")
            context = round(longest_of(lengths, batch) + options.max_new / 2)
            rows = measure_steps(target, [batch], TOKENS, context, sampling, options.rounds)
            requests = asked(target, prompts[: max(batch, 4)], options.max_new)
            found = {}
            for name, new in proposers.items():
                drafting = measure_drafts(target, new(), requests, [batch], sampling)
                speeds = measure(target, new(), prompts, options.max_new, sampling, batch, seed=options.seed)
                found[name] = (facts[name].model_copy(update={"draft_seconds": drafting}), speeds)
            # before and after, since the machine's pace may change in between
            rows += measure_steps(target, [batch], TOKENS, context, sampling, options.rounds)
            tables += [{"temperature": temperature, **row.model_dump()} for row in rows]
            for name, (known_of_it, speeds) in found.items():
                model = Predictor(known_of_it, step_surface(rows), context)
                cells.append(compared(model, name, batch, temperature, speeds))
                note(json.dumps(cells[-1]))
    share = sum(cell["within"] for cell in cells) / len(cells)
    report = {
        "command": "python scripts/check_costs.py " + " ".join(sys.argv[1:]),
        "machine": {"processor": platform.machine(), "threads": 1, "torch": torch.__version__},
        "target": DEMO_TARGET, "dtype": "float32", "prompts": len(prompts),
        "max_new_tokens": options.max_new, "seconds": time.perf_counter() - began,
        "within": CLOSE, "share_within": share,
        "mean_error": sum(abs(cell["error"]) for cell in cells) / len(cells),
        "cells": cells, "passes": tables,
    }  # fmt: skip
    write_whole(options.out, [json.dumps(report, indent=1) + "\n"])
    print("proposer  batch    T  predicted           measured            error")
    for cell in cells:
        place = f"{cell['proposer']:9} {cell['batch']:5} {cell['temperature']:4g}"
        print(f"{place}  {span(cell, 'predicted'):18}  {span(cell, 'measured'):18}  {cell['error']:+.1%}")
    print(f"{share:.0%} within {CLOSE:.0%}")
    return 0 if share >= ENOUGH else 1


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare predicted speed-ups with measured ones.")
    parser.add_argument("--head", type=Path, default=ROOT / "runs/demo/head")
    parser.add_argument("--prompts", type=Path, default=ROOT / "spec_bench.jsonl")
    parser.add_argument("--count", type=int, default=8, help="prompts, evenly spaced")
    parser.add_argument("--max-new", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5, help="of every timed pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/costs.json")
    return parser.parse_args()


def span(cell: dict[str, Any], key: str) -> str:
    low, high = cell[f"{key}_interval"]
    return f"{cell[key]:.2f} [{low:.2f}, {high:.2f}]"


def longest_of(lengths: Sequence[int], batch: int) -> float:
    """The mean length of the longest of so many prompts drawn from these."""
    n = len(lengths)
    return sum(length * ((rank + 1) ** batch - rank**batch) for rank, length in enumerate(sorted(lengths))) / n**batch


def asked(target: Target, prompts: Sequence[Prompt], max_new: int) -> list[Request]:
    return [Request(prompt.ids(target), max_new, seeded(1, i, 0)) for i, prompt in enumerate(prompts)]


def looked_at(target: Target, proposer: Proposer, name: str, requests: list[Request], sampling: Sampling) -> ProposerFacts:
    """Acceptance and draft sizes, one request at a time."""
    run = decode(target, proposer, requests, sampling)
    return ProposerFacts(
        name=name,
        kind="head" if name == "eagle3" else "lookup",
        acceptance=acceptance.measured(run.generations, proposer.length),
        sizes=acceptance.draft_sizes([each.nodes - 1 for each in run.passes]),
    )


def compared(model: Predictor, name: str, batch: int, temperature: float, found: dict[str, Any]) -> dict[str, Any]:
    """A cell of the report."""
    at = model.predict(batch, len(model.facts.acceptance))
    speedup = found["speedup"]
    return {
        "proposer": name, "batch": batch, "temperature": temperature,
        "predicted": at.speedup, "predicted_interval": [at.low, at.high],
        "measured": speedup, "measured_interval": found["speedup_interval"],
        "error": at.speedup / speedup - 1, "within": abs(at.speedup / speedup - 1) <= CLOSE,
        "context": model.context, "tau_known": at.tau, "tau_measured": found["tau"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
