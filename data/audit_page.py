"""An audit as one page that stands alone: nothing in it is fetched, and nothing in a conversation can get out of its place."""

from html import escape
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..outputs import write_whole
from .audit import Audit
from .audit_tables import Table, number, share, tables
from .audit_text import heading
from .coloured import BELONGS_LEFT, pieces, visible
from .shown import Shown

MOST = 6000  # tokens of a conversation that are drawn
UNFOLDED = 3  # conversations
WIDE, HIGH, FOOT = 720, 180, 24  # of the histogram, in pixels

OPEN, BAD = " open", ' class="bad"'

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2126; --soft: #626b75; --line: #dfe3e8; --edge: #c3c9d0;
  --panel: #f6f7f9;
  --learn: #c3ecd0; --learn-ink: #0b3d20; --learn-line: #7cc797; --bar: #3f9a63; --warn: #9a5b00; --warn-panel: #fff3dc;
  --bad: #a4161a; --bad-panel: #fde8e8; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e4e7eb; --soft: #98a2ad; --line: #2d333b;
  --edge: #48515b; --panel: #1c2026; --learn: #1d4a31; --learn-ink: #c9f5d9; --learn-line: #3b8459; --bar: #57b97f;
  --warn: #f0b860; --warn-panel: #33270f; --bad: #ff9c9c; --bad-panel: #3d1a1c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.3; margin: 0 0 1.25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2.25rem 0 .6rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.4rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.card small, .remark { color: var(--soft); font-size: .875rem; }
.remark { margin: .5rem 0 0; }
.damage { background: var(--bad-panel); color: var(--bad); border: 1px solid; border-radius: .5rem; padding: .7rem .9rem;
  margin: 0 0 1.25rem; overflow-wrap: anywhere; }
.sections { display: flex; flex-wrap: wrap; column-gap: 3.5rem; align-items: flex-start; }
section { max-width: 100%; }
section .remark { max-width: 26rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1.4rem .3rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; font-size: .875rem; }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.bad td { background: var(--warn-panel); }
tr.bad td:first-child { color: var(--warn); font-weight: 600; }
svg { display: block; width: 45rem; max-width: 100%; height: auto; margin: 1rem 0 0; }
svg rect { fill: var(--bar); }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg line { stroke: var(--line); }
details { border: 1px solid var(--line); border-radius: .5rem; margin: .75rem 0; }
summary { cursor: pointer; padding: .6rem .9rem; overflow-wrap: anywhere; }
summary em { font-style: normal; font-weight: 600; }
summary span { color: var(--soft); font-size: .875rem; display: block; }
.tokens { border-top: 1px solid var(--line); padding: .8rem .9rem; font: .875rem/1.75 ui-monospace, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4; }
.t { color: var(--soft); box-shadow: inset -1px 0 var(--edge); padding: .1rem 0; }
.s { color: var(--learn-ink); background: var(--learn); box-shadow: inset -1px 0 var(--learn-line); }
.t:hover { outline: 2px solid var(--bar); }
"""


def page(audit: Audit, tokenizer: Any, sources: list[str]) -> str:
    """The HTML text."""
    document = audit.document
    title = f"What {', '.join(sources)} holds for {document['target']['name']}"
    damaged = f'<p class="damage"><b>Damaged.</b> {escape(document["damaged"]["message"])}</p>' if document["damaged"] else ""
    sections = []
    for table in tables(document):
        picture = histogram(document["lengths"]["histogram"]) if table.title == "Length in tokens" else ""
        sections.append(section(table, picture))
    chats = [chat(one, tokenizer, i < UNFOLDED) for i, one in enumerate(audit.shown)]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{damaged}
{cards(document)}
<div class="sections">{"".join(sections)}</div>
<h2>Conversations, token by token</h2>
<p class="remark"><span class="t s">supervised</span> tokens are what a head learns from;
<span class="t">the others</span> are only read. Point at a token for its place and id. ⏎ is a newline,
{BELONGS_LEFT} a further token of the letter before it.</p>
{"".join(chats) or '<p class="remark">There is none to show.</p>'}
</body>
</html>
"""


