"""Checkpoints that are whole or absent, and the newest to go on from."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType
from safetensors import SafetensorError

from ..console import note
from ..errors import UserError, first_line
from ..outputs import put_in_place, sync
from .run import Run

PROGRESS = "progress.json"  # written last: what a checkpoint was taken after, and the digest of its every other file


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: RUN/checkpoints/step-N, with the head as a directory of its own, ``head``, to evaluate or export.

    ``metrics``: bytes of metrics.jsonl then; ``chunk``: rows of one piece of the logits (see ``Judge``), which the sums'
    last bits depend on; ``processes`` wrote it.
    """

    path: Path
    step: int
    metrics: int
    chunk: int | None
    processes: int


def keep_heads_apart(accelerator: Accelerator) -> None:
    """Leave the head out of accelerate's own state, where it would carry the names that DDP gives its tensors.

    A sharded head's shards stay in: they are loaded in place.
    """
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
    if accelerator.distributed_type not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())


def save(run: Run, step: int, metrics: int, best: int | None) -> str | None:
    """Write checkpoints/step-N beside and rename it; then drop all but the newest few and that of step ``best``.

    It holds the head, optimizer, schedule, scaler and random states. Returns None, or why it could not be written (a full
    disk, say): then nothing of it stays and the older ones are untouched. All processes call this, and agree on the answer.
    """
    accelerator, folder = run.accelerator, run.out / "checkpoints"
    partial, whole = folder / f".step-{step}", folder / f"step-{step}"
    head = run.snapshot()

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)  # what a kill left of an earlier attempt
        (partial / "head").mkdir(parents=True)
        assert head is not None  # the main process has it
        head.save(partial / "head")

    def finish() -> None:
        files = {str(path.relative_to(partial)): digest(path) for path in sorted(partial.rglob("*")) if path.is_file()}
        state = {"step": step, "metrics": metrics, "chunk": run.chunk, "processes": accelerator.num_processes, "files": files}
        (partial / PROGRESS).write_text(json.dumps(state, indent=1) + "\n")
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        put_in_place(partial, whole)
        sync(folder)
        for old in steps(folder)[: -run.recipe.train.keep_checkpoints]:
            if step_of(old) != best:
                shutil.rmtree(old)

    reason = attempt(accelerator, begin, main_only=True)
    reason = reason or attempt(accelerator, lambda: accelerator.save_state(str(partial)))
    reason = reason or attempt(accelerator, finish, main_only=True)
    if reason and accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    return reason


def attempt(accelerator: Accelerator, action: Callable[[], object], main_only: bool = False) -> str | None:
    """Do it, on every process or on the main one; None where it succeeded on all, else why it failed."""
    reason = None
    try:
        if accelerator.is_main_process or not main_only:
            action()
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have errors of their own for a full disk
        reason = first_line(error)
    failed = accelerator.reduce(torch.tensor(float(reason is not None), device=accelerator.device), reduction="sum")
    return reason or ("another process could not write its part" if failed else None)


def newest(folder: Path, say: bool = True) -> Checkpoint | None:
    """The newest whole checkpoint, None where none was ever written; each broken one is passed over, and named to ``say``.

    Raises UserError where all there are are broken.
    """
    found = steps(folder)
    for path in reversed(found):
        try:
            return opened(path)
        except (OSError, ValueError, KeyError) as error:
            if say:
                note(f"WARNING: {path} is not whole ({first_line(error)}): going on from the one before it.")
    if found:
        raise UserError(f"{folder} holds no whole checkpoint to resume from: start anew, without --resume and with --force.")
    return None


def opened(path: Path) -> Checkpoint:
    """Read a checkpoint's progress. Raises OSError, ValueError or KeyError where a file is missing or not what was written."""
    progress = json.loads((path / PROGRESS).read_text())
    for name, expected in progress["files"].items():
        if digest(path / name) != expected:
            raise ValueError(f"{name} is not what was written")
    return Checkpoint(path, progress["step"], progress["metrics"], progress["chunk"], progress["processes"])


def load(accelerator: Accelerator, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's state into the prepared objects, on every process."""
    if checkpoint.processes != accelerator.num_processes and accelerator.is_main_process:
        note(
            f"{checkpoint.path} was written by {checkpoint.processes} processes, this run has {accelerator.num_processes}: it "
            "reads the same rows in the same order, but its numbers agree to rounding only."
        )
    accelerator.load_state(str(checkpoint.path))


def steps(folder: Path) -> list[Path]:
    """The checkpoints that have their name, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
