"""Checkpoints that are whole or absent, and the step to go on from."""

import json
import shutil
from pathlib import Path
from typing import Any

from ..errors import UserError


def save(accelerator: Any, folder: Path, step: int, keep: int) -> None:
    """Write ``folder``/step-N with weights, optimizer, scheduler and RNG, beside and renamed; keep ``keep``."""
    partial, whole = folder / f".step-{step}", folder / f"step-{step}"
    accelerator.save_state(str(partial))
    if accelerator.is_main_process:
        (partial / "progress.json").write_text(json.dumps({"step": step}) + "\n")
        if whole.exists():
            shutil.rmtree(whole)
        partial.rename(whole)
        for old in all_whole(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def resume(accelerator: Any, folder: Path) -> int:
    """Load the newest whole checkpoint into the prepared objects and return the step it was written after."""
    found = all_whole(folder)
    if not found:
        raise UserError(f"{folder} holds no whole checkpoint to resume from: start without --resume.")
    accelerator.load_state(str(found[-1]))
    return json.loads((found[-1] / "progress.json").read_text())["step"]


def all_whole(folder: Path) -> list[Path]:
    """The whole checkpoints, oldest first; half-written ones have another name."""
    found = [path for path in folder.glob("step-*") if (path / "progress.json").is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
