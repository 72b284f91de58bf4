"""A comparison for people: a table on the terminal, and a page."""

from html import escape
from typing import Any

from matplotlib.figure import Figure
from rich.console import Group
from rich.padding import Padding
from rich.table import Table

from .page import image, standalone
from .plots import COLOURS, WIDTH, png, tidy

COLUMNS = ("", "A", "B", "B to A", "p", "verdict")
METHOD = (
    "Only prompts that both runs were asked count. Intervals: 95 %, by drawing prompts. p: how often a difference as large "
    "comes about when at every prompt a coin decides which run is which; raised for the number of pairs (Holm). A verdict "
    "needs p below 0.05. Clocks of two runs also differ by what else their machine did, which no drawing of prompts sees."
)
MEASURES = {"tau": ("τ", ""), "speedup": ("speed-up", "×"), "tokens_per_s": ("tokens/s", "")}


def lines(pair: dict[str, Any]) -> list[tuple[str, ...]]:
    """Every measure of a pair: its name, A's and B's, the effect with its interval, the p-value and the verdict."""
    found = []
    for key, (name, unit) in MEASURES.items():
        measure = pair[key]
        if measure:
            low, high = measure["interval"]
            digits = 1 if key == "tokens_per_s" else 2
            effect = (
                f"{measure['difference']:+.2f} [{low:+.2f}, {high:+.2f}]"
                if key == "tau"
                else f"{measure['ratio']:.2f}× [{low:.2f}, {high:.2f}]"
            )
            sides = [f"{measure[side]:.{digits}f}{unit}" for side in "ab"]
            found.append((name, *sides, effect, p_value(measure["p_adjusted"]), measure["verdict"]))
    return found


def p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def heading(pair: dict[str, Any]) -> str:
    """Under which conditions two results are compared."""
    given = pair["conditions"]
    decoding = f"temperature {given['temperature']:g}, top-p {given['top_p']:g}" if given["temperature"] else "greedy"
    return f"{given['target']}, {decoding}, batch {given['batch']}, {pair['prompts']} prompts"


def terminal(document: dict[str, Any]) -> Group:
    """The comparison for the terminal."""
    shown: list[Any] = []
    for pair in document["pairs"]:
        grid = Table(box=None, padding=(0, 2, 0, 0))
        for name in COLUMNS:
            grid.add_column(name, justify="left" if name in ("", "verdict") else "right")
        for line in lines(pair):
            grid.add_row(*line)
        shown += [heading(pair), f"  A  {pair['a']}", f"  B  {pair['b']}", Padding(grid, (0, 0, 0, 2))]
        shown += [*(f"  note: {note}" for note in pair["notes"]), ""]
    shown += [f"not compared: {one['run']}: {one['result']}: {one['why']}" for one in document["unpaired"]]
    shown += [f"note: {note}" for note in document["notes"]]
    return Group(*shown)


def page(document: dict[str, Any]) -> str:
    """The comparison as HTML that stands alone."""
    parts = [f'<ul class="caveats">{listed(document["notes"])}</ul>'] if document["notes"] else []
    if document["pairs"]:
        parts.append(image("differences", png(differences(document["pairs"]))))
    for number, pair in enumerate(document["pairs"], start=1):
        sides = f"<b>A</b> {escape(pair['a'])}<br><b>B</b> {escape(pair['b'])}"
        header = "".join(f"<th{' class=n' if name not in ('', 'verdict') else ''}>{name}</th>" for name in COLUMNS)
        rows = "".join(f"<tr>{''.join(map(cell, COLUMNS, line))}</tr>" for line in lines(pair))
        parts.append(f"<h2>{number}. {escape(heading(pair))}</h2>\n<p>{sides}</p>")
        parts.append(f'<div class="wide"><table class="many"><tr>{header}</tr>{rows}</table></div>')
        parts.append(f'<ul class="caveats">{listed(pair["notes"])}</ul>' if pair["notes"] else "")
    if document["unpaired"]:
        alone = [f"{one['run']}: {one['result']}: {one['why']}" for one in document["unpaired"]]
        parts.append(f"<h2>Not compared</h2>\n<ul>{listed(alone)}</ul>")
    parts.append(f'<p class="remark">{escape(METHOD)}</p>')
    return standalone("Compared: " + ", ".join(run["name"] for run in document["runs"]), parts)


def listed(items: list[str]) -> str:
    return "".join(f"<li>{escape(item)}</li>" for item in items)


def cell(column: str, text: str) -> str:
    return f"<td>{escape(text)}</td>" if column in ("", "verdict") else f"<td class=n>{escape(text)}</td>"


def differences(pairs: list[dict[str, Any]]) -> Figure:
    """What B is above A in every pair, in τ and in speed-up; filled where the difference is shown."""
    timed = any(pair["speedup"] for pair in pairs)
    figure = Figure(figsize=(WIDTH, 1.4 + 0.4 * len(pairs)), layout="constrained")
    panels = figure.subplots(1, 1 + timed, sharey=True, squeeze=False)[0]
    sides = [("tau", "difference", 0, "τ of B minus τ of A"), ("speedup", "ratio", 1, "speed-up of B over that of A")]
    for axes, (key, effect, nothing, meaning) in zip(panels, sides, strict=False):
        for row, pair in enumerate(pairs):
            if pair[key]:
                shown = "above" in pair[key]["verdict"]
                axes.plot(pair[key]["interval"], [row, row], color=COLOURS[0])
                axes.plot(pair[key][effect], row, "o", color=COLOURS[0], markerfacecolor=COLOURS[0] if shown else "white")
        axes.axvline(nothing, color="#666666", linewidth=1)
        tidy(axes, xlabel=meaning)
    panels[0].set_yticks(range(len(pairs)), [f"{number}." for number in range(1, len(pairs) + 1)])
    panels[0].set_ylim(len(pairs) - 0.4, -0.6)
    figure.suptitle("B against A, with 95 % intervals (filled: a difference is shown)", fontsize="medium")
    return figure
