"""Is our greedy text the library's own? Decodes prompts with drafts and compares them with transformers' generate.

Float32, greedy, token for token: every prompt with every proposer at every batch size. Name head directories, model:DIR and
look-ups as draftsmith eval does, or name none: then fresh heads are fitted for a few steps on the answers to every other
prompt, so that some of their drafts are accepted and some are not. Where two texts part, the margin of the target's two best
tokens there is reported; below the verifier's near-tie bound that is rounding, above it a bug. Writes
docs/results/greedy.json; exits with status 1 unless every text is equal but for near-ties.

    python scripts/check_greedy.py                                      # fresh heads: 50 prompts, 32 tokens
    python scripts/check_greedy.py runs/demo/head ngram suffix lookahead --task spec_bench --prompts 100 --batch 1 4
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from draftsmith.console import Progress, note
from draftsmith.data.chat import Encoded
from draftsmith.data.features import Memory, OnlineFeatures
from draftsmith.data.vocab import choose, count_tokens, special_ids
from draftsmith.errors import UserError
from draftsmith.eval.harness import NEAR_TIE, divergence
from draftsmith.eval.measures import per_position, tau
from draftsmith.eval.prompts import Prompt, read_prompts
from draftsmith.eval.proposers import HeadProposer, Proposer
from draftsmith.eval.registry import read_head, read_lookup
from draftsmith.eval.tasks import read_task
from draftsmith.eval.tree import parse
from draftsmith.eval.verifier import Request, decode
from draftsmith.fetch import DEMO_TARGET
from draftsmith.heads.base import DraftHead
from draftsmith.heads.drafting import Form
from draftsmith.heads.kinds import KINDS
from draftsmith.target import Target
from draftsmith.train.objectives import Objective
from draftsmith.train.step import judged

ROOT = Path(__file__).resolve().parent.parent
DRAFTS = ("chain:5", "tree:3x2x1x1")
DEPTHS = {"eagle3": 5, "medusa": 4}
DRAFT_VOCABULARY, BATCH, RATE = 2048, 4, 1e-3


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    torch.set_num_threads(options.threads)
    target = Target.load(options.target, dtype="float32")
    asked = read_task(options.task) if options.task else read_prompts(options.prompts_file)
    prompts = [prompt.ids(target) for prompt in spaced(asked, options.prompts)]
    texts = [library_text(target, ids, options.max_new) for ids in bar("transformers' generate", prompts)]
    heads = {} if options.proposers else fit_fresh(target, prompts, texts, options.steps)
    named = [(name, read_lookup(name)) for name in options.proposers]
    heads |= {name: read_head(name, target) for name, found in named if found is None}
    proposers = [(name, found) for name, found in named if found is not None]
    proposers += [(name, HeadProposer(head, form)) for name, head in heads.items() for form in drafts(head)]
    cases = [
        compare(name, proposer, target, prompts, texts, options.max_new, batch)
        for name, proposer in proposers
        for batch in options.batch
    ]
    report = {
        "command": " ".join(["python", "scripts/check_greedy.py", *(sys.argv[1:] if arguments is None else arguments)]),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "target": target.name, "dtype": "float32", "prompts": len(prompts), "max_new": options.max_new, "near_tie": NEAR_TIE,
        "lossless": all(case["lossless"] for case in cases),
        "cases": cases,
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    note(f"{'lossless' if report['lossless'] else 'NOT lossless'}: {options.out}")
    return 0 if report["lossless"] else 1


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare greedy texts with transformers' generate, token for token.")
    parser.add_argument("proposers", nargs="*", help="as draftsmith eval takes them (default: fresh heads, fitted for --steps)")
    parser.add_argument("--target", default=DEMO_TARGET)
    parser.add_argument("--prompts-file", type=Path, default=ROOT / "recipes/demo/heldout.jsonl")
    parser.add_argument("--task", help="a benchmark instead of the prompts file, evenly spaced questions of it")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--max-new", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30, help="training steps of fresh heads; 0 leaves them untrained")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/greedy.json")
    return parser.parse_args(arguments)


def spaced(prompts: Sequence[Prompt], count: int) -> Sequence[Prompt]:
    """So many of the prompts, evenly spaced, so that every category has its share."""
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def bar(title: str, items: list) -> Any:
    """The items, with a progress bar."""
    with Progress(title, len(items)) as progress:
        for item in items:
            yield item
            progress.advance()


@torch.inference_mode()
def library_text(target: Target, prompt: list[int], max_new: int) -> list[int]:
    """What transformers' own greedy decoding writes, end token included."""
    ids = torch.tensor([prompt], device=target.device)
    written = target.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new,
        do_sample=False,
        eos_token_id=sorted(target.eos_ids),
        pad_token_id=min(target.eos_ids),
    )
    return written[0, len(prompt) :].tolist()


