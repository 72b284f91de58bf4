"""Kill runs and extractions, run every test that docs/faults.md names, and write what came of it: make faults.

    python scripts/faults.py [--out runs/faults] [--kills 6] [--seed 0]

runs/faults/report.json: {kills, resumed_bitwise_equal, conversations_lost, conversations_doubled, ranks_equal, cases}; the exit
status is 0 where all of it is as it should be.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from conftest import build_tokenizer  # noqa: E402
from faults_extract import killed_extraction  # noqa: E402
from killing import draftsmith, kill_until_done, kill_when  # noqa: E402
from workplace import build, curve, launch, losses, same_weights, torchrun  # noqa: E402

from draftsmith.console import note  # noqa: E402
from draftsmith.outputs import write_whole  # noqa: E402
from draftsmith.target import Target  # noqa: E402

LINE = re.compile(r"^\| (.*?) \| (.*?) \| (tests/\S+) \|$", re.M)


def tiny(place: Path) -> Path:
    """A tiny random target with data and a recipe in ``place``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    place.mkdir(parents=True)
    return build(place, Target(LlamaForCausalLM(config).float(), build_tokenizer(), "tiny"))


def killed_training(place: Path, kills: int, seed: int) -> tuple[int, bool]:
    """How many SIGKILLs hit a run, started again after each, and whether it ended with an undisturbed one's bits."""
    changes = ["train.checkpoint_every=1", "train.epochs=6"]

    def job(out: str) -> partial:
        sets = [f"--set={change}" for change in (f"output={place}/{out}", *changes)]
        return partial(draftsmith, "train", place / "recipe.yaml", *sets, "--resume")

    kill_until_done(job("undisturbed"), 0, 0)
    draw, run, hits = random.Random(seed), place / "killed", 0
    for _ in range(kills):
        rows = len(curve(run)) if (run / "metrics.jsonl").is_file() else 0
        wanted = rows + draw.randrange(1, 4)

        def due(wanted: int = wanted, pause: float = draw.uniform(0, 0.1)) -> bool:
            there = (run / "metrics.jsonl").is_file() and len(curve(run)) >= wanted
            time.sleep(pause if there else 0)
            return there

        hits += kill_when(job("killed"), due)
    kill_until_done(job("killed"), 0, 0)
    last = Path("checkpoints") / "step-30" / "head"
    calm = place / "undisturbed"
    equal = curve(run) == curve(calm) and same_weights(run / last, calm / last) and same_weights(run / "head", calm / "head")
    return hits, equal


def ranks(place: Path) -> dict[str, float]:
    """The last loss of one process with four micro-batches a step, two with two, four with one."""
    found = {}
    for processes, accumulated in ((1, 4), (2, 2), (4, 1)):
        out = f"{processes}x{accumulated}"
        launch(place, torchrun(processes), out, "train.micro_batch_size=1")
        found[out] = losses(place / out)[-1]
    return found


def cases() -> list[dict[str, Any]]:
    """Every line of docs/faults.md that names a test, and what the test says."""
    table = LINE.findall((ROOT / "docs" / "faults.md").read_text())
    names = sorted({test for _, _, test in table})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=line", *names], cwd=ROOT, capture_output=True, text=True
    )
    told = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) (tests/\S+?)(?:\[.*?\])?(?: - (.*))?$", done.stdout, re.M)
    found = []
    for fault, expected, test in table:
        own = [(status, why) for status, name, why in told if name == test]
        bad = [why or status for status, why in own if status != "PASSED"]
        seen = bad[0] if bad else f"as expected, {len(own)} tests" if own else done.stdout[-500:]
        found.append({"fault": fault, "expected": expected, "seen": seen, "ok": bool(own) and not bad, "test": test})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "faults")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    place = tiny(options.out / "training")
    hits, equal = killed_training(place, options.kills, options.seed)
    note(f"training: {hits} kills, the same bits: {equal}")
    extraction = killed_extraction(options.out / "extraction", options.kills, options.seed)
    note(f"extraction: {extraction}")
    curves = ranks(place)
    note(f"the same loss from {curves}")
    report = {
        "command": "make faults",
        "kills": hits + extraction["kills"],
        "resumed_bitwise_equal": equal and extraction["bytes_equal"],
        "conversations_lost": extraction["rows_lost"],
        "conversations_doubled": extraction["rows_doubled"],
        "ranks_equal": curves,
        "cases": cases(),
    }
    write_whole(options.out / "report.json", [json.dumps(report, indent=1) + "\n"])
    failed = [case for case in report["cases"] if not case["ok"]]
    for case in failed:
        note(f"NOT as docs/faults.md says: {case['fault']}: {case['seen']} ({case['test']})")
    spread = max(curves.values()) - min(curves.values())
    sound = equal and extraction["bytes_equal"] and extraction["rows_lost"] == extraction["rows_doubled"] == 0
    note(f"{len(report['cases']) - len(failed)} of {len(report['cases'])} faults as told; {options.out}/report.json")
    return 0 if sound and not failed and spread < 1e-4 * max(curves.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
