"""A grid of measurements. Every finished cell is kept on the disk under the fingerprint of all that went into it, so that an
interrupted sweep goes on where it stopped and a grown one measures what is new."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..console import Progress
from ..errors import UserError, first_line
from ..heads.base import DraftHead
from ..target import Target
from .adaptive import drafting
from .cells import cell_file, read_cell, write_cell
from .fingerprint import of_head, of_lookup, of_machine, of_prompts, of_target
from .grid import Cell
from .harness import measure
from .prompts import Prompt
from .proposers import Proposer
from .registry import read_lookup
from .settle import settle
from .tree import Auto, Search, chain, parse_or_search
from .typical import Typical
from .verifier import decode


@dataclass(frozen=True)
class Rig:
    """What all cells of a grid are measured with: the target, the heads and the prompts by the names that cells use, and the
    settings that ``harness.measure`` takes."""

    target: Target
    heads: Mapping[str, DraftHead]
    prompts: Mapping[str, Sequence[Prompt]]
    max_new: int
    baseline: int | None = None
    seed: int = 0
    typical: Typical | None = None


def refuse(rig: Rig, cells: Sequence[Cell]) -> None:
    """Raise UserError for a cell that makes no sense, before anything is measured."""
    for cell, proposer in [(cell, sketched(rig, cell)) for cell in cells]:
        decode(rig.target, proposer, [], cell.sampling, cell.batch, rig.typical)  # decodes nothing and checks all


def sketched(rig: Rig, cell: Cell) -> Proposer | None:
    """The cell's proposer, in any form where that takes measurements to settle."""
    if cell.tree is None:
        return read_lookup(cell.proposer)
    head, wish, prompts = rig.heads[cell.proposer], parse_or_search(cell.tree), rig.prompts[cell.prompts]
    sought = isinstance(wish, Search | Auto)
    if sought and len(prompts) < 2:
        settle(rig.target, head, wish, prompts, rig.max_new)  # says why that cannot be
    return drafting(head, chain(1) if sought else wish, cell.sampled_drafts)


def fingerprints(rig: Rig, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """What every cell is made from. Neither names nor places: what was moved or renamed is not measured again."""
    machine, target = of_machine(rig.target), of_target(rig.target)
    heads = {name: of_head(head) for name, head in rig.heads.items()}
    prompts = {name: of_prompts(asked) for name, asked in rig.prompts.items()}
    return [
        {
            "proposer": of_lookup(cell.proposer) if cell.tree is None else heads[cell.proposer],
            "form": repr(parse_or_search(cell.tree)) if cell.tree else None,
            "sampled_drafts": cell.sampled_drafts,
            "target": target,
            "prompts": prompts[cell.prompts],
            "sampling": asdict(cell.sampling),
            "batch": cell.batch,
            "max_new": rig.max_new,
            "baseline": rig.baseline,
            "seed": rig.seed,
            "typical": rig.typical and asdict(rig.typical),
            "measured_by": machine,
        }
        for cell in cells
    ]


def sweep(rig: Rig, cells: Sequence[Cell], out: Path, show: bool = False) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The entries of a report's ``results`` in the cells' order, and the cells that failed, each with its ``why``.

    Finished cells are kept beside ``out`` as soon as they are measured, and found there again. A cell that fails is tried
    again by the next sweep; where all fail, the first one's error is raised.
    """
    made_from = fingerprints(rig, cells)
    files = [cell_file(out, made) for made in made_from]
    found = [read_cell(file) for file in files]
    sizes = [len(rig.prompts[cell.prompts]) for cell in cells]
    done = sum(size for size, result in zip(sizes, found, strict=True) if result)
    failed: list[dict[str, Any]] = []
    errors: list[Exception] = []
    with Progress("measuring", sum(sizes), done, show) as bar:
        for place, cell in enumerate(cells):
            if found[place]:
                continue
            bar.name(f"cell {place + 1} of {len(cells)}: {cell.name}")
            try:
                # another cell may have been the same by another name
                found[place] = read_cell(files[place]) or write_cell(files[place], made_from[place], run(rig, cell, bar))
            except (UserError, MemoryError, RuntimeError) as error:  # a prompt that is too long, the device's memory, …
                failed.append({**asdict(cell), "why": first_line(error)})
                errors.append(error)
            done += sizes[place]
            bar.reach(done)
    if len(errors) == len(cells):
        raise errors[0]
    now = {"target": rig.target.name}  # a kept result may tell of an older place
    return [{**result, **now, "cell": asdict(cell)} for cell, result in zip(cells, found, strict=True) if result], failed


def run(rig: Rig, cell: Cell, bar: Progress) -> dict[str, Any]:
    """Measure one cell."""
    target, prompts, sought = rig.target, rig.prompts[cell.prompts], None
    proposer: Any = read_lookup(cell.proposer)
    with at_work(rig.heads.get(cell.proposer), target.device) as head:
        if head is not None and cell.tree is not None:
            wish, drawn = parse_or_search(cell.tree), cell.sampled_drafts
            proposer, prompts, sought = settle(
                target, head, wish, prompts, rig.max_new, cell.sampling, drawn, cell.batch, rig.seed
            )
        result = measure(
            target, proposer, prompts, rig.max_new, cell.sampling, cell.batch, rig.baseline, rig.seed, False, rig.typical, bar
        )
    return {**result, "search": sought}


@contextmanager
def at_work(head: DraftHead | None, device: torch.device) -> Iterator[DraftHead | None]:
    """Inside, the head is on the device, and its memory's peak counts from here; outside it leaves room for other heads."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield None if head is None else head.to(device)
    finally:
        if head is not None:
            head.to("cpu")
