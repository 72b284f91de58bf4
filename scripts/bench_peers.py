"""draftsmith's EAGLE-3 training beside its neighbours': the same sequences, hidden states, head shape, machine and minutes.

    python scripts/bench_peers.py [--out runs/bench/peers] [--rounds 7] [--rows 640] [--depths 3] [--only speed|quality]

speculators 0.9, SpecForge 0.2 and NeMo AutoModel 0.7 are installed from the package index, each into an environment of its own
that sees draftsmith's torch, and called: scripts/peers/ has a driver for each, which says what it had to replace on a CPU.
Nothing of theirs is in this repository.

Speed: shared optimizer settings; after three steps each, toolkits take turns on the same rows, in every split of them into
micro-batches. A toolkit counts with its fastest split. Quality: every toolkit with its own defaults takes the same rows once,
in one order; its own checkpoint is read by ``import_head``, and one verifier decodes held-out prompts. draftsmith's head is
also measured on the way. The output is report.json; docs/performance.md shows the checked-in one.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))  # read when torch is imported
os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])

import torch

from draftsmith.console import note
from draftsmith.eval.harness import measure
from draftsmith.eval.prompts import read_prompts
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.tree import parse
from draftsmith.heads.base import DraftHead
from draftsmith.heads.engines.published import import_head
from draftsmith.heads.kinds import load_head
from draftsmith.outputs import write_whole
from draftsmith.recipes.schema import load_recipe, shipped
from draftsmith.target import Target

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "scripts" / "peers"
NAMES = ("draftsmith", "speculators", "specforge", "automodel")
WATCHED = (0.1, 0.2, 0.35, 0.5, 1)  # shares of the rows after which draftsmith's own head is measured
BATCH, SPLITS, WARM = 8, (8, 4, 1), 3
PROMPTS, NEW_TOKENS, CHOSE = 12, 48, 4  # the first held-out prompts chose the recipe


class Toolkit:
    """A driver in its own process: see scripts/peers/driver.py."""

    def __init__(self, name: str, data: Path, settings: dict[str, Any]) -> None:
        command = [str(environment(name)), str(PEERS / f"{name}_driver.py"), str(data)]
        self.log = data.parent / f"{name}.log"
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.made = self.ask(do="make", settings=settings)

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        if not (answer := self.process.stdout.readline()):
            raise SystemExit(f"a driver ended in the middle; its log has the reason: {self.log}")
        return json.loads(answer)

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def environment(name: str) -> Path:
    """The Python that has the toolkit; made where it is missing."""
    if name == "draftsmith":
        return Path(sys.executable)
    place, pins = ROOT / ".venv-peers" / name, PEERS / f"{name}.txt"
    python, done = place / "bin" / "python", place / "ready"
    if not done.is_file() or done.read_text() != pins.read_text():
        note(f"making {place}")
        venv.create(place, with_pip=True, clear=True)
        (site,) = place.glob("lib/python*/site-packages")
        (site / "draftsmith-environment.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
        install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "-r", str(pins)]
        subprocess.run(install, check=True)
        done.write_text(pins.read_text())
    return python


def batches(rows: int, seed: int) -> list[list[int]]:
    """The rows in one order, a batch a step; what does not fill a batch is left out."""
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    return [order[i : i + BATCH] for i in range(0, rows - BATCH + 1, BATCH)]


def cut(rows: Sequence[int], size: int) -> list[list[int]]:
    return [list(rows[i : i + size]) for i in range(0, len(rows), size)]


def speed(names: list[str], data: Path, options: argparse.Namespace, plan: list[list[int]]) -> dict[str, Any]:
    """Seconds, tokens a second and peak memory of a step, round by round."""
    settings = {"depths": options.depths, "steps": len(SPLITS) * (WARM + options.rounds)}
    toolkits = {name: Toolkit(name, data, settings) for name in names}
    cases = [(name, size) for name in names for size in SPLITS]
    steps: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    for i in range(WARM + options.rounds):
        turn = i % len(cases)
        for name, size in cases[turn:] + cases[:turn]:
            found = toolkits[name].ask(do="step", rows=cut(plan[i], size))
            if i >= WARM:
                steps[name, size].append(found)
        note(f"round {i - WARM + 1} of {options.rounds}" if i >= WARM else "warming up")
    for toolkit in toolkits.values():
        toolkit.end()
    result: dict[str, Any] = {}
    for name in names:
        splits = {
            str(size): {
                "seconds": [step["seconds"] for step in steps[name, size]],
                "tokens_per_s": statistics.median(step["tokens"] / step["seconds"] for step in steps[name, size]),
                "peak": max(step["peak"] for step in steps[name, size]),
            }
            for size in SPLITS
        }
        fastest = max(splits, key=lambda size: splits[size]["tokens_per_s"])
        result[name] = {"fastest": fastest, "splits": splits, **splits[fastest], **toolkits[name].made}
    ours = result["draftsmith"]
    for name in names:
        ratios = [theirs / own for own, theirs in zip(ours["seconds"], result[name]["seconds"], strict=True)]
        result[name]["ours_is_faster"] = {"median": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
        result[name]["our_peak"] = ours["peak"] / result[name]["peak"]
        grown = [each["peak"] - each["resident"] for each in (ours, result[name])]
        result[name]["our_peak_above_resident"] = grown[0] / grown[1]
    return result


def quality(names: list[str], data: Path, options: argparse.Namespace, plan: list[list[int]], fastest: dict[str, int]) -> dict:
    """τ by our verifier after equal tokens, every toolkit with its own defaults."""
    recipe = load_recipe("demo")
    target = Target.load(recipe.target.name, "float32")
    prompts = read_prompts(shipped()["demo"].parent / "demo" / "heldout.jsonl")[CHOSE:][:PROMPTS]
    shutil.rmtree(data.parent / "heads", ignore_errors=True)
    result: dict[str, Any] = {}
    for name in names:
        toolkit = Toolkit(name, data, {"depths": options.depths, "steps": len(plan), "own": True})
        marks = {round(len(plan) * share) for share in (WATCHED if name == "draftsmith" else (1,))}
        tokens, points = 0, []
        for step, rows in enumerate(plan, start=1):
            tokens += toolkit.ask(do="step", rows=cut(rows, fastest[name]))["tokens"]
            if step in marks:
                place = data.parent / "heads" / f"{name}-{step}"
                toolkit.ask(do="save", to=str(place))
                head = load_head(place) if name == "draftsmith" else import_head(place, target)
                points.append({"step": step, "tokens": tokens, **held_out(target, head, prompts, options.depths)})
                note(f"{name}, step {step}: τ {points[-1]['tau']:.3f}")
        toolkit.end()
        result[name] = {**points[-1], "parameters": toolkit.made["parameters"], "points": points}
    return result


def held_out(target: Target, head: DraftHead, prompts: list[Any], depths: int) -> dict[str, Any]:
    found = measure(target, HeadProposer(head, parse(f"chain:{depths}")), prompts, NEW_TOKENS, baseline=0)
    return {"tau": found["tau"], "interval": found["tau_interval"], "accepted_per_position": found["accepted_per_position"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench" / "peers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--depths", type=int, default=3)
    parser.add_argument("--toolkits", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--only", choices=("speed", "quality"), help="the other part is kept from the last report")
    options = parser.parse_args()
    data = options.out / "data"
    if not (data / "bench.json").is_file() or json.loads((data / "bench.json").read_text())["rows"] != options.rows:
        subprocess.run([sys.executable, str(PEERS / "make_data.py"), str(data), "--rows", str(options.rows)], check=True)
    names, plan = ["draftsmith", *(name for name in options.toolkits if name != "draftsmith")], batches(options.rows, seed=0)
    place = options.out / "report.json"
    report: dict[str, Any] = json.loads(place.read_text()) if options.only else {}
    report |= {
        "command": f"python scripts/bench_peers.py --rounds {options.rounds} --rows {options.rows} --depths {options.depths}",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "rows": options.rows,
        "rounds": options.rounds,
        "depths": options.depths,
        "batch": BATCH,
    }
    if options.only != "quality":
        report["speed"] = speed(names, data, options, plan)
        write_whole(place, json.dumps(report, indent=1) + "\n")
    if options.only != "speed":
        fastest = {name: int(found["fastest"]) for name, found in report["speed"].items()}
        report["quality"] = quality(names, data, options, plan, fastest)
        write_whole(place, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
