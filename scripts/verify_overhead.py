"""What our decoding loop costs: plain decoding (K = 0) against transformers' generate, and where a head's time goes.

    python scripts/verify_overhead.py [--head runs/demo/head] [--prompts 12] [--out docs/results/overhead.json]

All three decode the same held-out prompts in one run, prompt by prompt in rotating order, greedy, float32. Speeds include
the prefill on both sides, since generate does not tell its own apart.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from draftsmith.console import Progress
from draftsmith.eval.harness import shares
from draftsmith.eval.measures import tau
from draftsmith.eval.prompts import read_prompts
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.tree import parse
from draftsmith.eval.verifier import Request, decode
from draftsmith.fetch import DEMO_TARGET
from draftsmith.heads.kinds import load_head
from draftsmith.recipes.schema import shipped
from draftsmith.target import Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", default="runs/demo/head")
    parser.add_argument("--tree", default="chain:5")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("docs/results/overhead.json"))
    arguments = parser.parse_args()
    target, head = Target.load(DEMO_TARGET, "float32"), load_head(arguments.head)
    prompts = read_prompts(shipped()["demo"].parent / "demo/heldout.jsonl")[: arguments.prompts]
    found: dict[str, list] = {"transformers": [], "plain": [], "head": []}

    def library(ids: list[int]) -> int:
        row = torch.tensor([ids])
        with torch.inference_mode():
            out = target.model.generate(
                row, attention_mask=torch.ones_like(row), max_new_tokens=arguments.max_new, do_sample=False
            )
        return out.shape[1] - len(ids)

    drafting = HeadProposer(head, parse(arguments.tree))
    decoders = {
        "transformers": library,
        "plain": lambda ids: decode(target, None, [Request(ids, arguments.max_new)]),
        "head": lambda ids: decode(target, drafting, [Request(ids, arguments.max_new)]),
    }
    library(prompts[0].ids(target)[:8])  # warm up
    with Progress("decoding", len(prompts)) as bar:
        for i, prompt in enumerate(prompts):
            ids, names = prompt.ids(target), list(decoders)
            for name in names[i % 3 :] + names[: i % 3]:
                began = time.perf_counter()
                out = decoders[name](ids)
                tokens = out if isinstance(out, int) else len(out.generations[0].tokens)
                found[name].append((tokens, time.perf_counter() - began, out))
            bar.advance()
    speeds = {name: sum(t for t, _, _ in rows) / sum(s for _, s, _ in rows) for name, rows in found.items()}
    runs = [out for _, _, out in found["head"]]
    result = {
        "command": "python " + " ".join(sys.argv),
        "prompts": len(prompts),
        "tokens_per_s": speeds,
        "plain_over_transformers": speeds["plain"] / speeds["transformers"],
        "head_over_transformers": speeds["head"] / speeds["transformers"],
        "tau": tau([run.generations[0] for run in runs]),
        "time_with_head": shares([each for run in runs for each in run.passes]),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
