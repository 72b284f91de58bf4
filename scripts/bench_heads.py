"""Every head kind on equal terms: the same conversations in the same order, the same seconds, one verifier.

    python scripts/bench_heads.py [--seconds 120] [--rows 640] [--prompts 16] [--out docs/results/heads.json]

The hidden states of SmolLM2-135M-Instruct on the first demo conversations are kept once, for every tap that some kind reads.
Each kind then trains with its own shipped recipe (rates, depths, options) in a process of its own, on these conversations in
one order, for one pass over them or for the seconds given, whichever ends first; a few steps are timed before, so that the
learning rate's schedule ends where the training does. τ is the verifier's, on held-out prompts that chose nothing, in float32:
for the greedy chain of 5, for the better of a static and a dynamic tree (chosen on prompts of their own), and for the chain at
temperature 1. Speed is that of the chain relative to plain decoding, prompts interleaved. Results of the same settings that the
output already holds are kept, so --heads may name the missing ones alone.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import torch
from matplotlib.figure import Figure

from draftsmith.console import Progress, note
from draftsmith.data.extract import extract
from draftsmith.data.tally import Tally
from draftsmith.eval.harness import measure
from draftsmith.eval.prompts import Prompt, read_prompts
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.tree import parse
from draftsmith.heads.base import DraftHead
from draftsmith.heads.engines.registry import exports
from draftsmith.heads.kinds import KINDS, load_head
from draftsmith.recipes.schema import Recipe, load_recipe, shipped
from draftsmith.sampling import Sampling
from draftsmith.target import Target
from draftsmith.train.loop import train
from draftsmith.train.prepare import prepare, read_examples, start

RUNS = {
    "medusa": ("medusa-smollm2", []),
    "hydra": ("hydra-smollm2", []),
    "eagle3": ("demo", []),
    "eagle": ("eagle-smollm2", ["head.draft_vocab=4096"]),
    "mlp_speculator": ("mlp_speculator-smollm2", []),
    "redrafter": ("redrafter-smollm2", []),
    "dflash, markov": ("dflash-smollm2", []),
    "peagle": ("peagle-smollm2", []),
    "draft_model": ("draft_model-smollm2", []),
    "pard": ("pard-smollm2", []),
    "mtp": ("mtp-smollm2", []),
    "medusa-2": ("medusa2-smollm2", []),
}
CHAIN, STATIC, DYNAMIC = 5, (4, 2, 2, 1), "dynamic:24"
NEW_TOKENS, CHOOSING, COMPARED, HELD_OUT, TIMED = 40, 3, 3, 6, 3  # TIMED steps before training tell how many fit


def recipe_of(name: str, place: Path, *changes: str) -> Recipe:
    """A run's recipe on the common store, without checkpoints or scores on the way."""
    shipped_name, own = RUNS[name]
    common = [f"data.train={place}/train.jsonl", f"data.held_out={place}/heldout.jsonl", "train.batch_size=8"]
    common += ["train.micro_batch_size=8", "eval.prompts=0", "train.eval_every=null", "train.checkpoint_every=null"]
    common += ["data.features=store", f"data.store={place}/store", "data.max_length=320", "train.seed=0", "train.epochs=1"]
    return load_recipe(shipped_name, [*own, *common, f"output={place}/{name}", *changes])


def keep_states(place: Path, names: list[str], rows: int) -> int:
    """Write the data and the store of all taps that the runs read; returns the tokens of the training rows."""
    demo = shipped()["demo"].parent / "demo"
    for part, count in (("train", rows), ("heldout", HELD_OUT)):
        lines = (demo / f"{part}.jsonl").read_text().splitlines(keepends=True)
        (place / f"{part}.jsonl").write_text("".join(lines[:count]))
    recipes = [recipe_of(name, place) for name in names]
    target = Target.load(recipes[0].target.name, recipes[0].target.dtype)
    taps = {tap for recipe in recipes for tap in recipe.head.taps or KINDS[recipe.head.kind].default_taps(target)}
    examples = read_examples(recipes[0], "train", target, Tally())
    tokens = int(sum(len(example.ids) for example in examples))
    if (place / "store").exists():  # of an earlier run in the same --place
        return tokens
    with Progress("keeping hidden states", tokens) as bar:
        extract(target, examples, sorted(taps), place / "store", "bfloat16", batch_tokens=2048, progress=bar.advance)
    return tokens


