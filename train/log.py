"""What a run tells: metrics.jsonl, the tracker and a line on stderr."""

import json
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..console import note, stderr
from ..recipes.schema import Recipe
from ..tracker import Tracker
from .pace import brief, clock

QUIET = 30  # seconds between two lines of progress where there is no bar


class Log:
    """metrics.jsonl, the tracker and a line on stderr; from the main process only."""

    def __init__(self, accelerator: Accelerator, out: Path, recipe: Recipe, resumed_at: int | None, steps: int) -> None:
        self.accelerator = accelerator
        self.file = out / "metrics.jsonl"
        self.last: dict[str, Any] = {}
        kept: list[dict[str, Any]] = []
        if resumed_at is not None and self.file.exists():  # what came after the checkpoint will come again
            kept = [row for row in map(json.loads, self.file.read_text().splitlines()) if row["step"] <= resumed_at]
        held_out = [row for row in kept if row["part"] == "held_out"]
        self.evaluated = {row["step"] for row in held_out}
        self.best: float | None = max((row.get("tau", row["tau_sim"]) for row in held_out), default=None)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            self.file.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self.steps = steps
        self.said = -QUIET
        self.tracker = Tracker(recipe.train.tracker, out.name, out, recipe.model_dump(mode="json"), str(self.file))

    def write(self, values: dict[str, Any], part: str) -> None:
        if not self.accelerator.is_main_process:
            return
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part, **values}) + "\n")
        self.tracker.log({f"{part}/{key}": value for key, value in values.items() if key != "step"}, step=values["step"])
        if part == "train":
            self.tell(values)
        else:
            self.last = values
            note(f"step {values['step']}: held-out " + " ".join(f"{k} {v:.3f}" for k, v in values.items() if k != "step"))

    def tell(self, values: dict[str, Any]) -> None:
        """Show life where stderr is no terminal, and so has no bar: with the first row, the last, and few between."""
        now = time.monotonic()
        if not stderr.is_terminal and (now - self.said >= QUIET or values["step"] == self.steps):
            self.said = now
            note(f"step {values['step']}/{self.steps}: {brief(values)}, {clock(values['seconds_left'])} left")
