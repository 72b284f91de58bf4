"""Finished measurements on the disk: a file each, named after the digest of all that went into it."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..data.extract import alone
from ..outputs import put_in_place, refuse_parent, write_whole
from .fingerprint import digest

CELLS = "cells"  # the folder of them in a report's directory


def partial(out: Path) -> Path:
    """The directory that becomes ``out`` when the report is whole; an interrupted command leaves it, and finds it again."""
    return out.with_name(out.name + ".partial")


@contextmanager
def holding(out: Path) -> Iterator[None]:
    """``partial(out)`` is there, for this process alone. Whatever ends the block, its finished cells stay, and nothing where
    there are none.

    Raises UserError while another process has it, which would spoil the times of both.
    """
    refuse_parent(partial(out) / CELLS)
    out.parent.mkdir(parents=True, exist_ok=True)
    with alone(out):
        (partial(out) / CELLS).mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            if not finished(out):
                shutil.rmtree(partial(out), ignore_errors=True)


def cell_file(out: Path, made_from: dict[str, Any]) -> Path:
    """Where a cell's result is kept until ``out`` is whole."""
    return partial(out) / CELLS / f"{digest(made_from)}.json"


def read_cell(file: Path) -> dict[str, Any] | None:
    """A finished cell's result; None where there is none, or a file that is damaged."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return kept["result"] if digest(kept["made_from"]) == file.stem else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_cell(file: Path, made_from: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Keep a result, and return it as it will be read again."""
    text = json.dumps({"made_from": made_from, "result": result}, indent=1)
    write_whole(file, [text, "\n"])
    return json.loads(text)["result"]


def adopt(out: Path) -> None:
    """Take over the finished cells of the report that ``out`` is."""
    for file in sorted((out / CELLS).glob("*.json")):
        own = partial(out) / CELLS / file.name
        if not own.exists():
            write_whole(own, [file.read_text(encoding="utf-8")])


def finished(out: Path) -> int:
    """How many cells an interrupted command has left."""
    return len(list((partial(out) / CELLS).glob("*.json")))


def finish(out: Path) -> None:
    """Give the partial directory its name, in place of what has it."""
    for torn in (partial(out) / CELLS).glob(".*.new"):  # what a kill left of a file that another grid does not write again
        torn.unlink()
    put_in_place(partial(out), out)
