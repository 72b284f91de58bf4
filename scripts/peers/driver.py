"""What bench_peers.py asks of every neighbour, in the neighbour's own environment: no more than torch is imported here.

A driver is a script of one neighbour: it builds that toolkit's head for the data's target, and steps it.

    PYTHON scripts/peers/NAME.py DATA

It reads one JSON object a line from stdin and answers each with one on stdout:
    {"do": "make", "settings": {...}}   -> {"parameters": N, "settings": {...}}    a fresh head and optimizer
    {"do": "step", "rows": [[i, ...]]}  -> {"seconds", "tokens", "loss", "peak"}   one optimizer step over these micro-batches
    {"do": "save", "to": "DIR"}         -> {}                                      the toolkit's own checkpoint
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor


@dataclass
class Settings:
    """The head's shape and the optimizer's settings; ``own`` leaves the latter, and the loss, at the toolkit's own defaults.

    ``steps``: of the whole run, which schedules need.
    """

    depths: int = 3
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    warmup: int = 1
    steps: int = 100
    seed: int = 0
    own: bool = False


@dataclass
class Row:
    """One conversation. ``ids`` int64 [time]; ``mask`` bool [time], the target's own tokens; ``taps`` float32
    [time, taps * hidden], the inputs of the tapped layers, and ``last`` float32 [time, hidden], which its lm_head reads."""

    ids: Tensor
    mask: Tensor
    taps: Tensor
    last: Tensor


@dataclass
class Data:
    """DATA: target.json (the target's Hugging Face config), ends.safetensors (its ``embed`` and ``lm_head`` [vocab, hidden]
    float32, ``norm`` [hidden], and ``target_ids`` int64 [draft vocabulary], ascending), rows.safetensors (ids, mask, taps, last
    of all rows, end to end, and ``ends`` int64 [rows]) and bench.json ({"taps": [...], "target": directory of the target}).
    """

    place: Path
    config: dict[str, Any] = field(init=False)
    bench: dict[str, Any] = field(init=False)
    ends: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.config = json.loads((self.place / "target.json").read_text())
        self.bench = json.loads((self.place / "bench.json").read_text())
        with safe_open(self.place / "ends.safetensors", "pt") as file:
            self.ends = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.rows = safe_open(self.place / "rows.safetensors", "pt")
        self.bounds = [0, *self.rows.get_tensor("ends").tolist()]

    def row(self, index: int) -> Row:
        first, last = self.bounds[index], self.bounds[index + 1]
        return Row(*(self.rows.get_slice(name)[first:last] for name in ("ids", "mask", "taps", "last")))

    def padded(self, rows: list[Row]) -> Row:
        """Rows side by side [lines, time, ...], zeros behind the shorter ones."""
        parts = ([getattr(row, name) for row in rows] for name in ("ids", "mask", "taps", "last"))
        return Row(*(torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for part in parts))


class Trainer(Protocol):
    def parameters(self) -> list[Tensor]:
        """What is trained."""
        ...

    def step(self, batches: list[list[Row]]) -> float:
        """One optimizer step over these micro-batches; returns the loss."""
        ...

    def save(self, place: Path) -> None: ...


def peak_memory(reset: bool = False) -> int:
    """The largest resident set of this process since the last reset, in bytes (Linux, glibc), without the pages of files that
    it maps: those of the rows that it has read. A reset frees what it can.
    """
    if reset:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    peak, mapped = (int(status.split(f"{key}:")[1].split()[0]) for key in ("VmHWM", "RssFile"))
    return 1024 * (peak - mapped)


def serve(make: Callable[[Data, Settings], Trainer]) -> None:
    """Answer what stdin asks for, until it ends. What the toolkit prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    data, trainer = Data(Path(sys.argv[1])), None
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = {}
        if asked["do"] == "make":
            settings = Settings(**asked["settings"])
            torch.manual_seed(settings.seed)
            trainer = make(data, settings)
            answer = {"parameters": sum(p.numel() for p in trainer.parameters()), "resident": peak_memory(reset=True)}
        elif asked["do"] == "step":
            assert trainer is not None, "make comes first"
            batches = [[data.row(i) for i in rows] for rows in asked["rows"]]
            peak_memory(reset=True)
            began = time.perf_counter()
            loss = trainer.step(batches)
            answer = {"seconds": time.perf_counter() - began, "loss": loss, "peak": peak_memory()}
            answer["tokens"] = sum(len(row.ids) for rows in batches for row in rows)
        elif asked["do"] == "save":
            assert trainer is not None, "make comes first"
            trainer.save(Path(asked["to"]))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
