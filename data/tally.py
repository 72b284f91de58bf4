"""What became of the rows of a data file: every one is counted, and none is lost without a reason."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from ..console import note
from ..errors import UserError

LOUD = 0.05  # a larger share of dropped rows is worth a warning


@dataclass
class Tally:
    """Counts of rows: ``read``, ``changed`` and ``dropped`` by reason; what was not dropped was kept.

    A reason is a few plain words that stay the same from row to row. ``damaged`` tells where a file broke:
    {"at": place, "message": sentence}. Dropped rows go to ``rejects``, one JSON object a line, where a file is given;
    under ``strict`` the first one ends the run.
    """

    read: int = 0
    changed: Counter[str] = field(default_factory=Counter)
    changed_rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    damaged: dict[str, Any] | None = None
    rejects: IO[str] | None = None
    strict: bool = False

    @property
    def lost(self) -> int:
        return sum(self.dropped.values())

    @property
    def kept(self) -> int:
        return self.read - self.lost

    def change(self, reasons: list[str]) -> None:
        """Count one row that was kept in another form, for one or several reasons."""
        self.changed.update(reasons)
        self.changed_rows += bool(reasons)

    def drop(self, file: str, row: int, reason: str, detail: str = "", value: Any = None) -> None:
        """Count one dropped row; ``detail`` says more than the reason, ``value`` is the row itself.

        Raises UserError under ``strict``.
        """
        self.dropped[reason] += 1
        if self.rejects:
            record = {"file": file, "row": row, "reason": reason, "detail": detail, "value": value}
            line = json.dumps(record, ensure_ascii=False)
            self.rejects.write(line.encode(errors="backslashreplace").decode() + "\n")  # half a surrogate, as JSON writes it
        if self.strict:
            said = f"{reason} ({detail})" if detail else reason
            raise UserError(
                f"{file}, row {row}: {said}: mend or remove the row, or let it be dropped (without --strict, or data.strict in "
                "a recipe)."
            )

    def take(self, other: "Tally", rejects: Path) -> None:
        """Add another tally, whose rejects lie in a file. Raises UserError under ``strict`` where it dropped a row."""
        self.read += other.read
        self.changed += other.changed
        self.changed_rows += other.changed_rows
        self.damaged = self.damaged or other.damaged
        with open(rejects, encoding="utf-8") as lines:
            for record in map(json.loads, lines):
                self.drop(**record)

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        """The tally that ``as_json`` wrote."""
        rows = document["rows"]
        dropped, changed = Counter(document["reasons"]), Counter(document["changes"])
        return cls(rows["read"], changed, rows["changed"], dropped, document["damaged"])

    def as_json(self) -> dict[str, Any]:
        """{rows: {read, kept, changed, dropped}, reasons, changes, damaged}."""
        rows = {"read": self.read, "kept": self.kept, "changed": self.changed_rows, "dropped": self.lost}
        return {"rows": rows, "reasons": dict(self.dropped), "changes": dict(self.changed), "damaged": self.damaged}

    def warn(self) -> None:
        """Say so where a file was damaged, and where many rows were dropped."""
        if self.damaged:
            further = f" (and {self.damaged['further']} more places)" if self.damaged.get("further") else ""
            note(f"WARNING: {self.damaged['message'].rstrip('.')}{further}; what could be read is used")
        if self.lost > LOUD * self.read:
            note(f"WARNING: {self.lost / self.read:.0%} of the rows are lost: {self.sentence()}")

    def sentence(self) -> str:
        """What happened, for one line on the terminal."""
        parts = [f"{self.read} rows read, {self.kept} kept"]
        if self.changed_rows:
            parts.append(f"{self.changed_rows} of them changed ({listed(self.changed)})")
        if self.lost:
            parts.append(f"{self.lost} dropped ({listed(self.dropped)})")
        return ", ".join(parts)


def listed(reasons: Counter[str]) -> str:
    """Reasons and their counts, the most frequent first."""
    return ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
