"""The pictures of a report: each drawn only where there is something to see, and readable with one result or a dozen."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .words import PARTS, aspects, labels

Results = Sequence[dict[str, Any]]

# Okabe and Ito's colours, which people who see few colours tell apart; markers and dashes say the same again
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "h")
DASHES = ("-", "--", ":")
TRIED = 10  # drafts; a share of fewer is noise
WIDTH = 5.6  # inches, so that the letters can be read on a phone
LETTERS = 64  # that a legend's line has room for


def pictures(results: Results) -> dict[str, bytes]:
    """The figures as PNG files by name."""
    with rc_context({"text.parse_math": False}):  # a dollar in a name is a dollar
        return {name: png(figure) for name, figure in plots(results).items()}


def png(figure: Figure) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=160, format="png")
    return drawn.getvalue()


def plots(results: Results) -> dict[str, Figure]:
    """The figures by file name without its ending."""
    drawn = {
        "acceptance": acceptance(results),
        "categories": categories(results),
        "speedup-by-batch": speedup_by("batch", "sequences at once", results),
        "speedup-by-temperature": speedup_by("temperature", "temperature", results),
        "accepted-lengths": accepted_lengths(results),
        "tau-by-position": tau_by_position(results),
        "time": time(results),
    }
    return {name: figure for name, figure in drawn.items() if figure}


def look(i: int) -> dict[str, Any]:
    """How the i-th result is drawn, everywhere."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": DASHES[i // len(COLOURS) % len(DASHES)],
        "markersize": 5,
    }