# -- the heads -----------------------------------------------------------------------------------------------------


def fit_fresh(target: Target, prompts: list[list[int]], texts: list[list[int]], steps: int) -> dict[str, DraftHead]:
    """One head of every kind, fitted on every other prompt's answer: good on those, poor on the others."""
    examples = [
        Encoded(np.array(prompt + text, np.int32), np.arange(len(prompt + text)) >= len(prompt))
        for prompt, text in zip(prompts[::2], texts[::2], strict=True)
    ]
    counts = count_tokens(examples, target.vocab_size)
    target_ids = choose(counts, DRAFT_VOCABULARY, special_ids(target.tokenizer, target.eos_ids)).target_ids
    heads = {}
    for kind, depths in DEPTHS.items():
        torch.manual_seed(0)
        head = KINDS[kind].create(target, KINDS[kind].Options(), None, depths, target_ids)
        heads[f"fresh {kind}"] = fit(head, target, examples, steps)
    return heads


def fit(head: DraftHead, target: Target, examples: list[Encoded], steps: int) -> DraftHead:
    features = OnlineFeatures(target, examples, head.config.taps, Memory())
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=RATE)
    objective = Objective("kl", depth_decay=1.0)
    for step in bar(f"fitting {head.kind}", list(range(steps))):
        rows = [(step * BATCH + i) % len(examples) for i in range(min(BATCH, len(examples)))]
        batch = features.batch(rows)
        loss, _ = judged(head, batch, target, objective, head.taught(batch.ids, batch.mask, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval()


def drafts(head: DraftHead) -> list[Form]:
    """The chain and the tree, no deeper than the head drafts; heads without a cache of their own draft trees alone."""
    chain, tree = (parse(text) for text in DRAFTS)
    return [chain, tree] if head.deepest is None else [tree.cut(head.deepest)]


# -- the comparison ------------------------------------------------------------------------------------------------


def compare(
    name: str,
    proposer: Proposer,
    target: Target,
    prompts: list[list[int]],
    texts: list[list[int]],
    max_new: int,
    batch: int = 1,
) -> dict[str, Any]:
    """One proposer and batch size on every prompt: how many texts are equal, and where the others part."""
    start, form = time.perf_counter(), proposer.described()["name"]
    note(f"{name} {form}, batch {batch}: decoding {len(prompts)} prompts")
    generations = decode(target, proposer, [Request(prompt, max_new) for prompt in prompts], batch=batch).generations
    parted = [
        {"prompt": i, **divergence(target, prompts[i], generation.tokens, text)}
        for i, (generation, text) in enumerate(zip(generations, texts, strict=True))
        if generation.tokens != text
    ]
    case = {
        "proposer": name,
        "draft": form,
        "batch": batch,
        "equal": len(prompts) - len(parted),
        "near_ties": [place for place in parted if place["margin"] < NEAR_TIE],
        "different": [place for place in parted if place["margin"] >= NEAR_TIE],
        "lossless": all(place["margin"] < NEAR_TIE for place in parted),
        "emitted_tokens": sum(len(generation.tokens) for generation in generations),
        "tau": round(tau(generations), 4),
        "accepted_per_position": [round(share, 4) for share in per_position(generations, proposer.length)],
        "seconds": round(time.perf_counter() - start, 1),
    }
    note(f"{name}, {form}, batch {batch}: {case['equal']} of {len(prompts)} texts equal, τ {case['tau']}")
    return case


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        note(str(error))
        sys.exit(2)
