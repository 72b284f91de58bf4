"""An audit on the terminal."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from .audit import Audit
from .audit_tables import Table, number, tables
from .coloured import LEGEND, terminal
from .shown import Shown

BAR = 40  # letters of the longest bar
EIGHTHS = " ▏▎▍▌▋▊▉█"


def report(audit: Audit, tokenizer: Any, with_rows: bool) -> Group:
    """The damage, the tables and the histogram, and with ``with_rows`` the shown conversations token by token."""
    parts: list[RenderableType] = []
    if damaged := audit.document["damaged"]:
        parts += [Text(f"DAMAGED: {damaged['message']}", "bold red"), ""]
    for table in tables(audit.document):
        parts += [Text(table.title, "bold"), grid(table)]
        if table.title == "Length in tokens":
            parts.append(histogram(audit.document["lengths"]["histogram"]))
        parts += [Text(table.remark, "dim")] if table.remark else []
        parts.append("")
    if with_rows:
        parts.append(Text(LEGEND, "dim"))
        for one in audit.shown:
            parts += ["", Text(heading(one), "bold"), terminal(one.example, tokenizer)]
    return Group(*parts)


def heading(one: Shown) -> str:
    """Where a conversation stands and what became of it."""
    supervised = int(one.example.mask.sum())
    what = f"{number(len(one.example.ids))} tokens, {number(supervised)} supervised"
    dropped = [f"dropped: {one.detail or one.reason}"] if one.reason else []
    return ", ".join([f"{one.file}, row {one.row}: {what}", *dropped, *one.example.notes])


def grid(table: Table) -> Grid:
    found = Grid(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=any(name.strip("#") for name in table.columns))
    for name in table.columns:
        is_number = name.startswith("#")
        found.add_column(name.strip("#"), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for i, row in enumerate(table.rows):
        found.add_row(*map(Text, row), style="yellow" if i in table.bad else None)
    return found


def histogram(found: dict[str, list[int]]) -> Grid:
    """Bars of how many conversations have which length."""
    bars, most = Grid(box=None, padding=(0, 1, 0, 0), show_header=False), max(found["counts"])
    for justify in ("right", "left", "right"):
        bars.add_column(justify=justify, no_wrap=True)
    for low, high, count in zip(found["edges"], found["edges"][1:], found["counts"], strict=False):
        bars.add_row(f"{low} to {high - 1}" if high - low > 1 else f"{low}", Text(bar(count / most), "green"), number(count))
    return bars


def bar(part: float) -> str:
    """A bar of ``part`` of the full width; whatever is not nothing is to be seen."""
    eighths = max(round(part * BAR * 8), part > 0)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
