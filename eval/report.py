"""A report of measurements: JSON for scripts, a page and a picture for people, a short table on the terminal."""

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

PARTS = ("target", "draft", "bookkeeping")


def write_report(results: Sequence[dict[str, Any]], out: Path, about: dict[str, Any]) -> None:
    """Write report.json, report.html and acceptance.png into the existing directory ``out``.

    ``results`` are entries as ``harness.measure`` returns them; ``about`` says how they were measured.
    """
    (out / "report.json").write_text(json.dumps({"about": about, "results": list(results)}, indent=2) + "\n")
    draw(results).savefig(out / "acceptance.png", dpi=120)
    (out / "report.html").write_text(page(results, about, (out / "acceptance.png").read_bytes()), encoding="utf-8")


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """One result as names and values, in the order a reader asks for them."""
    low, high = result["tau_interval"]
    draft = result["draft"]
    found = [
        ("draft", title(result)),
        ("acceptance length τ", f"{result['tau']:.3f}  (95 % interval {low:.3f} – {high:.3f})"),
        (
            "accepted by position",
            "  ".join(f"{share:.1%}" for share in result["accepted_per_position"]) or "nothing was drafted",
        ),
        ("tokens/s with the head", f"{result['tokens_per_s']:.1f}" if result["speedup"] else "not compared"),
        ("tokens/s without", f"{result['baseline_tokens_per_s']:.1f}" if result["speedup"] else "not measured"),
        ("speed-up", f"{result['speedup']:.2f}×" if result["speedup"] else "not measured"),
        ("time", "  ".join(f"{part} {result['time'][part]:.1%}" for part in PARTS)),
        (
            "measured on",
            f"{result['prompts']} prompts, {result['emitted_tokens']} tokens, {result['verify_passes']} verify passes",
        ),
        ("lossless", losslessness(result)),
        ("with respect to", result["lossless_to"]),
    ]
    if len(result["categories"]) > 1:
        found.insert(2, ("τ by category", "  ".join(f"{name} {tau:.3f}" for name, tau in result["categories"].items())))
    if draft["name"] != "none":
        found.insert(1, ("drafted per pass", drafted(draft)))
    return found


def title(result: dict[str, Any]) -> str:
    """What was drafted, and how the target decoded."""
    draft = result["draft"]
    named = {"chain": f"chain of {draft['length']}", "tree": f"tree of {draft['nodes']} nodes"}
    form = named.get(draft["kind"]) if not draft["stop"] else None
    decoding = f"temperature {result['temperature']:g}, top-p {result['top_p']:g}" if result["temperature"] else "greedy"
    lossy = f", lossy: {result['lossy']}" if result["lossy"] else ""
    changed = ", adapted target" if result["lossless_to"] != "the target" else ""
    return f"{result['proposer']}, {form or draft['name']}, {decoding}{lossy}{changed}"


def drafted(draft: dict[str, Any]) -> str:
    """How large the drafts were, and what ended them."""
    size = f"{draft['mean_nodes']:.1f} tokens, {draft['mean_length']:.1f} deep"
    stop = draft["stop"]
    return size + (f" (a path ends where {stop['by']} falls below {stop['below']:g})" if stop else "")


def losslessness(result: dict[str, Any]) -> str:
    """What is known about the text being the target's own."""
    ties = result["near_ties"]
    if result["lossy"]:
        return f"NO: {result['lossy']} takes drafts that the target would not have drawn"
    if result["lossless"] is None:
        return "by construction; no text was compared"
    compared = f"{result['baseline_prompts']} texts compared with plain decoding"
    if not ties:
        return f"yes: {compared}, all equal"
    margins = ", ".join(f"prompt {tie['prompt']} at token {tie['token']} (margin {tie['margin']:.1e})" for tie in ties)
    return f"{'yes, but for near ties' if result['lossless'] else 'NO'}: {compared}, other tokens in {margins}"


def table(result: dict[str, Any], places: dict[str, Path]) -> Table:
    """The short table for the terminal; ``places`` names what was written where."""
    grid = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in [*rows(result), *((name, str(path)) for name, path in places.items())]:
        grid.add_row(name, value)
    return grid


def draw(results: Sequence[dict[str, Any]]) -> Figure:
    """Acceptance by position (bars beside each other) and where the time went (bars cut into shares), one per result."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    width = 0.8 / len(results)
    for i, result in enumerate(results):
        shares = result["accepted_per_position"]
        places = [position + (i - (len(results) - 1) / 2) * width for position in range(1, len(shares) + 1)]
        left.bar(places, shares, width, label=f"{title(result)}: τ {result['tau']:.2f}")
    left.set(xlabel="position in the draft", ylabel="accepted / proposed", ylim=(0, 1), title="Acceptance by position")
    left.set_xticks(range(1, max(result["draft"]["length"] for result in results) + 1))
    left.legend(fontsize="small")
    begin = [0.0] * len(results)
    for part in PARTS:
        shares = [result["time"][part] for result in results]
        right.barh(range(len(results)), shares, left=begin, label=part)
        begin = [a + b for a, b in zip(begin, shares, strict=True)]
    right.set(xlim=(0, 1), xlabel="share of the decoding time", title="Where the time goes")
    right.set_yticks(range(len(results)), [result["proposer"] for result in results])
    right.set_ylim(-0.6, len(results) + 0.1)
    right.legend(fontsize="small", loc="upper center", ncols=len(PARTS))
    return figure


def page(results: Sequence[dict[str, Any]], about: dict[str, Any], picture: bytes) -> str:
    """A page that stands alone: the results as a table, the picture, and how they were measured."""
    columns = [dict(rows(result)) for result in results]
    names = list(dict.fromkeys(name for column in columns for name in column))
    cells = {name: "".join(f"<td>{html.escape(column.get(name, ''))}</td>" for column in columns) for name in names}
    lines = [f"<tr><th>{html.escape(name)}</th>{cells[name]}</tr>" for name in names]
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>draftsmith: {html.escape(results[0]["target"])}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
th, td {{ text-align: left; padding: .2rem 1.5rem .2rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }}
img {{ max-width: 100%; margin: 1.5rem 0; }}
pre {{ background: #f4f4f4; padding: 1rem; overflow: auto; }}
</style>
<h1>Draft head on {html.escape(results[0]["target"])}</h1>
<table>
{chr(10).join(lines)}
</table>
<img alt="Acceptance by position and shares of the time" src="data:image/png;base64,{base64.b64encode(picture).decode()}">
<h2>How it was measured</h2>
<pre>{html.escape(json.dumps(about, indent=2))}</pre>
</html>
"""
