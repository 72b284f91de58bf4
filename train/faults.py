"""What goes wrong in the middle of a run, told plainly, with the rows and the keys that it hangs on."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import DistBackendError, DistNetworkError

from ..console import note
from ..data.examples import Examples
from ..errors import UserError, first_line
from .run import Run

IN_A_ROW = 10  # steps without finite numbers, after which a run that skips them stops all the same


def spoilt(run: Run, step: int, rows: list[int], found: str) -> None:
    """Record in faults.jsonl a step whose loss or gradient is not finite. Raises UserError unless the recipe skips such steps,
    and where too many have come in a row.
    """
    place = run.out / "faults.jsonl"
    examples = getattr(run.train, "examples", None)
    origins = {"from": [examples.origin(row) for row in rows]} if isinstance(examples, Examples) else {}
    if run.accelerator.is_main_process:
        with open(place, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "fault": found, "rows": rows, **origins}) + "\n")
    run.pace.skipped += 1
    run.spoilt_in_a_row += 1
    skips = run.recipe.train.nonfinite == "skip"
    if not skips:
        raise UserError(
            f"step {step}: {found}; its rows are in {place}: take them out, lower train.lr, set train.precision to no, or set "
            "train.nonfinite to skip."
        )
    if run.spoilt_in_a_row >= IN_A_ROW:
        raise UserError(
            f"step {step}: {found}, as in the {IN_A_ROW - 1} steps before; their rows are in {place}: lower train.lr or set "
            "train.precision to no, and resume."
        )
    if run.accelerator.is_main_process:
        note(f"WARNING: step {step} is skipped: {found}; its rows are in {place}")


@contextmanager
def told_plainly(run: Run) -> Iterator[None]:
    """Turn what torch raises where memory runs out, or another process is gone, into a sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error):
            raise UserError(memory_sentence(run, error)) from error
        if lost_process(run, error):
            raise UserError(
                f"process {run.accelerator.process_index} lost another one ({first_line(error)}): the launcher's log names the "
                "one that died first; start again with --resume."
            ) from error
        raise


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def lost_process(run: Run, error: BaseException) -> bool:
    """Whether a collective failed; gloo raises plain RuntimeErrors."""
    known = isinstance(error, DistBackendError | DistNetworkError) or "gloo" in str(error)
    return known and run.accelerator.num_processes > 1


def memory_sentence(run: Run, error: BaseException) -> str:
    recipe = run.recipe
    keys: dict[str, Any] = {
        "train.micro_batch_size": recipe.train.micro_batch_size,
        "data.max_length": recipe.data.max_length,
        "head.depths": recipe.head.depths,
        "head.draft_vocab": recipe.head.draft_vocab or "whole",
    }
    lower = ", ".join(f"{key} ({value})" for key, value in keys.items())
    lines, time = run.shape
    return (
        f"memory ran out at a batch of {lines} lines x {time} tokens ({first_line(error)}): lower one of {lower}; "
        "train.micro_batch_size changes no result, so the run can be resumed with a smaller one."
    )
