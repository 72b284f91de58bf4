"""Train under random SIGKILL and SIGTERM for half an hour beside an undisturbed run; both must end with the same weights.

    python scripts/soak.py [--minutes 30] [--steps N] [--out runs/soak] [--between 20 60] [--seed 0]

Not part of the tests. Writes runs/soak/report.json; the exit status is 0 where the weights are equal to the bit.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from faults import ROOT, tiny
from workplace import PLAIN, command, curve, losses, on_cpu, same_weights

from draftsmith.console import note
from draftsmith.outputs import write_whole


def started(full: list[str], log: Path) -> subprocess.Popen:
    with open(log, "a") as file:
        return subprocess.Popen(full, env=on_cpu(), stdout=file, stderr=file)


def step_seconds(place: Path) -> float:
    """How long a step takes here, from a short run of its own."""
    process = started(command(place, PLAIN, "short", "train.max_steps=200"), place / "short.log")
    if process.wait():
        raise SystemExit(f"the short run ended with status {process.returncode}: see {place}/short.log")
    rows = [json.loads(line) for line in (place / "short" / "metrics.jsonl").read_text().splitlines()]
    return sum(row["seconds"] for row in rows if row["part"] == "train") / 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--steps", type=int, help="of the run; default: as many as take those minutes here, by a short run")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "soak")
    parser.add_argument("--between", type=float, nargs=2, default=[20, 60], help="seconds from one signal to the next")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    place = tiny(options.out)
    usual = options.minutes * 60 * 0.7  # the rest goes into starting again and again
    steps = options.steps or round(usual / step_seconds(place))
    every = max(1, steps // 400)
    changes = [f"train.max_steps={steps}", f"train.checkpoint_every={every}", f"train.log_every={every}"]
    changes += [f"train.eval_every={max(1, steps // 20)}", "train.lr=1e-4"]
    note(f"{steps} steps, a checkpoint every {every}")
    calm = started(command(place, PLAIN, "calm", *changes), place / "calm.log")
    draw, began, tally, statuses = random.Random(options.seed), time.monotonic(), {"SIGKILL": 0, "SIGTERM": 0}, []
    while statuses[-1:] != [0]:
        process = started([*command(place, PLAIN, "hunted", *changes), "--resume"], place / "hunted.log")
        try:
            statuses.append(process.wait(draw.uniform(*options.between)))
        except subprocess.TimeoutExpired:
            name = draw.choice(["SIGKILL", "SIGTERM"])
            process.send_signal(signal.Signals[name])
            tally[name] += 1
            statuses.append(process.wait(120))
        if statuses[-1] not in (0, 75, -signal.SIGKILL, -signal.SIGTERM):  # the last: before Python was up
            raise SystemExit(f"the hunted run ended with status {statuses[-1]}: see {place}/hunted.log")
        note(f"{(time.monotonic() - began) / 60:.1f} min: status {statuses[-1]}, step {curve(place / 'hunted')[-1]['step']}")
    if calm.wait():
        raise SystemExit(f"the undisturbed run ended with status {calm.returncode}: see {place}/calm.log")
    last = Path("checkpoints") / f"step-{steps // every * every}" / "head"
    equal = same_weights(place / "calm" / last, place / "hunted" / last)
    best = same_weights(place / "calm" / "head", place / "hunted" / "head")
    report = {
        "command": f"python scripts/soak.py --minutes {options.minutes:g} --steps {steps}",
        "minutes": (time.monotonic() - began) / 60,
        "steps": steps,
        "checkpoint_every": every,
        "signals": tally,
        "starts": len(statuses),
        "stopped_with_75": statuses.count(75),
        "weights_equal": equal,
        "best_heads_equal": best,
        "losses_equal": losses(place / "calm")[-1] == losses(place / "hunted")[-1],
    }
    write_whole(options.out / "report.json", [json.dumps(report, indent=1) + "\n"])
    note(json.dumps(report))
    return 0 if equal and best else 1


if __name__ == "__main__":
    sys.exit(main())
