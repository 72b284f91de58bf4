"""JSON values out of a file too large to hold: one after the other, from a window on its text that grows only when it must."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from .damage import Damage, Found

SPACE = re.compile(r"[ \t\n\r]*")
UNDECODED = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of bytes that are not UTF-8
SLACK = 16  # characters: an error no farther from the window's end may be the cut through -Infinity or \ud83d
DECODER = json.JSONDecoder()


class JsonText:
    """A window on the text of a file that comes in ``chunks`` of bytes; a byte-order mark is skipped."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.chunks = chunks
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.text, self.at = "", 0
        self.bytes, self.ended = 0, False
        self.cause = "the file ends"

    def array(self) -> Found:
        """The elements of the array that the text is. Raises Damage, after the last whole element."""
        self._peek()
        self.at += 1
        row, mark = 0, self._peek()
        while mark != "]":
            row += 1
            yield self._record(row)
            mark = self._peek()
            if mark == ",":  # one before the closing bracket is let pass
                self.at += 1
                mark = self._peek()
            elif not mark:
                raise Damage(f"byte {self.bytes}", f"{self.cause} before the array does")
            elif mark != "]":
                raise Damage(f"byte {self._offset(self.at)}", f"no comma and no closing bracket follows record {row}")
        self.at += 1
        if self._peek():
            raise Damage(f"byte {self._offset(self.at)}", "something follows the end of the array")
        self._check_ending()

    def values(self) -> Found:
        """The values that stand one after the other, whatever the lines. Raises Damage, after the last whole value."""
        row = 0
        while self._peek():
            row += 1
            yield self._record(row)
        self._check_ending()

    def _check_ending(self) -> None:
        """Damage behind the last record, such as a checksum that does not fit."""
        if self.cause != "the file ends":
            raise Damage(f"byte {self.bytes}", self.cause)

    def _record(self, row: int) -> tuple[int, Any] | Damage:
        """The value at the window's place, which moves on behind it."""
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
                # a number may go on behind the window
                if self.text[end - 1] in '}]"' or end + SLACK < len(self.text) or (self.ended and end < len(self.text)):
                    break
                wrong, place = "", len(self.text)
            except json.JSONDecodeError as error:
                wrong, place = error.msg, error.pos
            except (ValueError, RecursionError) as error:  # a number of thousands of digits; nesting without end
                raise Damage(f"byte {self._offset(self.at)}", f"not valid JSON: {error}") from error
            open_ended = wrong.startswith("Unterminated string")
            if self.ended and (open_ended or place >= len(self.text.rstrip())):
                began = f"in the middle of record {row}, which begins at byte {self._offset(self.at)}"
                raise Damage(f"byte {self.bytes}", f"{self.cause} {began}")
            if self.ended or not (open_ended or place + SLACK > len(self.text)):
                raise Damage(f"byte {self._offset(place)}", f"not valid JSON: {wrong}")
            self._grow()
        start, self.at = self.at, end
        if UNDECODED.search(self.text, start, end):
            raw = self.text[start:end].encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            return Damage(f"byte {self._offset(start)}", f"record {row} is not UTF-8", row, raw)
        return row, value

    def _peek(self) -> str:
        """The next character that is not a space, "" at the end."""
        while True:
            self.at = SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self._grow()

    def _grow(self) -> None:
        """Let go of what was read and take in at least as much as is left, so that the work is linear in the file's size."""
        pieces = [self.text[self.at :]]
        missing = max(len(pieces[0]), 1)
        while missing > 0 and not self.ended:
            try:
                chunk = next(self.chunks, b"")
            except Damage as damage:
                chunk, self.cause = b"", damage.what
            self.ended = not chunk
            self.bytes += len(chunk)
            pieces.append(self.decoder.decode(chunk, final=self.ended))
            missing -= len(pieces[-1])
        self.text, self.at = "".join(pieces), 0

    def _offset(self, place: int) -> int:
        """How many bytes of the file stand before a place in the window."""
        undecoded = len(self.decoder.getstate()[0])
        return self.bytes - undecoded - len(self.text[place:].encode("utf-8", "surrogateescape"))
