"""What records does this source hold? Files of several formats, folders, saved data sets and the hub, one record at a time.

A file's format is told by its content. docs/reading.md has the rules, those for damaged files among them.
"""

import contextlib
import glob
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import pyarrow
import pyarrow.parquet

from ..errors import UserError
from ..fetch import hub_reachable
from .damage import Damage, Found, guarded, note_damage
from .json_text import JsonText
from .tally import Tally
from .unpacking import chunks, head, lines, packing_of

Source = str | Path

STDIN = "-"
BATCH = 128  # rows of a column file held at once
HEAD = 1 << 20  # bytes within which the first line tells lines of arrays from one array
DATA_FILE = re.compile(r"\.(json|jsonl|ndjson|parquet|txt)(\.(gz|zst))?\Z", re.IGNORECASE)
TEXT_FILE = re.compile(r"\.txt(\.(gz|zst))?\Z", re.IGNORECASE)
JSON_START = re.compile(rb'\{\s*["}]|\[\s*[\[{"]')  # in a file that may as well be plain text: "[INST]" is not JSON
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
BOM, PARQUET = b"\xef\xbb\xbf", b"PAR1"
TURN_KEYS = frozenset({"role", "from"})


def read_records(
    source: Source | Sequence[Source],
    tally: Tally,
    salvage: bool = False,
    split: str = "train",
    turn_keys: frozenset[str] = TURN_KEYS,
) -> Iterator[tuple[str, int, Any]]:
    """Yield (file, row, value) for each record of a source, in order.

    ``source``: a file, a folder, a glob, "-" for stdin, a data set saved by ``datasets``, a hub id, or several of these.
    ``row`` counts from 1: the line in a file of lines, the record elsewhere. ``split`` is the part of a data set to read.
    ``turn_keys``: an object with one of these is a turn of a chat, no record.

    Raises UserError where there is no such source, and where a file is damaged. Under ``salvage`` the damage goes into
    ``tally.damaged`` instead, and reading goes on with the next line or else with the next file.
    """
    for given in [source] if isinstance(source, Source) else source:
        for file, found in opened_parts(str(given), split, turn_keys):
            whole = 0
            for item in guarded(found):
                if isinstance(item, Damage):
                    note_damage(item, file, whole, tally, salvage)
                else:
                    whole += 1
                    yield file, *item


def local_files(source: Source) -> list[Path]:
    """The files here that reading the source reads, in order; none for stdin, a hub id, and what does not exist."""
    inside = (sorted(place.rglob("*")) if place.is_dir() else [place] for place in places(str(source)))
    return [file for file in chain.from_iterable(inside) if file.is_file()]


def opened_parts(source: str, split: str, turn_keys: frozenset[str]) -> Iterator[tuple[str, Found]]:
    """(name, records) of each file or data set that a source names."""
    if source == STDIN:
        with copied(sys.stdin.buffer) as path:
            yield "stdin", file_records(path, "stdin", turn_keys)
        return
    found = places(source)
    for place in found:
        if place.is_dir():
            yield str(place), saved_records(place, split)
        else:
            with rereadable(place) as path:
                yield str(place), file_records(path, place.name, turn_keys)
    if not found:
        yield source, hub_records(source, split)


def places(source: str) -> list[Path]:
    """The files and the saved data sets that a path or a glob names, in order."""
    path = Path(source)
    if path.is_dir() and not is_saved(path):
        inside = [inner for inner in sorted(path.iterdir()) if not inner.name.startswith(".")]
        folders = {inner for inner in inside if inner.is_dir() and not inner.is_symlink()}  # a link may lead in a circle
        wanted = [inner for inner in inside if inner in folders or (inner.is_file() and DATA_FILE.search(inner.name))]
        return [place for inner in wanted for place in places(str(inner))]
    if path.exists():
        return [path]
    matches = [match for match in sorted(glob.glob(source, recursive=True)) if Path(match).exists()]
    # "**" goes through links to folders, too
    return list({place.resolve(): place for match in matches for place in places(match)}.values())


def is_saved(path: Path) -> bool:
    """Whether ``save_to_disk`` wrote this directory."""
    return (path / "dataset_dict.json").is_file() or {"state.json", "dataset_info.json"} <= {
        file.name for file in path.iterdir()
    }


