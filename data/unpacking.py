"""The bytes and the lines of a file, without its gzip or zstd packing; neither is ever held as a whole."""

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow

from .damage import Damage

CHUNK = 1 << 16  # bytes; pyarrow loses as much of a zstd stream that breaks off
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def chunks(path: Path) -> Iterator[bytes]:
    """The file's bytes, unpacked. Raises Damage behind the last chunk that is whole."""
    packing, done = packing_of(path), 0
    try:
        with opened(path, packing) as stream:
            # read1 hands out what precedes a break
            while chunk := stream.read(CHUNK) if packing == "zstd" else stream.read1(CHUNK):
                done += len(chunk)
                yield chunk
    except (EOFError, OSError, zlib.error) as error:
        cut = isinstance(error, EOFError) or "Truncated" in str(error)
        name = f"the {packing} stream" if packing else "the file"
        raise Damage(f"byte {done}", f"{name} breaks off" if cut else f"{name} is broken: {error}") from error


def packing_of(path: Path) -> str | None:
    """ "gzip" or "zstd", by the file's first bytes; None for neither."""
    with open(path, "rb") as file:
        magic = file.read(4)
    return "gzip" if magic.startswith(GZIP) else "zstd" if magic == ZSTD else None


def opened(path: Path, packing: str | None) -> Any:
    if packing == "gzip":
        return gzip.open(path)
    if packing == "zstd":
        return pyarrow.input_stream(str(path), compression="zstd")
    return open(path, "rb")


def lines(path: Path) -> Iterator[bytes]:
    """The lines without their newlines. Raises Damage behind the last line that is whole."""
    rest: list[bytes] = []
    for chunk in chunks(path):
        first, *more = chunk.split(b"\n")
        rest.append(first)
        if more:
            yield b"".join(rest)
            yield from more[:-1]
            rest = more[-1:]
    yield b"".join(rest)


def head(path: Path, size: int) -> bytes:
    """About the first ``size`` bytes, or what there is of them."""
    pieces: list[bytes] = []
    with contextlib.suppress(Damage):
        for piece in islice(chunks(path), size // CHUNK):
            pieces.append(piece)
    return b"".join(pieces)
