"""run.json and recipe.yaml: what a run was made from."""

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..outputs import write_whole
from ..recipes.schema import Recipe
from ..target import Target

PACKAGES = ("torch", "transformers", "datasets", "accelerate", "peft", "safetensors")


def write_run(accelerator: Any, recipe: Recipe, target: Target, data: dict[str, Any], out: Path) -> None:
    """Write both files into the run directory, from the main process; ``data`` says what became of the data files."""
    if not accelerator.is_main_process:
        return
    write_whole(out / "recipe.yaml", [recipe.to_yaml()])
    record = {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "git_commit": git_commit(),
        "target": {"name": target.name, "fingerprint": target.fingerprint, "dtype": str(target.dtype)},
        "data": data,
        "seed": recipe.train.seed,
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
    }
    write_whole(out / "run.json", [json.dumps(record, indent=2) + "\n"])


def git_commit() -> str | None:
    """The commit of the checkout this package runs from; None for an installed wheel."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    found = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or None