@contextlib.contextmanager
def rereadable(place: Path) -> Iterator[Path]:
    """A path that can be read from its beginning several times: the file's own, or that of a copy of what a pipe holds."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(place, "rb"))
        except OSError as error:
            raise UserError(f"{place} cannot be opened ({error.strerror}): check its permissions.") from error
        yield place if file.seekable() else stack.enter_context(copied(file))


@contextlib.contextmanager
def copied(stream: Any) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(prefix="draftsmith-") as copy:
        shutil.copyfileobj(stream, copy)
        copy.flush()
        yield Path(copy.name)


def saved_records(place: Path, split: str) -> Found:
    """The records of a data set that was saved to disk, or of one split of several."""
    try:
        data = datasets.load_from_disk(str(place))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise Damage("its tables", first_line(error)) from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise UserError(f"{place} has no split {split!r}: choose --split {' or '.join(map(str, data))}.")
        data = data[split]
    yield from enumerate(map(plain, data), start=1)


def hub_records(name: str, split: str) -> Found:
    """The records of a data set of the hub; ``owner/name:config`` names one of its configurations.

    Raises UserError where the name can be none, where the hub does not have it, and where it cannot be reached.
    """
    if Path(name).is_dir():
        raise UserError(f"{name} holds no data file: give a folder with .json, .jsonl, .parquet or .txt files, packed or not.")
    if not HUB_ID.fullmatch(name) or DATA_FILE.search(name):
        kinds = "a file, a folder, a glob in quotes, a saved data set, a hub id such as owner/name, or - for stdin"
        raise UserError(f"{name} is not here: give {kinds}.")
    reachable = hub_reachable()
    unreachable = f"{name} is not here, and the hub cannot be reached: give a path, or HF_HUB_OFFLINE=1 to read what is cached."
    if not reachable and not datasets.config.HF_HUB_OFFLINE:  # else it would be tried again and again
        raise UserError(unreachable)
    repository, _, config = name.partition(":")
    try:
        data = datasets.load_dataset(repository, config or None, split=split, streaming=reachable)
    except Exception as error:  # whatever the hub's client and the data set's own format raise
        found = (
            f"the hub's data set {name} cannot be read ({first_line(error)}): check its name and --split, or add :config to it."
        )
        raise UserError(found if reachable else unreachable) from error
    yield from enumerate(map(plain, data), start=1)


def file_records(path: Path, name: str, turn_keys: frozenset[str]) -> Found:
    """The records of one file, whatever its format and packing. ``name`` is what the user calls it."""
    start = head(path, HEAD).removeprefix(BOM).lstrip()
    if start.startswith(PARQUET) or name.lower().endswith(".parquet"):
        return parquet_records(path)
    if (name == "stdin" or TEXT_FILE.search(name)) and not JSON_START.match(start):
        return line_records(path, as_text)
    if start.startswith(b"[") and not are_lines(start):
        return JsonText(chunks(path)).array()
    if start.startswith(b"{") and not are_lines(b"\n".join(first_lines(path))):
        return object_records(path, turn_keys)
    return line_records(path, json.loads)


def first_lines(path: Path) -> list[bytes]:
    """The first two lines that are not blank."""
    found: list[bytes] = []
    with contextlib.suppress(Damage):
        for line in islice((line for line in lines(path) if line.removeprefix(BOM).strip()), 2):
            found.append(line)
    return found


def are_lines(start: bytes) -> bool:
    """Whether a file that begins so is one of lines, each a record, rather than one value that may stretch over lines."""
    first, _, more = start.removeprefix(BOM).partition(b"\n")
    text = first.decode(errors="replace").rstrip()
    if not more.strip():
        return False
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        # a value printed over lines is never broken inside a string
        goes_on = error.pos >= len(text) and not error.msg.startswith("Unterminated string")
        return not goes_on
    except (ValueError, RecursionError):
        return True
    return True


def line_records(path: Path, parse: Callable[[str], Any]) -> Found:
    """A record a line; blank lines are skipped."""
    for row, line in enumerate(lines(path), start=1):
        line = line.removeprefix(BOM) if row == 1 else line
        if not line.strip():
            continue
        try:
            text = line.decode()
            if "\0" in text:
                yield Damage(f"line {row}", "it holds NUL bytes", row, text)
            else:
                yield row, parse(text)
        except (ValueError, RecursionError) as error:
            yield Damage(f"line {row}", what_is_wrong(error), row, line.decode(errors="replace"))


def as_text(line: str) -> dict[str, str]:
    return {"text": line.rstrip("\r")}


def what_is_wrong(error: Exception) -> str:
    """The fault of a line, in words."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at its byte {error.start + 1}"
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
    return f"not valid JSON: {error}"


def object_records(path: Path, turn_keys: frozenset[str]) -> Found:
    """The objects that stand in a file one after the other; where there is one and it holds a list of records, these."""
    found = guarded(JsonText(chunks(path)).values())
    begin = list(islice(found, 2))
    held = held_records(begin[0][1], turn_keys) if len(begin) == 1 and isinstance(begin[0], tuple) else None
    yield from chain(begin, found) if held is None else enumerate(held, start=1)


def held_records(value: Any, turn_keys: frozenset[str]) -> list[Any] | None:
    """The one list of objects that an object holds, unless they are the turns of a chat."""
    lists = [inner for inner in value.values() if isinstance(inner, list) and inner and isinstance(inner[0], dict)]
    return lists[0] if len(lists) == 1 and not turn_keys & lists[0][0].keys() else None


def parquet_records(path: Path) -> Found:
    """The rows of a Parquet file; a packed one is unpacked to the disk first, since its footer is read before its rows."""
    with contextlib.ExitStack() as stack:
        if packing_of(path):
            copy = stack.enter_context(tempfile.NamedTemporaryFile(prefix="draftsmith-"))
            copy.writelines(chunks(path))
            copy.flush()
            path = Path(copy.name)
        row = 0
        try:
            table = stack.enter_context(pyarrow.parquet.ParquetFile(str(path)))
            for batch in table.iter_batches(BATCH):
                for value in batch.to_pylist(maps_as_pydicts="lossy"):
                    row += 1
                    yield row, plain(value)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise Damage(f"row {row + 1}" if row else "its footer", f"not valid Parquet: {first_line(error)}") from error


def plain(value: Any) -> Any:
    """A value of a column file as JSON would hold it: without the nulls that a struct has for the keys of other rows."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if inner is not None and inner == inner}  # nor NaN
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return f"<{len(value)} bytes>"
    return value if value is None or isinstance(value, str | int | float) else str(value)


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
