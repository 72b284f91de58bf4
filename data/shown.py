"""Which conversations of a file are worth a look?"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from ..errors import UserError
from .chat import Encoded
from .examples import ENCODED, table_lengths
from .tally import Tally

FIRST = 3  # dropped rows told per reason
DRAWN = 3  # conversations shown that nothing speaks for


@dataclass
class FirstDrops(Tally):
    """A tally that keeps the first few rows dropped for each reason: file, row, reason, detail."""

    first: list[dict[str, Any]] = field(default_factory=list)

    def drop(self, file: str, row: int, reason: str, detail: str = "", value: Any = None) -> None:
        if self.dropped[reason] < FIRST:
            self.first.append({"file": file, "row": row, "reason": reason, "detail": detail})
        super().drop(file, row, reason, detail, value)


@dataclass(frozen=True)
class Shown:
    """A conversation to look at token by token, and ``why`` it was picked. ``reason``: why it was dropped, if it was."""

    why: str
    file: str
    row: int
    example: Encoded
    reason: str
    detail: str


def pick(table: datasets.Dataset | None, rows: Sequence[str], tally: FirstDrops, seed: int) -> list[Shown]:
    """The rows asked for, or else a few: the first, the longest, one for each note and each reason, some by chance."""
    if table is None:
        table = datasets.Dataset.from_dict({name: [] for name in ENCODED}, ENCODED)
    places = asked(table, rows, tally) if rows else spread(table, seed)
    return [shown(why, table[place]) for place, why in places.items()]


def asked(table: datasets.Dataset, rows: Sequence[str], tally: FirstDrops) -> dict[int, str]:
    """The places of rows given as ROW or FILE:ROW. Raises UserError for one that is not there."""
    known: dict[str, list[int]] = {}
    for place, (file, row) in enumerate(zip(table["file"][:], table["row"][:], strict=True)):
        for name in {str(row), f"{file}:{row}", f"{Path(file).name}:{row}"}:
            known.setdefault(name, []).append(place)
    found: dict[int, str] = {}
    for name in rows:
        if name not in known:
            drops = [drop for drop in tally.first if name in (str(drop["row"]), f"{drop['file']}:{drop['row']}")]
            why = f" (it was dropped: {drops[0]['reason']})" if drops else ""
            raise UserError(
                f"--show {name}: no row of that number can be shown{why}: give ROW or FILE:ROW as --rejects names them."
            )
        found |= dict.fromkeys(known[name], f"row {name}")
    return found


def spread(table: datasets.Dataset, seed: int) -> dict[int, str]:
    """Places worth a look, and why."""
    reasons, notes = table["reason"][:], table["notes"][:]
    lengths = table_lengths(table)
    kept = [place for place, reason in enumerate(reasons) if not reason]
    found: dict[int, str] = {}
    if kept:
        found[kept[0]] = "the first"
        found.setdefault(max(kept, key=lambda place: lengths[place]), "the longest")
    seen: set[str] = set()
    for place, (reason, own) in enumerate(zip(reasons, notes, strict=True)):
        fresh = [label for label in ([f"dropped: {reason}"] if reason else own) if label not in seen and lengths[place]]
        seen.update(fresh)
        for label in fresh:
            found.setdefault(place, label)
    rest = [place for place in kept if place not in found]
    found |= dict.fromkeys(random.Random(seed).sample(rest, min(DRAWN, len(rest))), "drawn by chance")
    return found


def shown(why: str, row: dict[str, Any]) -> Shown:
    example = Encoded(np.array(row["ids"], np.int32), np.array(row["mask"], bool), tuple(row["notes"]))
    return Shown(why, row["file"], row["row"], example, row["reason"], row["detail"])
