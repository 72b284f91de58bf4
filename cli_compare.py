"""``draftsmith eval compare``: finished reports side by side."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .console import AsJson, Debug, Force, Seed, show
from .eval.compare import compare
from .eval.compare_page import page, terminal
from .outputs import new_directory, refuse_existing


def compare_command(
    reports: Annotated[list[Path], typer.Argument(help="directories of draftsmith eval, or their report.json; the first is A")],
    out: Annotated[Path | None, typer.Option(help="write comparison.json and comparison.html into this directory")] = None,
    seed: Seed = 0,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say of every two results that can be compared which is above, by the prompts they share.

    Every later report is compared with the first one; the results of a single report with its first result.
    """
    if out:
        refuse_existing(out, force)
    document = compare(reports, seed)
    if out:
        with new_directory(out, force) as partial:
            (partial / "comparison.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            (partial / "comparison.html").write_text(page(document), encoding="utf-8")
    show(document, as_json, terminal(document))
