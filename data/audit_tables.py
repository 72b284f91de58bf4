"""What an audit found, as small tables of words: one wording for the terminal and the page."""

from dataclasses import dataclass, field
from typing import Any

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True)
class Table:
    """``columns`` whose name starts with "#" hold numbers. ``bad`` are the rows to be marked, by their index."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    remark: str = ""
    bad: set[int] = field(default_factory=set)


def tables(document: dict[str, Any]) -> list[Table]:
    """The tables of ``Audit.document``, without those that would be empty."""
    found = [
        rows(document), reasons(document), changes(document), checks(document), lengths(document), padding(document),
        vocabulary(document), store(document),
    ]  # fmt: skip
    return [table for table in found if table.rows]


def rows(document: dict[str, Any]) -> Table:
    counts = document["rows"]
    read = counts["read"]
    lines = [(name, number(counts[name]), share(counts[name], read)) for name in ("read", "kept", "changed", "dropped")]
    lines += [("tokens kept", number(document["tokens"]), "")]
    lines += [("supervised", number(document["supervised_tokens"]), share(document["supervised_tokens"], document["tokens"]))]
    return Table("Rows and tokens", ("", "#count", "#share"), lines)


def reasons(document: dict[str, Any]) -> Table:
    read = document["rows"]["read"]
    lines = [
        (reason, number(count), share(count, read), ", ".join(_places(document["dropped"], reason)))
        for reason, count in document["reasons"].items()
    ]
    return Table("Dropped, by reason", ("reason", "#rows", "#share", "the first of them"), lines)


def _places(dropped: list[dict[str, Any]], reason: str) -> list[str]:
    return [f"{drop['file']}:{drop['row']}" for drop in dropped if drop["reason"] == reason]


def changes(document: dict[str, Any]) -> Table:
    lines = [(what, number(count), share(count, document["rows"]["kept"])) for what, count in document["changes"].items()]
    return Table("Kept, but not as it stands", ("change", "#rows", "#share"), lines)


def checks(document: dict[str, Any]) -> Table:
    lines = [("ok" if check["ok"] else "warn", check["name"], check["says"]) for check in document["checks"]]
    bad = {i for i, check in enumerate(document["checks"]) if not check["ok"]}
    return Table("Target and template", ("", "check", "finding"), lines, bad=bad)


def lengths(document: dict[str, Any]) -> Table:
    found = document["lengths"]
    if found["mean"] is None:
        return Table("Length in tokens", (), [])
    columns = ("#shortest", *(f"#{float(q):.0%}" for q in found["quantiles"]), "#longest", "#mean")
    values = (found["min"], *found["quantiles"].values(), found["max"], found["mean"])
    limit = f"{number(found['cut'])} ({found['cut_share']:.1%}) were longer and are cut at max_length {document['max_length']}."
    return Table("Length in tokens", columns, [tuple(number(round(value)) for value in values)], limit)


def padding(document: dict[str, Any]) -> Table:
    found = document["padding"]
    if found["alone"] is None:
        return Table("Padding", (), [])
    lines = [
        ("one conversation a line", f"{found['alone']:.1%}"),
        (f"packed into lines of {found['width']}", f"{found['packed']:.1%}"),
    ]
    remark = f"The share of computed places that hold no token, in batches of {found['batch_size']} of about equal length."
    return Table("Padding", ("batch", "#wasted"), lines, remark)


def vocabulary(document: dict[str, Any]) -> Table:
    found = document["vocabulary"]
    lines = [
        (number(entry["size"]), f"{entry['coverage']:.3%}", _one_in(1 - entry["coverage"]), _percent(entry["unseen"]))
        for entry in found["sizes"]
        if entry["coverage"] is not None
    ]
    remark = (
        f"{number(found['distinct'])} different tokens are supervised; the {found['always']} end and template tokens are in "
        "every draft vocabulary. Unseen: chosen from every other row, measured on the rest."
    )
    return Table("Draft vocabulary", ("#size", "#coverage", "#missed", "#unseen"), lines, remark)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.3%}"


def _one_in(missed: float) -> str:
    return f"1 in {number(round(1 / missed))}" if missed > 0 else "none"


def store(document: dict[str, Any]) -> Table:
    found = document["store"]
    lines = [(dtype, number(round(each)), size(found["bytes"][dtype])) for dtype, each in found["bytes_per_token"].items()]
    timed = document["extraction"]
    remark = f"{len(found['taps'])} taps and the last state of each token, ids and index aside. "
    if timed:
        speed = f"{number(round(timed['tokens_per_s']))} tokens/s, the median of {timed['batches']} batches timed"
        where = f"{timed['batch_tokens']} tokens each, in {timed['dtype']} on {timed['device']}"
        remark += f"Extraction takes about {duration(timed['seconds'])}: {speed} of at most {where}."
    else:
        remark += "How long extraction takes: --time runs a few batches."
    return Table("Feature store", ("dtype", "#bytes a token", "#in all"), lines if document["tokens"] else [], remark)


# -- numbers as words ------------------------------------------------------------------------------------------------------


def number(value: int) -> str:
    """12345 as 12 345, with a narrow space that does not break."""
    return f"{value:,}".replace(",", "\u202f")


def share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def size(count: float) -> str:
    """Bytes with the unit that keeps the number below a thousand."""
    power = 0
    while count >= 999.5 and power < len(UNITS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {UNITS[power]}"


def duration(seconds: float) -> str:
    """Seconds in the unit that a person would use."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} seconds"
