"""A report of measurements: JSON for scripts, a page and pictures for people, a short table on the terminal."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..errors import UserError
from .page import page
from .plots import pictures
from .words import caveats, labels, rows, verdict
from .words import title as title  # what a result is called, for whoever shows one

VERSION = 2  # of report.json, see docs/reports.md; 1 had no per_prompt
FILE = "report.json"


def write_report(results: Sequence[dict[str, Any]], out: Path, about: dict[str, Any]) -> None:
    """Write report.json, report.html and the pictures into the existing directory ``out``.

    ``results``, at least one, are entries as ``harness.measure`` returns them; ``about`` says how they were measured.
    """
    document = {"version": VERSION, "about": about, "results": list(results)}
    (out / FILE).write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    drawn = pictures(results)
    for name, data in drawn.items():
        (out / f"{name}.png").write_bytes(data)
    (out / "report.html").write_text(page(results, about, drawn), encoding="utf-8")


def read_report(path: Path) -> dict[str, Any]:
    """A report by its directory or its report.json. Raises UserError for a file that is none, or of another version."""
    file = path / FILE if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: name a report's directory or its report.json.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error}): name a report's directory or its report.json.") from None
    if not isinstance(document, dict) or not isinstance(document.get("results"), list) or not document["results"]:
        raise UserError(f"{file} is no report of draftsmith eval: it has no results.")
    version = document.get("version", 1)
    if version != VERSION:
        raise UserError(f"{file} is a report of version {version} and this draftsmith reads version {VERSION}: measure again.")
    return document


def table(result: dict[str, Any], places: dict[str, Path]) -> Table:
    """One result for the terminal; ``places`` names what was written where."""
    grid = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    notes = [("note" if i == 0 else "", caveat) for i, caveat in enumerate(caveats(result))]
    for name, value in [*rows(result), *notes, *((name, str(path)) for name, path in places.items())]:
        grid.add_row(name, value)
    return grid


def overview(results: Sequence[dict[str, Any]], places: dict[str, Path]) -> Table:
    """Many results for the terminal, a line each."""
    grid = Table(box=None, padding=(0, 2, 0, 0), caption_justify="left")
    grid.add_column("", overflow="fold")
    for heading in ("τ", "speed-up", "tokens/s", "lossless"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for name, result in zip(labels(results), results, strict=True):
        grid.add_row(
            name,
            short(result["tau"], result["tau_interval"]),
            short(result["speedup"], result["speedup_interval"]) if result["speedup"] else "–",
            f"{result['tokens_per_s']:.1f}",
            verdict(result),
        )
    warned = sum(bool(caveats(result)) for result in results)
    notes = [f"{warned} of {len(results)} come with caveats, which the report names"] if warned else []
    grid.caption = "\n".join([*notes, *(f"{name}: {path}" for name, path in places.items())])
    return grid


def short(value: float, interval: Sequence[float] | None) -> str:
    return f"{value:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")
