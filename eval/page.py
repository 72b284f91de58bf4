"""Results as one page that stands alone: nothing in it is fetched, and nothing in a text can get out of its place."""

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .words import caveats, common, labels, rows, title, verdict

UNFOLDED = 3  # results whose details are open

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2126; --soft: #626b75; --line: #dfe3e8; --panel: #f6f7f9;
  --warn: #7a4700; --warn-panel: #fff3dc; --bad: #a4161a; --draft: #c3ecd0; --draft-ink: #0b3d20; --draft-line: #2c7a4b;
  --bonus: #ffe3b3; --bonus-ink: #4d3000; --bonus-line: #a86500; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e4e7eb; --soft: #98a2ad; --line: #2d333b;
  --panel: #1c2026; --warn: #f0b860; --warn-panel: #33270f; --bad: #ff9c9c; --draft: #1d4a31; --draft-ink: #c9f5d9;
  --draft-line: #57b97f; --bonus: #4d3a12; --bonus-ink: #ffe6b8; --bonus-line: #e0a640; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; line-height: 1.3; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .4rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.4rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.card small, .remark { color: var(--soft); font-size: .875rem; }
.remark { margin: .4rem 0; }
.caveats { background: var(--warn-panel); color: var(--warn); border: 1px solid; border-radius: .5rem; margin: 1rem 0;
  padding: .6rem .9rem .6rem 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; font-size: .875rem; }
