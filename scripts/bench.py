"""The short version of all benchmarks, as `make bench` runs it: runs/bench/report.json, and docs/performance.md made of it.

    python scripts/bench.py [--rounds 5] [--rows 640] [--reuse]

Ratios are draftsmith's over the neighbour's. ``--reuse`` takes the neighbours' part from the last run.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))  # read when torch is imported
os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])

import torch
from bench_peers import CHOSE, PEERS, ROOT, cut, environment
from bench_store import store_of
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.console import note
from draftsmith.data.tally import Tally
from draftsmith.eval.harness import measure
from draftsmith.eval.prompts import read_prompts
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.tree import parse
from draftsmith.heads.kinds import load_head
from draftsmith.outputs import write_whole
from draftsmith.recipes.schema import load_recipe, shipped
from draftsmith.target import Target
from draftsmith.train.prepare import read_examples

OUT = ROOT / "runs" / "bench"
PEERS_BYTES = 2  # of a number in the files of neighbours: bfloat16
PROMPTS, NEW_TOKENS = 12, 64


def peers(options: argparse.Namespace) -> dict[str, Any]:
    """The report of bench_peers.py."""
    place = OUT / "peers" / "report.json"
    if not (options.reuse and place.is_file()):
        script = [sys.executable, str(ROOT / "scripts" / "bench_peers.py"), "--rounds", str(options.rounds)]
        subprocess.run([*script, "--rows", str(options.rows), "--out", str(place.parent)], check=True)
    return json.loads(place.read_text())


def against(name: str, report: dict[str, Any]) -> dict[str, Any]:
    """One neighbour's line of the report."""
    pace, found = report["speed"][name], report["quality"]
    python = environment(name)
    asked = f"import importlib.metadata as m; print(m.version('{'nemo-automodel' if name == 'automodel' else name}'))"
    version = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    ours, theirs = found["draftsmith"], found[name]
    enough = [point["tokens"] for point in ours["points"] if point["tau"] >= theirs["tau"]]
    return {
        "version": version,
        "ran": True,
        "why_not": None,
        "tokens_per_s_ratio": pace["ours_is_faster"]["median"],
        "tokens_per_s_range": pace["ours_is_faster"]["range"],
        "peak_memory_ratio": pace["our_peak"],
        "accepted_ratio": (ours["tau"] - 1) / (theirs["tau"] - 1),
        "tau": theirs["tau"],
        "tau_interval": theirs["interval"],
        "tokens_to_its_tau": min(enough) / theirs["tokens"] if enough else None,
    }


def matmul_peak(size: int = 2048, rounds: int = 8) -> float:
    """Floating-point operations a second of a large float32 product: the best of several."""
    a, b = torch.randn(2, size, size)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def flop_fraction(data: Path, rows: list[list[int]], rounds: int) -> dict[str, float]:
    """Achieved over peak: a training step's products, by torch's counter, over its seconds, interleaved with the peak's."""
    sys.path.insert(0, str(PEERS))
    sys.argv = ["draftsmith_driver.py", str(data)]
    import driver

    driver.serve = lambda make: None  # type: ignore[assignment]
    import draftsmith_driver

    given = driver.Data(data)
    ours = draftsmith_driver.Ours(given, driver.Settings(steps=100))
    batches = [[given.row(i) for i in part] for part in rows]
    ours.step(batches)
    with FlopCounterMode(display=False) as counter:
        ours.step(batches)
    pairs = []
    for _ in range(rounds):
        peak = matmul_peak()
        began = time.perf_counter()
        ours.step(batches)
        pairs.append(counter.get_total_flops() / (time.perf_counter() - began) / peak)
    return {"median": statistics.median(pairs), "low": min(pairs), "high": max(pairs), "gflop": counter.get_total_flops() / 1e9}


def store_ratio() -> float:
    """Bytes on the disk of a token's states in int8, which costs no τ (docs/store.md), over bfloat16's."""
    recipe = load_recipe("demo", ["target.dtype=float32"])
    target = Target.load(recipe.target.name, "float32")
    examples = read_examples(recipe, "train", target, Tally())
    with tempfile.TemporaryDirectory() as scratch:
        found = store_of(target, [examples[i] for i in range(20)], recipe.head.taps or [], Path(scratch) / "store", "int8")
    return found["bytes_per_token"] / (target.hidden_size * (len(recipe.head.taps or []) + 1) * PEERS_BYTES)


def decoding(head: Path) -> dict[str, Any]:
    """Speed over plain decoding, prompts interleaved, by the head that the comparison trained."""
    target = Target.load(load_recipe("demo").target.name, "float32")
    prompts = read_prompts(shipped()["demo"].parent / "demo" / "heldout.jsonl")[CHOSE:][:PROMPTS]
    found = measure(target, HeadProposer(load_head(head), parse("chain:3")), prompts, NEW_TOKENS)
    keys = ("tau", "tau_interval", "speedup", "lossless", "time")
    return {key: found[key] for key in keys}


