"""A file of finished work that survives a kill at any moment: what it holds is done, and the rest is done at the next start."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

from ..errors import UserError


class Journal:
    """One JSON object a line: the header that tells which work this is, then an entry {"index": int, …} for each row done.

    Entries are on the disk when ``append`` returns. Half a line, as a kill in the middle of writing leaves it, is cut off
    when the journal is opened.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.header: dict[str, Any] | None = None
        self.places: dict[int, int] = {}  # index -> offset of its line

    @classmethod
    @contextmanager
    def opened(cls, path: Path, header: dict[str, Any], force: bool) -> Iterator[Self]:
        """The journal at ``path`` for the work that ``header`` describes, new or resumed; locked while the block runs.

        Raises UserError where another process holds it, where it is damaged, and where it belongs to other work, unless
        ``force`` lets that go.
        """
        header = json.loads(_line(header))  # as it will be read back
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path) as file:
            journal = cls(path, file)
            journal._read()
            parted = list(differences(journal.header or header, header))
            if parted and not force:
                raise UserError(
                    f"{path} was begun with other settings ({'; '.join(parted)}): set them back to go on with it, name "
                    "another --out, or pass --force to begin anew."
                )
            if journal.header is None or parted:
                journal._begin(header)
            yield journal

    def _begin(self, header: dict[str, Any]) -> None:
        self.file.truncate(0)
        self.places = {}
        self.header = header
        self._write(_line(header))

    def _read(self) -> None:
        """Find every whole line, and cut off half a line at the end."""
        offset = 0
        self.file.seek(0)
        for number, line in enumerate(self.file, start=1):
            if not line.endswith(b"\n"):
                self.file.truncate(offset)
                break
            try:
                value = json.loads(line)
                if number == 1:
                    self.header = value
                else:
                    self.places[value["index"]] = offset
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{self.path}, line {number} is damaged: remove that line and run again.") from error
            offset += len(line)

    def append(self, entries: Iterable[dict[str, Any]]) -> None:
        """Write entries of indices that the journal does not have yet, in one go, and wait until the disk has them."""
        lines = {entry["index"]: _line(entry) for entry in entries}
        assert not lines.keys() & self.places.keys(), "a row must not come out twice"
        offset = self._write(b"".join(lines.values()))
        for index, line in lines.items():
            self.places[index] = offset
            offset += len(line)

    def _write(self, data: bytes) -> int:
        """Write at the end; returns where the data begins."""
        offset = self.file.seek(0, os.SEEK_END)
        self.file.write(data)
        self.file.flush()
        os.fsync(self.file.fileno())
        return offset

    def entries(self, in_order: bool = True) -> Iterator[dict[str, Any]]:
        """The entries, by index or in the order in which they were written."""
        for index in sorted(self.places) if in_order else list(self.places):
            self.file.seek(self.places[index])
            yield json.loads(self.file.readline())


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The file, made where it is missing, open for reading and writing by this process alone."""
    while True:
        with open(path, "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"{path} is being written by another process: wait until it ends, or name another --out."
                ) from error
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file
                return
        # the process that held it has just finished and removed it: take the next one


def differences(then: dict[str, Any], now: dict[str, Any], above: str = "") -> Iterator[str]:
    """What differs between two headers, key by key, in words."""
    for key in sorted(then.keys() | now.keys()):
        before, after = then.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from differences(before, after, f"{above}{key}.")
        elif before != after:
            yield f"{above}{key} was {json.dumps(before)} and is {json.dumps(after)}"
