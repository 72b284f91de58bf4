"""Is our decoding at least as fast as transformers' own? Plain, with n-gram look-up, and with a draft model.

    taskset -c 1 python scripts/bench_decode.py [--prompts 12] [--max-new 64] [--data spec_bench.jsonl]

Both sides decode the same prompts greedily in float32 on one thread in one process, prompt by prompt in rotating order, with
the same settings: n-grams of two tokens or one and drafts of ten tokens; the target's own first layers as a draft model, and
drafts of a fixed length without a threshold. Seconds are those of whole answers, prefill included, since generate does not
tell its own apart. Every pair of texts is compared. Writes docs/results/decode.json; exits with status 1 where ours is slower.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import torch
import transformers

from draftsmith.console import Progress, note
from draftsmith.eval.ngram import NGram
from draftsmith.eval.prompts import read_prompts
from draftsmith.eval.proposers import HeadProposer, Proposer
from draftsmith.eval.tree import chain
from draftsmith.eval.verifier import Request, decode
from draftsmith.fetch import DEMO_TARGET
from draftsmith.heads.draft_model import DraftModelHead
from draftsmith.heads.own_lm import OwnOptions, bare
from draftsmith.target import Target

ROOT = Path(__file__).resolve().parent.parent
NGRAM, MATCH = 10, 2  # tokens of a draft, and of the longest match: generate's own default for the latter
LAYERS, LENGTH = 4, 4  # of the draft model, and of its drafts
WAYS = ("plain", "ngram", "draft_model")
DRAWS = 2000

Decode = Callable[[list[int]], list[int]]


def main() -> int:
    options = read_options()
    torch.set_num_threads(1)
    target = Target.load(DEMO_TARGET, "float32")
    options_of_draft = OwnOptions(layers=LAYERS)
    head = (
        DraftModelHead.create(target, options_of_draft, None, 1, torch.arange(target.vocab_size)).eval().requires_grad_(False)
    )
    prompts = read_prompts(options.data)
    prompts = prompts[:: max(1, len(prompts) // options.prompts)][: options.prompts]
    ways = ours(target, head, options.max_new) | library(target, head, options.max_new)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    texts: dict[str, list[list[int]]] = {name: [] for name in ways}
    names = list(ways)
    for way in ways.values():  # warm up
        way(prompts[0].ids(target)[:16])
    with Progress("decoding", len(prompts)) as bar:
        for i, prompt in enumerate(prompts):
            ids = prompt.ids(target)
            for name in names[i % len(names) :] + names[: i % len(names)]:
                wall, busy = time.perf_counter(), time.process_time()
                texts[name].append(ways[name](ids))
                rows[name].append({"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - busy})
            bar.advance()
    equal = {name: sum(a == b for a, b in zip(texts[name], texts["transformers plain"], strict=True)) for name in names}
    compared = {way: compare(rows[f"ours {way}"], rows[f"transformers {way}"]) for way in WAYS}
    result = {
        "command": "python scripts/bench_decode.py " + " ".join(sys.argv[1:]),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "target": target.name, "dtype": "float32", "threads": 1, "prompts": len(prompts), "max_new": options.max_new,
        "settings": {
            "ngram": {"draft": NGRAM, "longest_match": MATCH, "shortest_match": 1},
            "draft_model": {"layers": LAYERS, "draft": LENGTH, "schedule": "constant", "confidence_threshold": 0},
        },
        "texts_equal": equal,
        "tokens_per_s": {
            name: sum(map(len, texts[name])) / sum(row["seconds"] for row in rows[name]) for name in names
        },
        "ours_over_transformers": compared,
        "seconds": {name: [round(row["seconds"], 3) for row in rows[name]] for name in names},
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    slower = [way for way in WAYS if compared[way]["speed"] < 1]
    note(", ".join(f"{way} {compared[way]['speed']:.3f}" for way in WAYS) + f" times as fast as transformers: {options.out}")
    return 1 if slower else 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "recipes/demo/heldout.jsonl")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/decode.json")
    return parser.parse_args()


def ours(target: Target, head: DraftModelHead, max_new: int) -> dict[str, Decode]:
    def decoder(proposer: Proposer | None) -> Decode:
        return lambda ids: decode(target, proposer, [Request(ids, max_new)]).generations[0].tokens

    proposers = {"plain": None, "ngram": NGram(NGRAM, MATCH, 1), "draft_model": HeadProposer(head, chain(LENGTH))}
    return {f"ours {name}": decoder(proposer) for name, proposer in proposers.items()}


def library(target: Target, head: DraftModelHead, max_new: int) -> dict[str, Decode]:
    assistant = bare(head.lm)
    assistant.generation_config.num_assistant_tokens = LENGTH
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    given: dict[str, dict[str, Any]] = {
        "plain": {},
        "ngram": {"prompt_lookup_num_tokens": NGRAM, "max_matching_ngram_size": MATCH},
        "draft_model": {"assistant_model": assistant},
    }

    def decoder(settings: dict[str, Any]) -> Decode:
        ends = {"eos_token_id": sorted(target.eos_ids), "pad_token_id": min(target.eos_ids)}

        @torch.inference_mode()
        def run(ids: list[int]) -> list[int]:
            row = torch.tensor([ids])
            out = target.model.generate(
                row, attention_mask=torch.ones_like(row), max_new_tokens=max_new, do_sample=False, **ends, **settings
            )
            return out[0, len(ids) :].tolist()

        return run

    return {f"transformers {name}": decoder(settings) for name, settings in given.items()}


def compare(own: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, Any]:
    """Their seconds over ours, by the clock and by the processor's time, with the 95 % bootstrap interval over prompts."""
    pairs = [(b["seconds"], a["seconds"]) for a, b in zip(own, theirs, strict=True)]
    rng = random.Random(0)
    drawn = (rng.choices(pairs, k=len(pairs)) for _ in range(DRAWS))
    ratios = sorted(sum(b for b, _ in each) / sum(a for _, a in each) for each in drawn)
    return {
        "speed": sum(b for b, _ in pairs) / sum(a for _, a in pairs),
        "interval": [ratios[round(0.025 * (DRAWS - 1))], ratios[round(0.975 * (DRAWS - 1))]],
        "median_of_prompts": statistics.median(b / a for b, a in pairs),
        "speed_by_cpu_time": sum(row["cpu_seconds"] for row in theirs) / sum(row["cpu_seconds"] for row in own),
    }


if __name__ == "__main__":
    sys.exit(main())