def new(height: float, names: Sequence[str]) -> Figure:
    """A figure with room for its axes, ``height`` inches of it, and for a legend of these names below."""
    lines = -(-len(names) // columns(names)) if len(names) > 1 else 0
    return Figure(figsize=(WIDTH, height + 0.2 * lines), layout="constrained")


def columns(names: Sequence[str]) -> int:
    return max(1, min(len(names), LETTERS // (max(map(len, names)) + 8)))


def legend(figure: Figure, axes: Axes, names: Sequence[str]) -> None:
    """Name the lines below the axes, where no data lies; a single one is named by the title."""
    handles, shown = axes.get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(handles, shown, loc="outside lower center", ncols=columns(names), fontsize="small", frameon=False)


def headed(title: str, names: Sequence[str]) -> str:
    """A title, with the name of the only result where there is no legend to give it."""
    return wrapped(f"{title}: {names[0]}", 56) if len(names) == 1 else title


def tidy(axes: Axes, **settings: Any) -> None:
    axes.set(**settings)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def acceptance(results: Results) -> Figure | None:
    """Acceptance by position, of all drafts and of those accepted so far."""
    drawn = [i for i, result in enumerate(results) if result["counters"]["num_draft_tokens"]]
    if not drawn:
        return None
    names = labels(results)
    figure = new(3.4, [names[i] for i in drawn])
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    for i in drawn:
        reached = [results[i]["counters"]["num_drafts"], *results[i]["counters"]["num_accepted_tokens_per_pos"]]
        positions = [at for at, drafts in enumerate(reached[:-1], start=1) if at == 1 or drafts >= TRIED]
        for axes, key in ((left, "accepted_per_position"), (right, "conditional_per_position")):
            axes.plot(positions, [results[i][key][at - 1] for at in positions], label=names[i], **look(i))
    for axes, meaning in ((left, "of drafts that long"), (right, "where the one before was")):
        tidy(axes, xlabel="position in the draft")
        axes.set_title(meaning, fontsize="medium")
    left.set(ylabel="accepted", ylim=(0, 1.02))
    left.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    left.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.suptitle(headed("Acceptance by position", [names[i] for i in drawn]))
    legend(figure, left, [names[i] for i in drawn])
    return figure


def categories(results: Results) -> Figure | None:
    """τ by category, a row each."""
    rows = sorted({name for result in results for name in result["categories"]}, reverse=True)
    if len(rows) < 2:
        return None
    names = labels(results)
    figure = new(1.2 + 0.32 * len(rows), names)
    axes = figure.subplots()
    for i, result in enumerate(results):
        known = [(result["categories"][name], rows.index(name)) for name in rows if name in result["categories"]]
        axes.plot(*zip(*known, strict=True), label=names[i], **look(i) | {"linestyle": "none", "markersize": 7, "alpha": 0.85})
    tidy(axes, xlabel="acceptance length τ (tokens per verify pass)", title=headed("Acceptance length by category", names))
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(left=min(1, axes.get_xlim()[0]))
    legend(figure, axes, names)
    return figure


def speedup_by(key: str, meaning: str, results: Results) -> Figure | None:
    """The speed-up over what a sweep changes, a line for each set of results that differ in nothing else."""
    lines = list(sweeps(key, [result for result in results if result["speedup"]]))
    if not lines:
        return None
    names = labels([line[0] for line in lines]) if len(lines) > 1 else [aspects(lines[0][0])["draft"]]
    figure = new(3.4, names)
    axes = figure.subplots()
    for i, (line, name) in enumerate(zip(lines, names, strict=True)):
        values = [result["speedup"] for result in line]
        intervals = [result["speedup_interval"] or [result["speedup"]] * 2 for result in line]
        errors = [[max(0, v - low), max(0, high - v)] for v, (low, high) in zip(values, intervals, strict=True)]
        places = [result[key] for result in line]
        axes.errorbar(places, values, list(zip(*errors, strict=True)), capsize=3, elinewidth=1, label=name, **look(i))
    axes.axhline(1, color="#666666", linewidth=1)
    axes.annotate("plain", (1, 1), (3, 0), ("axes fraction", "data"), "offset points", va="center", fontsize="small")
    if key == "batch":
        axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({result[key] for line in lines for result in line}))
    axes.xaxis.set_major_formatter("{x:g}")
    tidy(axes, xlabel=meaning, ylabel="speed-up (bars: 95 % intervals)", title=headed(f"Speed-up by {key}", names))
    axes.set_ylim(bottom=0)
    legend(figure, axes, names)
    return figure


def sweeps(key: str, results: Results) -> Iterator[list[dict[str, Any]]]:
    """The results that differ in ``key`` alone, by its value; sets of one value left out."""
    changed = {"batch": "batch", "temperature": "decoding"}[key]
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        same = {aspect: phrase for aspect, phrase in aspects(result).items() if aspect != changed}
        found.setdefault((*same.values(), result["prompts"], result["top_p"], result["top_k"]), []).append(result)
    for line in found.values():
        if len({result[key] for result in line}) > 1:
            yield sorted(line, key=lambda result: result[key])


def accepted_lengths(results: Results) -> Figure | None:
    """How many drafted tokens a verify pass accepted, a panel each."""
    drawn = [i for i, result in enumerate(results) if result["counters"]["num_draft_tokens"]]
    if not drawn:
        return None
    names = [wrapped(name, 24) for name in labels(results)]
    wide = min(3, len(drawn))
    high = -(-len(drawn) // wide)
    lines = max(names[i].count("\n") for i in drawn) + 1
    figure = Figure(figsize=(WIDTH, 0.7 + high * ((2.6 if high == 1 else 1.3) + 0.15 * lines)), layout="constrained")
    last = max(at for i in drawn for at, passes in enumerate(results[i]["accepted_lengths"]) if passes)
    panels = figure.subplots(high, wide, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    for axes, i in zip(panels, drawn, strict=False):
        passes = results[i]["accepted_lengths"]
        axes.bar(range(len(passes)), [n / max(1, sum(passes)) for n in passes], color=COLOURS[i % len(COLOURS)])
        tidy(axes)
        if len(drawn) > 1:
            axes.set_title(names[i], fontsize="small")
    for axes in panels[len(drawn) :]:
        axes.set_visible(False)
    panels[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panels[0].xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    panels[0].set_xlim(-0.6, last + 0.6)
    figure.suptitle(headed("Accepted tokens of a pass", [names[i] for i in drawn]))
    figure.supxlabel("accepted", fontsize="medium")
    figure.supylabel("share of the verify passes", fontsize="medium")
    return figure


def tau_by_position(results: Results) -> Figure | None:
    """τ over the answer's length, stretch by stretch."""
    stretches = sorted(
        {(each["from"], each["to"]) for result in results for each in result["tau_by_output_position"]}, key=first
    )
    if len(stretches) < 2:
        return None
    names = labels(results)
    figure = new(3.2, names)
    axes = figure.subplots()
    for i, result in enumerate(results):
        taus = {(each["from"], each["to"]): each["tau"] for each in result["tau_by_output_position"]}
        axes.plot([stretches.index(stretch) for stretch in taus], list(taus.values()), label=names[i], **look(i))
    tidy(axes, xlabel="tokens of the answer before the pass", ylabel="acceptance length τ")
    axes.set_title(headed("Acceptance length over the answer", names))
    axes.set_xticks(range(len(stretches)), [f"{low}–{high - 1}" if high else f"{low} on" for low, high in stretches])
    axes.set_ylim(bottom=min(1, axes.get_ylim()[0]))
    legend(figure, axes, names)
    return figure


def first(pair: tuple[int, int | None]) -> int:
    return pair[0]


def time(results: Results) -> Figure | None:
    """Where the time behind the prefill went, a bar each."""
    if not any(result["time"]["target"] for result in results):
        return None
    names = [wrapped(name, 30) for name in labels(results)]
    lines = max(name.count("\n") for name in names) + 1
    figure = Figure(figsize=(WIDTH, 1.3 + (0.2 + 0.16 * lines) * len(results)), layout="constrained")
    axes = figure.subplots()
    begin = [0.0] * len(results)
    for part, colour, hatch in zip(PARTS, COLOURS, ("", "//", ".."), strict=False):
        widths = [result["time"][part] for result in results]
        axes.barh(range(len(results)), widths, 0.7, begin, label=part, color=colour, hatch=hatch, edgecolor="white")
        begin = [a + b for a, b in zip(begin, widths, strict=True)]
    tidy(axes, xlim=(0, 1), xlabel="share of the time behind the first token", title="Where the time goes")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_yticks(range(len(results)), names, fontsize="small")
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(PARTS), fontsize="small", frameon=False)
    return figure


def wrapped(name: str, width: int) -> str:
    """A name in lines of about ``width`` letters, broken between its phrases."""
    lines: list[str] = []
    for phrase in name.split(", "):
        if lines and len(lines[-1]) + len(phrase) + 2 <= width:
            lines[-1] += f", {phrase}"
        else:
            lines.append(phrase)
    return ",\n".join(lines)
