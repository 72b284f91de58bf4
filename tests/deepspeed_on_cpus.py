"""Train under DeepSpeed on CPU processes: the collectives in shared memory that it would compile first are left to gloo.

accelerate launch --config_file recipes/accelerate/zero2.yaml deepspeed_on_cpus.py RECIPE --set ...

The environment's SPOILT is a step whose loss is infinite on the last process.
"""

import os
import runpy
from typing import Any

import deepspeed  # pyright: ignore[reportMissingImports]
import torch

from draftsmith.train.run import Run

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
spoilt, now = int(os.environ.get("SPOILT", 0)), [0]
advance, judged = Run.advance, Run.judged


def noted(run: Run, step: int, rows: list[int]) -> Any:
    now[0] = step
    return advance(run, step, rows)


def spoiling(run: Run, *args: Any) -> Any:
    loss, sums = judged(run, *args)
    return (loss + torch.inf if now[0] == spoilt and run.accelerator.is_last_process else loss), sums


Run.advance, Run.judged = noted, spoiling  # type: ignore[method-assign]
runpy.run_module("draftsmith.train", run_name="__main__")
