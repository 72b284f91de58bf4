"""Training runs that meet a real fault, each in a process of its own: python tests/faults_train.py NAME RECIPE."""

import resource
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

from draftsmith.console import run_command_line
from draftsmith.recipes.schema import load_recipe
from draftsmith.train.faults import told_plainly
from draftsmith.train.loop import train
from draftsmith.train.prepare import prepare, start

FULL = 4096  # bytes: no file may grow further while the disk is full


def full_disk(recipe: str) -> None:
    """No file can grow from the first checkpoint on, until step 6 has been logged: as on a disk that is full for a while."""
    loaded = load_recipe(recipe)
    run = Path(loaded.output)

    def watch() -> None:
        while not (run / "checkpoints" / "step-2").is_dir():
            time.sleep(0.001)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))
        while not any('"step": 6' in line for line in (run / "metrics.jsonl").read_text().splitlines()):
            time.sleep(0.001)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()
    train(loaded)


def little_memory(recipe: str) -> None:
    """The address space ends where the first step would need more of it."""
    loaded = load_recipe(recipe)
    run = prepare(loaded, start(loaded), Path(loaded.output))
    torch.set_num_threads(1)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, resource.RLIM_INFINITY))
    with told_plainly(run):
        run.advance(1, run.global_batch(0))


if __name__ == "__main__":
    action = {"full_disk": full_disk, "little_memory": little_memory}[sys.argv[1]]
    run_command_line(lambda: action(sys.argv[2]))
