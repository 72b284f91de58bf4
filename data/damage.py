"""Places in a data file that cannot be read, and what is done about them."""

from collections.abc import Iterator
from typing import Any

from ..errors import UserError
from .tally import Tally


class Damage(Exception):
    """A place that cannot be read: ``at`` ("line 3", "byte 17"), and ``what`` is wrong there.

    Raised where nothing can be read beyond it. Handed out like a record, with its ``row``, where it costs that row alone;
    ``raw`` then is the row's text.
    """

    def __init__(self, at: str, what: str, row: int | None = None, raw: str | None = None) -> None:
        super().__init__(f"{at}: {what}")
        self.at, self.what, self.row, self.raw = at, what, row, raw


Found = Iterator[tuple[int, Any] | Damage]  # records with their rows, from 1


def guarded(found: Found) -> Found:
    """Hand out the damage that ends a file like any other."""
    try:
        yield from found
    except Damage as damage:
        yield damage


def note_damage(damage: Damage, file: str, whole: int, tally: Tally, salvage: bool) -> None:
    """Keep the first damage in ``tally`` and count the further ones; ``whole`` records of the file came out before it.

    A row that is lost by itself counts as dropped. Raises UserError unless ``salvage``.
    """
    records = "1 whole record" if whole == 1 else f"{whole} whole records"
    said = f"{file} is damaged at {damage.at} ({damage.what}), after {records}"
    if not salvage:
        raise UserError(
            f"{said}: mend or replace it, or keep what can be read (--salvage of the data commands, data.salvage in a recipe)."
        )
    if tally.damaged:
        tally.damaged["further"] = tally.damaged.get("further", 0) + 1
    else:
        tally.damaged = {"at": f"{file}, {damage.at}", "message": f"{said}."}
    if damage.row:
        tally.read += 1
        tally.drop(file, damage.row, "damaged", damage.what, damage.raw)
