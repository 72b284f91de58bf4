"""What a run tells: metrics.jsonl, the tracker and a line on stderr."""

import json
import os
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..console import note, stderr
from ..errors import first_line
from ..recipes.schema import Recipe
from ..tracker import Tracker
from .pace import brief, clock

QUIET = 30  # seconds between two lines of progress where there is no bar


class Log:
    """metrics.jsonl, the tracker and a line on stderr; from the main process only."""

    def __init__(self, accelerator: Accelerator, out: Path, recipe: Recipe, kept_bytes: int, steps: int) -> None:
        self.accelerator = accelerator
        self.file = out / "metrics.jsonl"
        self.last: dict[str, Any] = {}
        if accelerator.is_main_process:
            self.file.touch()
            os.truncate(self.file, kept_bytes)  # what came after the checkpoint will come again
        accelerator.wait_for_everyone()
        kept: list[dict[str, Any]] = [json.loads(line) for line in self.file.read_text().splitlines()]
        held_out = [row for row in kept if row["part"] == "held_out"]
        self.evaluated = {row["step"] for row in held_out}
        taus = {row["step"]: row.get("tau", row["tau_sim"]) for row in held_out}
        self.best = max(taus.values(), default=None)
        self.best_step = max(taus, key=lambda step: taus[step], default=None)
        self.steps = steps
        self.said = -QUIET
        self.tracker = Tracker(recipe.train.tracker, out.name, out, recipe.model_dump(mode="json"), str(self.file))

    def size(self) -> int:
        """Bytes of metrics.jsonl so far."""
        return self.file.stat().st_size

    def write(self, values: dict[str, Any], part: str) -> None:
        if not self.accelerator.is_main_process:
            return
        self.append(json.dumps({"part": part, **values}) + "\n")
        self.tracker.log({f"{part}/{key}": value for key, value in values.items() if key != "step"}, step=values["step"])
        if part == "train":
            self.tell(values)
        else:
            self.last = values
            note(f"step {values['step']}: held-out " + " ".join(f"{k} {v:.3f}" for k, v in values.items() if k != "step"))

    def append(self, line: str) -> None:
        """Add a whole line to metrics.jsonl; where the disk is full, say so and go on without it."""
        before = self.size()
        try:
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            os.truncate(self.file, before)
            note(f"WARNING: a row of {self.file} could not be written ({first_line(error)}): make room")

    def tell(self, values: dict[str, Any]) -> None:
        """Show life where stderr is no terminal, and so has no bar: with the first row, the last, and few between."""
        now = time.monotonic()
        if not stderr.is_terminal and (now - self.said >= QUIET or values["step"] == self.steps):
            self.said = now
            note(f"step {values['step']}/{self.steps}: {brief(values)}, {clock(values['seconds_left'])} left")