def page(report: dict[str, Any]) -> str:
    """docs/performance.md."""
    ours = report["draftsmith"]
    lines = [
        "# Performance",
        "",
        f"Made by `make bench` on {report['date']}: {report['machine']}, torch {report['torch']}. Numbers: "
        "[results/bench.json](results/bench.json).",
        "",
        "## Beside the neighbours",
        "",
        "EAGLE-3 for SmolLM2-135M, one layer, taps of three layers, draft vocabulary 4096, "
        f"{report['depths']} steps of training-time test, float32 on a CPU, batches of 8 conversations.",
        "",
        f"Speed and peak memory: the same optimizer settings, {report['peer_rounds']} rounds in turns on the same rows, every",
        "toolkit with its fastest split into micro-batches; medians, ranges in brackets. Acceptance: every toolkit's",
        f"own defaults, {ours['tokens']:,} tokens in one order, its checkpoint decoded by one verifier (greedy chain).",
        "",
        "| toolkit | tokens/s, ours over its | peak memory, ours over its | τ (95 % interval) | τ − 1, ours over its | "
        "tokens we need for its τ |",
        "|---|---|---|---|---|---|",
        f"| draftsmith | {ours['tokens_per_s']:.0f} tokens/s | {ours['peak'] / 1e9:.2f} GB | {interval(ours)} | | |",
    ]
    for name, found in report["peers"].items():
        if not found["ran"]:
            lines.append(f"| {name} {found['version']} | {found['why_not']} | | | | |")
            continue
        low, high = found["tokens_per_s_range"]
        tau = interval({"tau": found["tau"], "interval": found["tau_interval"]})
        needs = f"{found['tokens_to_its_tau']:.2f} of its" if found["tokens_to_its_tau"] else "more than these"
        lines.append(
            f"| {name} {found['version']} | {found['tokens_per_s_ratio']:.2f} ({low:.2f}–{high:.2f}) | "
            f"{found['peak_memory_ratio']:.2f} | {tau} | {found['accepted_ratio']:.2f} | {needs} |"
        )
    flops, decode = report["flops"], report["decode"]
    lines += [
        "",
        "What each driver had to replace on a CPU stands on top of it, in `scripts/peers/`.",
        "",
        "## The distance to the limit",
        "",
        f"A training step's matrix products are {flops['gflop']:.0f} GFLOP; over its seconds that is {flops['median']:.2f} "
        f"({flops['low']:.2f}–{flops['high']:.2f}) of what a 2048 × 2048 float32 product reaches, measured in turns.",
        "",
        "## Decoding",
        "",
        f"The head above, chain of 3, float32, {PROMPTS} held-out prompts interleaved with plain decoding: "
        f"τ {interval(decode, 'tau_interval')}, {decode['speedup']:.2f}× plain decoding, "
        f"lossless: {'yes' if decode['lossless'] else 'no'}.",
        "",
        f"Stored hidden states in int8 take {report['store_bytes_ratio']:.2f} of bfloat16's bytes ([store](store.md)).",
        "",
    ]
    return "\n".join(lines)


def interval(found: dict[str, Any], key: str = "interval") -> str:
    low, high = found[key]
    return f"{found['tau']:.2f} ({low:.2f}–{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--reuse", action="store_true")
    options = parser.parse_args()
    found = peers(options)
    own, split = found["speed"]["draftsmith"], int(found["speed"]["draftsmith"]["fastest"])
    last = found["quality"]["draftsmith"]
    note("operations")
    flops = flop_fraction(OUT / "peers" / "data", cut(list(range(8)), split), options.rounds)
    note("the store and decoding")
    decode = decoding(OUT / "peers" / "heads" / f"draftsmith-{last['step']}")
    report = {
        "command": "make bench",
        "date": datetime.date.today().isoformat(),
        "machine": found["machine"],
        "torch": found["torch"],
        "python": platform.python_version(),
        "draftsmith_version": importlib.metadata.version("draftsmith"),
        "rounds": options.rounds,
        "peer_rounds": found["rounds"],
        "depths": found["depths"],
        "draftsmith": {**{key: own[key] for key in ("tokens_per_s", "peak", "fastest")}, **last},
        "peers": {name: against(name, found) for name in found["speed"] if name != "draftsmith"},
        "flop_fraction": flops["median"],
        "flops": flops,
        "store_bytes_ratio": store_ratio(),
        "decode_speedup": decode["speedup"],
        "decode": decode,
    }
    write_whole(OUT / "report.json", json.dumps(report, indent=1) + "\n")
    write_whole(ROOT / "docs" / "results" / "bench.json", json.dumps(report, indent=1) + "\n")
    write_whole(ROOT / "docs" / "performance.md", page(report))
    note(f"{OUT / 'report.json'}, docs/performance.md")


if __name__ == "__main__":
    main()