def run_one(name: str, place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train and measure one kind in this process."""
    timed = recipe_of(name, place, f"train.max_steps={TIMED + 1}")
    run = prepare(timed, start(timed), place / "timing")
    run.advance(1, run.global_batch(0))
    began = time.perf_counter()
    for step in range(TIMED):
        run.advance(2 + step, run.global_batch(1 + step))
    per_step = (time.perf_counter() - began) / TIMED
    trained = sum(parameter.numel() for parameter in run.head.parameters() if parameter.requires_grad)
    steps = max(8, min(run.steps_per_epoch, int(options.seconds / per_step)))
    plan = [run.global_batch(step) for step in range(steps)]
    tokens = int(sum(run.train.lengths[row] for batch in plan for row in batch))
    del run
    began = time.perf_counter()
    train(recipe_of(name, place, f"train.max_steps={steps}", f"train.log_every={steps}"))
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"steps": steps, "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / (per_step * steps)}
    found |= {"parameters": trained, "peak_bytes": peak}
    target = Target.load(timed.target.name, "float32")
    head = load_head(place / name / "head")
    prompts = read_prompts(shipped()["demo"].parent / "demo" / "heldout.jsonl")[HELD_OUT:]
    return found | measured(target, head, prompts[:CHOOSING], prompts[CHOOSING:][: options.prompts])


def measured(target: Target, head: DraftHead, choosing: list[Prompt], prompts: list[Prompt]) -> dict[str, Any]:
    """τ of the chain, the better tree and the chain at temperature 1; costs of the chain."""
    deepest = head.deepest or CHAIN
    chain = f"chain:{min(CHAIN, deepest)}"
    static = "tree:" + "x".join(map(str, STATIC[: min(len(STATIC), deepest)]))

    def tau(shape: str, asked: list[Prompt], baseline: int = 0, temperature: float = 0.0) -> dict[str, Any]:
        return measure(target, HeadProposer(head, parse(shape)), asked, NEW_TOKENS, Sampling(temperature), baseline=baseline)

    chosen = max((static, DYNAMIC), key=lambda shape: tau(shape, choosing)["tau"])
    plain, tree = tau(chain, prompts, COMPARED), tau(chosen, prompts)
    dynamic = tree if chosen == DYNAMIC else tau(DYNAMIC, prompts)
    hot = tau(chain, prompts, temperature=1.0)
    shares = plain["time"]
    return {
        "chain": {"shape": chain, "tau": plain["tau"], "interval": plain["tau_interval"]},
        "tree": {"shape": chosen, "tau": tree["tau"], "interval": tree["tau_interval"]},
        "dynamic": {"shape": DYNAMIC, "tau": dynamic["tau"], "interval": dynamic["tau_interval"]},
        "temperature_1": {"shape": chain, "tau": hot["tau"], "interval": hot["tau_interval"]},
        "accepted_per_position": plain["accepted_per_position"],
        "draft_ms": 1000 * shares["draft"] * plain["tau"] / plain["tokens_per_s"],
        "target_ms": 1000 * shares["target"] * plain["tau"] / plain["tokens_per_s"],
        "speedup": plain["speedup"],
        "lossless": plain["lossless"],
        "engines": exports(head.kind),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The comparison as a Markdown table, best chain first."""

    def cell(measure: dict[str, Any]) -> str:
        low, high = measure["interval"]
        return f"{measure['tau']:.2f} ({low:.2f}–{high:.2f})"

    lines = [
        "| head | trained parameters | steps (tokens) | tokens/s | peak memory | τ, greedy chain | τ, best tree | τ, T = 1 "
        "| draft ms a step | speed | engines |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in sorted(results.items(), key=lambda item: -item[1]["chain"]["tau"]):
        tree = one["tree"]
        lines.append(
            f"| {name} | {one['parameters'] / 1e6:.1f} M | {one['steps']} ({one['tokens'] / 1e3:.0f}k) | "
            f"{one['tokens_per_s']:.0f} | {one['peak_bytes'] / 1e9:.2f} GB | {one['chain']['shape'].removeprefix('chain:')}: "
            f"{cell(one['chain'])} | {tree['shape']}: {cell(tree)} | {cell(one['temperature_1'])} | {one['draft_ms']:.0f} | "
            f"{one['speedup']:.2f}× | {', '.join(one['engines']) or 'none'} |"
        )
    return "\n".join(lines) + "\n"


def draw(results: dict[str, dict[str, Any]], out: Path) -> None:
    """τ against what a draft costs."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, one in results.items():
        low, high = one["chain"]["interval"]
        (dot,) = axes.plot(one["draft_ms"], one["chain"]["tau"], "o")
        axes.vlines(one["draft_ms"], low, high, color=dot.get_color(), alpha=0.4)
        axes.annotate(name, (one["draft_ms"], one["chain"]["tau"]), xytext=(6, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="milliseconds of drafting per target pass", ylabel="acceptance length τ (greedy chain, 95 % interval)")
    axes.set_xscale("log")
    axes.set_title("Every kind after the same seconds on the same conversations, SmolLM2-135M")
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="of training, for each kind")
    parser.add_argument("--rows", type=int, default=640, help="conversations that all kinds see")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--heads", nargs="*", default=list(RUNS), choices=list(RUNS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("docs/results/heads.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help="where data, states and runs are kept (default: a temporary folder)")
    options = parser.parse_args()
    if options.one:
        options.out.write_text(json.dumps(run_one(options.one, options.place, options)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        place = options.place or Path(scratch)
        tokens = keep_states(place, options.heads, options.rows)
        machine = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
        about = {"seconds": options.seconds, "rows": options.rows, "tokens": tokens, "prompts": options.prompts, **machine}
        before = json.loads(options.out.read_text()) if options.out.exists() else {}
        results: dict[str, dict[str, Any]] = before["heads"] if before.get("about") == about else {}
        failed: list[str] = []
        for number, name in enumerate(options.heads, start=1):
            note(f"{number} of {len(options.heads)}: {name}")
            answer = place / "answer.json"
            command = [sys.executable, __file__, "--one", name, "--place", str(place), "--out", str(answer)]
            command += ["--seconds", str(options.seconds), "--prompts", str(options.prompts)]
            if subprocess.run(command).returncode:
                failed.append(name)
                continue
            results[name] = json.loads(answer.read_text())
            options.out.write_text(json.dumps({"about": about, "heads": results}, indent=2) + "\n")
            options.out.with_suffix(".md").write_text(table(results))
            draw(results, options.out.with_suffix(".png"))
    print(table(results))
    if failed:
        raise SystemExit(f"failed, see above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