def cards(document: dict[str, Any]) -> str:
    """The few numbers that are read first."""
    counts, lengths = document["rows"], document["lengths"]
    warnings = sum(not check["ok"] for check in document["checks"])
    found = [
        ("rows kept", number(counts["kept"]), f"of {number(counts['read'])} read"),
        ("tokens", number(document["tokens"]), f"at most {number(document['max_length'])} a row"),
        ("supervised", share(document["supervised_tokens"], document["tokens"]) or "0", "of the tokens"),
        ("median length", number(round(lengths["quantiles"]["0.5"])) if lengths["quantiles"] else "–", "tokens"),
        ("warnings", number(warnings), f"of {len(document['checks'])} checks"),
    ]
    inner = "".join(
        f'<div class="card"><small>{name}</small><b>{value}</b><small>{more}</small></div>' for name, value, more in found
    )
    return f'<div class="cards">{inner}</div>'


def section(table: Table, picture: str) -> str:
    numeric = [' class="n"' if name.startswith("#") else "" for name in table.columns]
    head = "".join(f"<th{kind}>{escape(name.strip('#'))}</th>" for kind, name in zip(numeric, table.columns, strict=True))
    lines = []
    for i, row in enumerate(table.rows):
        cells = "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(numeric, row, strict=True))
        lines.append(f"<tr{BAD if i in table.bad else ''}>{cells}</tr>")
    remark = f'<p class="remark">{escape(table.remark)}</p>' if table.remark else ""
    return (
        f'<section>\n<h2>{escape(table.title)}</h2>\n<div class="wide"><table>\n<tr>{head}</tr>\n'
        f"{''.join(lines)}\n</table></div>\n{picture}{remark}\n</section>\n"
    )


def histogram(found: dict[str, list[int]]) -> str:
    """Bars of how many conversations have which length."""
    edges, counts = found["edges"], found["counts"]
    most, wide = max(counts), WIDE / len(counts)
    bars, marks = [], []
    for i, count in enumerate(counts):
        tall = count / most * (HIGH - 20)
        says = f"{edges[i]} to {edges[i + 1] - 1} tokens: {number(count)}"
        place = f'x="{i * wide + 1:.1f}" y="{HIGH - tall:.1f}" width="{wide - 2:.1f}" height="{tall:.1f}" rx="2"'
        bars.append(f"<rect {place}><title>{says}</title></rect>")
        if i % 4 == 0:
            marks.append(f'<text x="{i * wide + 1:.1f}" y="{HIGH + 16}">{edges[i]}</text>')
    tallest = counts.index(most)
    place, anchor = (tallest * wide, "start") if tallest < len(counts) / 2 else ((tallest + 1) * wide, "end")
    label = f'<text x="{place:.1f}" y="12" text-anchor="{anchor}">{number(most)} rows</text>'
    return (
        f'<svg viewBox="0 0 {WIDE} {HIGH + FOOT}" role="img" aria-label="How many conversations have which length">'
        f'{"".join(bars)}<line x1="0" x2="{WIDE}" y1="{HIGH}" y2="{HIGH}"/>{"".join(marks)}{label}</svg>\n'
    )


def chat(one: Shown, tokenizer: Any, is_open: bool) -> str:
    """One conversation, each token with its place, id and mask."""
    ids, mask = one.example.ids[:MOST].tolist(), one.example.mask[:MOST].tolist()
    tokens = [token(i, *each) for i, each in enumerate(zip(ids, mask, pieces(ids, tokenizer), strict=True))]
    left = len(one.example.ids) - len(ids)
    more = f"\n… and {number(left)} tokens more" if left else ""
    head = f"<summary><em>{escape(one.why)}</em> <span>{escape(heading(one))}</span></summary>"
    return f'<details{OPEN if is_open else ""}>{head}\n<div class="tokens">{"".join(tokens)}{more}</div></details>\n'


def token(place: int, token_id: int, supervised: bool, piece: str | None) -> str:
    kind, says = ("t s", "supervised") if supervised else ("t", "read")
    return f'<span class="{kind}" title="token {place}, id {token_id}, {says}">{escape(visible(piece))}</span>'


def write(path: Path, text: str) -> None:
    """Write the page beside its place and rename it. Raises UserError where it cannot be written there."""
    if path.is_dir():
        raise UserError(f"--html {path} is a directory: give the name of a file in it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [text])