.many td, .many th { overflow-wrap: normal; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td small { color: var(--soft); }
.bad { color: var(--bad); font-weight: 600; }
img { display: block; width: 44rem; max-width: 100%; height: auto; margin: 1.25rem 0; background: #fff; border-radius: .5rem; }
details { border: 1px solid var(--line); border-radius: .5rem; margin: .75rem 0; padding: 0 .9rem; }
details[open] { padding-bottom: .9rem; }
summary { cursor: pointer; padding: .6rem 0; overflow-wrap: anywhere; font-weight: 600; }
.text { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem .9rem; margin: .5rem 0;
  font: .9rem/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.draft { background: var(--draft); color: var(--draft-ink); border-bottom: 2px solid var(--draft-line); }
.bonus { background: var(--bonus); color: var(--bonus-ink); border-bottom: 2px dotted var(--bonus-line); font-weight: 700; }
pre { background: var(--panel); padding: .8rem .9rem; border-radius: .5rem; white-space: pre-wrap; overflow-wrap: anywhere; }
"""

WRITERS = {"draft": "accepted draft", "bonus": "bonus: the target's own token behind a draft", "plain": "plain: no draft"}


def page(results: Sequence[dict[str, Any]], about: dict[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The report's HTML. ``pictures``: PNG files by name."""
    targets = list(dict.fromkeys(result["target"] for result in results))
    parts = [overview(results) if len(results) > 1 else cards(results[0])]
    parts += [failures(about["failed"])] if about.get("failed") else []
    parts += [warned(results), "<h2>Pictures</h2>" if pictures else "", *(image(*picture) for picture in pictures.items())]
    parts += [by_category(results), "<h2>In detail</h2>"]
    names = labels(results) if len(results) > 1 else [title(results[0])]
    parts += [details(result, name, len(results) <= UNFOLDED) for result, name in zip(results, names, strict=True)]
    parts.append(f"<h2>How it was measured</h2>\n<pre>{escape(json.dumps(about, indent=2, ensure_ascii=False))}</pre>")
    return standalone(f"Drafts for {', '.join(targets)}", parts)


def standalone(heading: str, parts: Sequence[str]) -> str:
    """A page around its parts."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>draftsmith: {escape(heading)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(heading)}</h1>
{chr(10).join(part for part in parts if part)}
</body>
</html>
"""


def cards(result: dict[str, Any]) -> str:
    """The three numbers that are asked for first."""
    low, high = result["tau_interval"]
    shown = [(f"{result['tau']:.2f}", f"acceptance length τ, {low:.2f} to {high:.2f}")]
    if result["speedup"]:
        shown.append((f"{result['speedup']:.2f}×", "speed-up over plain decoding" + between(result["speedup_interval"])))
    shown.append((f"{result['tokens_per_s']:.1f}", "tokens per second"))
    inside = "".join(f'<div class="card"><b>{number}</b><small>{meaning}</small></div>' for number, meaning in shown)
    return f'<p class="remark">{escape(title(result))}</p>\n<div class="cards">{inside}</div>'


def between(interval: Sequence[float] | None) -> str:
    return f", {interval[0]:.2f} to {interval[1]:.2f}" if interval else ""


def overview(results: Sequence[dict[str, Any]]) -> str:
    """A line for every result."""
    head = ("", "τ", "speed-up", "tokens/s", "first token", "accepted / drafted", "lossless")
    lines = []
    for name, result in zip(labels(results), results, strict=True):
        ttft = result["ttft"]
        numbers = [
            with_interval(result["tau"], result["tau_interval"]),
            with_interval(result["speedup"], result["speedup_interval"]) if result["speedup"] else "–",
            f"{result['tokens_per_s']:.1f}",
            f"{1000 * ttft['mean']:.0f} ms" if ttft else "–",
            f"{result['acceptance_rate']:.0%}" if result["counters"]["num_draft_tokens"] else "–",
            f'<span class="bad">{verdict(result)}</span>' if result["lossless"] is False else verdict(result),
        ]
        lines.append(f"<tr><td>{escape(name)}</td>{''.join(f'<td class=n>{number}</td>' for number in numbers)}</tr>")
    header = "".join(f"<th{' class=n' if name else ''}>{name}</th>" for name in head)
    return "\n".join(
        [
            f'<p class="remark">All: {escape(common(results))}</p>',
            f'<div class="wide"><table class="many"><tr>{header}</tr>',
            *lines,
            "</table></div>",
            '<p class="remark">Small: 95 % intervals over prompts. Speed-up is over plain decoding in the same run.</p>',
        ]
    )


def with_interval(value: float, interval: Sequence[float] | None) -> str:
    small = f"<br><small>{interval[0]:.2f} – {interval[1]:.2f}</small>" if interval else ""
    return f"{value:.2f}{small}"


def failures(failed: Sequence[dict[str, Any]]) -> str:
    """What could not be measured."""
    lines = []
    for cell in failed:
        conditions = ", ".join(f"{key} {value}" for key, value in cell.items() if key != "why" and value is not None)
        lines.append(f"<li>{escape(conditions)}: {escape(str(cell['why']))}</li>")
    return f'<h2>Not measured</h2>\n<ul class="caveats">{"".join(lines)}</ul>'


def warned(results: Sequence[dict[str, Any]]) -> str:
    """What must not be overlooked; with many results, each caveat once with the names it holds for."""
    names = labels(results)
    found: dict[str, list[str]] = {}
    for name, result in zip(names, results, strict=True):
        for caveat in caveats(result):
            found.setdefault(caveat, []).append(name)
    lines = []
    for caveat, whose in found.items():
        who = "" if len(whose) == len(results) else f"<b>{escape('; '.join(whose))}</b>: "
        lines.append(f"<li>{who}{escape(caveat)}</li>")
    return f'<ul class="caveats">{"".join(lines)}</ul>' if lines else ""


def image(name: str, data: bytes) -> str:
    return f'<img alt="{escape(name.replace("-", " "))}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'


def by_category(results: Sequence[dict[str, Any]]) -> str:
    """τ, and the speed-up where it was measured, by category."""
    found = sorted({name for result in results for name in result["by_category"]})
    if len(found) < 2:
        return ""
    header = "".join(f"<th class=n>{escape(name)}</th>" for name in found)
    lines = []
    for name, result in zip(labels(results), results, strict=True):
        numbers = [category(result["by_category"].get(each)) for each in found]
        lines.append(f"<tr><td>{escape(name)}</td>{''.join(f'<td class=n>{number}</td>' for number in numbers)}</tr>")
    return (
        f'<h2>By category</h2>\n<div class="wide"><table class="many"><tr><th></th>{header}</tr>\n'
        f'{chr(10).join(lines)}\n</table></div>\n<p class="remark">τ; small: the speed-up and how many prompts.</p>'
    )


def category(measured: dict[str, Any] | None) -> str:
    if not measured:
        return "–"
    speedup = f"{measured['speedup']:.2f}×, " if measured["speedup"] else ""
    return f"{measured['tau']:.2f}<br><small>{speedup}{measured['prompts']}</small>"


def details(result: dict[str, Any], name: str, unfolded: bool) -> str:
    """All that is known of one result, and a piece of its text."""
    lines = [f"<tr><th>{escape(measure)}</th><td>{escape(value)}</td></tr>" for measure, value in rows(result)]
    table = f'<div class="wide"><table>{"".join(lines)}</table></div>'
    opened = " open" if unfolded else ""
    return f"<details{opened}><summary>{escape(name)}</summary>\n{table}\n{sample(result['sample'])}\n</details>"


def sample(pieces: Sequence[dict[str, str]]) -> str:
    """The beginning of one answer, marked by who wrote what: by colour, by the line below, and by weight."""
    if not pieces:
        return ""
    legend = " &nbsp; ".join(f'<span class="{by}">{escape(meaning)}</span>' for by, meaning in WRITERS.items())
    inside = "".join(
        f'<span class="{escape(piece["by"])}" title="{escape(WRITERS[piece["by"]])}">{escape(piece["text"])}</span>'
        for piece in pieces
    )
    return f'<h3>Who wrote what</h3>\n<p class="remark">{legend}</p>\n<div class="text">{inside}</div>'
