"""How fast a run goes, and what it holds in memory."""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator

from ..data.features import FeatureBatch

# what a row of metrics.jsonl takes from the clock or the machine: the rest of it is the same when the run is repeated
CLOCKED = ("seconds", "tokens_per_s", "supervised_tokens_per_s", "seconds_left", "peak_memory")


class Pace:
    """What this process has read and how long its steps took, since the last row of metrics.jsonl.

    The clock runs within steps alone: evaluations and checkpoints make no run slower, they only move its end. It begins
    with the process's first step, so a resumed run does not count the time before.
    """

    def __init__(self) -> None:
        self.began: float | None = None
        self.steps = 0
        self.clear()

    def clear(self) -> None:
        self.seconds = 0.0
        self.tokens = self.slots = self.skipped = 0
        self.supervised: list[torch.Tensor] = []  # summed when they are asked for: no step waits for the device

    @contextmanager
    def step(self) -> Iterator[None]:
        """The time of one step."""
        began = time.perf_counter()
        self.began = self.began or began
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began
            self.steps += 1

    def count(self, batches: Sequence[FeatureBatch]) -> None:
        """Count what a step reads: tokens, those supervised among them, and places with padding."""
        self.tokens += sum(batch.tokens for batch in batches)
        self.supervised += [batch.mask.sum() for batch in batches]
        self.slots += sum(batch.ids.numel() for batch in batches)

    def row(self, accelerator: Accelerator, left: int, damaged: int = 0) -> dict[str, Any]:
        """What all processes did since the last call, for metrics.jsonl; every one of them calls this.

        ``tokens`` and ``supervised_tokens`` read, ``padding`` (its share of all places), ``skipped_steps`` and
        ``damaged_rows`` where there were any, and CLOCKED: ``seconds`` in steps, the two rates, ``seconds_left`` for ``left``
        more steps with what lies between them, as steps have taken so far, and ``peak_memory`` (see there), of the process
        that holds most. ``damaged``: the rows that this process has found damaged since it began.
        """
        supervised = sum(int(each) for each in self.supervised)
        own = [self.tokens, supervised, self.slots, damaged, peak_memory()]
        every = accelerator.gather(torch.tensor([own], dtype=torch.float64, device=accelerator.device))
        tokens, supervised, slots, damaged = (int(each) for each in torch.as_tensor(every)[:, :4].sum(0))
        found: dict[str, Any] = {"tokens": tokens, "supervised_tokens": supervised, "padding": 1 - tokens / max(slots, 1)}
        skipped = {"skipped_steps": self.skipped, "damaged_rows": damaged}
        found |= {name: count for name, count in skipped.items() if count}
        passed = time.perf_counter() - (self.began or time.perf_counter())
        found |= {
            "seconds": self.seconds,
            "tokens_per_s": tokens / max(self.seconds, 1e-9),
            "supervised_tokens_per_s": supervised / max(self.seconds, 1e-9),
            "seconds_left": passed / max(self.steps, 1) * left,
            "peak_memory": int(torch.as_tensor(every)[:, 4].max()),
        }
        self.clear()
        return found


def peak_memory() -> int:
    """Bytes: the most that this process ever had of one GPU or, without any, resident in main memory."""
    if torch.cuda.is_available():
        return max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def brief(row: dict[str, Any]) -> str:
    """The newest row of metrics.jsonl for one who watches; empty before the first."""
    if not row:
        return ""
    rates = f"{short(row['tokens_per_s'])} tokens/s ({short(row['supervised_tokens_per_s'])} supervised)"
    return f"loss {row['loss']:.3f}, τ-sim {row['tau_sim']:.2f}, {rates}, {row['peak_memory'] / 2**30:.1f} GiB"


def short(number: float) -> str:
    """A count in three digits: 950, 12.3k, 1.25M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """A time to read: 1 d 04:00, 4:05:09 or 12:30."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
