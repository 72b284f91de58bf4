"""Numbers sent to wandb or tensorboard, which may be missing, unreachable or break without a cost to what is measured."""

import os
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from .console import note
from .errors import first_line

TRACKERS = ("tensorboard", "wandb")
LAST_WORDS = 20  # seconds for wandb to send what is left at the end: torchrun leaves a stopped run 30, and the files stay


class Tracker:
    """One run of wandb or tensorboard, from the main process alone; the other processes' trackers do nothing.

    ``kind``: one of TRACKERS, or "none". Its files go into ``directory``/wandb or ``directory``/tensorboard. ``settings`` are
    the run's hyperparameters, sections and all. wandb stays offline unless a key is set. The first failure of a tracker's
    library or server is told on the terminal, with ``kept`` for the place that has all numbers; from then on nothing is sent.
    """

    def __init__(self, kind: str, name: str, directory: Path, settings: dict[str, Any], kept: str) -> None:
        self.kind, self.kept = kind, kept
        self.own: GeneralTracker | None = None
        if kind == "none" or not PartialState().is_main_process:
            return
        try:
            self.own = wandb_run(name, directory) if kind == "wandb" else TensorBoardTracker("tensorboard", directory)
            self.own.start()
            if settings:  # tensorboard's hyperparameters are one flat table of plain values
                self.own.store_init_configuration(settings if kind == "wandb" else flat(settings))
        except Exception as error:  # whatever a tracker's library or server raises
            self.give_up(error)

    def log(self, values: dict[str, float], step: int) -> None:
        """Send numbers by their names."""
        if not self.own:
            return
        try:
            self.own.log(values, step=step)
        except Exception as error:
            self.give_up(error)

    def finish(self) -> None:
        """Send what is left and end the tracker's run."""
        if not self.own:
            return
        try:
            self.own.finish()
        except Exception as error:
            self.give_up(error)
        self.own = None

    def give_up(self, error: Exception) -> None:
        self.own = None
        missing = isinstance(error, ModuleNotFoundError)
        reason = f"is not installed: pip install {self.kind}" if missing else f"failed ({first_line(error)})"
        note(f"WARNING: {self.kind} {reason}. Nothing more is logged to it; {self.kept} has all numbers.")


def wandb_run(name: str, directory: Path) -> WandBTracker:
    import wandb

    os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(LAST_WORDS))  # by default it waits for its server without end
    offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False)
    return WandBTracker("draftsmith", name=name, dir=str(directory), **({"mode": "offline"} if offline else {}))


def flat(settings: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Sections of values as one: section.key, and what is no plain value as text."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{above}{key}.")
        else:
            found[above + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return found
