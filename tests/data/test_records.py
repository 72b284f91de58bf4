"""Files in every format and packing read back what was written, and say where they broke."""

import gzip
import json
import os
import re
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.records import local_files, read_records
from draftsmith.data.tally import Tally
from draftsmith.errors import UserError

RECORDS = [{"id": i, "text": f"é{i}\n{'x' * i}"} for i in range(5)]
ARRAY = json.dumps(RECORDS, ensure_ascii=False).encode()
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)


def zstd(data: bytes) -> bytes:
    buffer = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(data)
    return buffer.getvalue().to_pybytes()


def parquet(records: list[dict[str, Any]]) -> bytes:
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), buffer, row_group_size=2)
    return buffer.getvalue().to_pybytes()


def lines(records: list[Any], end: str = "\n") -> bytes:
    return "".join(json.dumps(record) + end for record in records).encode()


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def values(source: Any, salvage: bool = False, tally: Tally | None = None) -> list[Any]:
    return [value for _, _, value in read_records(source, tally or Tally(), salvage)]


gz = partial(gzip.compress, mtime=0)  # a test that is named after its bytes keeps its name
PACKINGS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gz, ".zst": zstd}
LAYOUTS: dict[str, Callable[[list[Any]], bytes]] = {
    "array": lambda records: json.dumps(records).encode(),
    "array over lines": lambda records: json.dumps(records, indent=2, ensure_ascii=False).encode(),
    "array, a record a line": lambda records: b"[" + b",\n".join(json.dumps(record).encode() for record in records) + b"]\n",
    "array with a byte-order mark": lambda records: b"\xef\xbb\xbf" + json.dumps(records).encode(),
    "lines": lines,
    "lines with Windows ends": lambda records: b"\xef\xbb\xbf" + lines(records, "\r\n\r\n"),
    "lines without the last end": lambda records: lines(records).rstrip(),
    "objects over lines": lambda records: "\n".join(json.dumps(record, indent=1) for record in records).encode(),
    "list in an object": lambda records: json.dumps({"version": 1, "data": records}, indent=1).encode() if records else b"",
    "list in an object on one line": lambda records: json.dumps({"data": records}).encode() if records else b"",
    "Parquet": parquet,
}
RECORD = st.fixed_dictionaries(
    {"id": st.integers(-(2**40), 2**40), "text": st.text(), "tags": st.lists(st.text(max_size=3), max_size=2)}
)


@settings(max_examples=40, deadline=None)
@given(st.lists(RECORD, max_size=6), st.sampled_from(list(LAYOUTS)), st.sampled_from(list(PACKINGS)))
def test_records_read_back_equal(tmp_path_factory: Any, records: list[Any], layout: str, packing: str) -> None:
    if layout.startswith("list in an object") and not records:
        return
    path = put(tmp_path_factory.mktemp("layout") / "data.bin", PACKINGS[packing](LAYOUTS[layout](records)))
    tally = Tally()
    assert values(path, tally=tally) == records and tally.damaged is None


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_in_every_packing(tmp_path: Path, layout: str, packing: str) -> None:
    """The property above draws; this goes through all, with the names that people give such files."""
    path = put(tmp_path / f"data.json{packing}", PACKINGS[packing](LAYOUTS[layout](RECORDS)))
    assert values(path) == RECORDS


def test_a_row_is_its_line_in_a_file_of_lines_and_its_number_elsewhere(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", b'\n{"a": 1}\n \n{"a": 2}')
    assert list(read_records(path, Tally())) == [(str(path), 2, {"a": 1}), (str(path), 4, {"a": 2})]
    path = put(tmp_path / "a.json", b'[\n{"a": 1},\n\n{"a": 2}]')
    assert list(read_records(path, Tally())) == [(str(path), 1, {"a": 1}), (str(path), 2, {"a": 2})]


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("a.txt", b"one\r\n\ntwo [x]\n", [{"text": "one"}, {"text": "two [x]"}]),
        ("a.txt.gz", gz(b"[INST] hi [/INST]\n{x}\n"), [{"text": "[INST] hi [/INST]"}, {"text": "{x}"}]),
        ("a.txt", b'{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        ("a.jsonl", '{"a": "x\u2028y\x85z"}\n"b"\n[3]\n'.encode(), [{"a": "x\u2028y\x85z"}, "b", [3]]),
        ("a.jsonl", b'[{"a": 1}]\n[{"a": 2}, {"a": 3}]\n', [[{"a": 1}], [{"a": 2}, {"a": 3}]]),
        ("a.json", b'{"id": 1, "messages": [{"role": "user"}]}', [{"id": 1, "messages": [{"role": "user"}]}]),
        ("a.json", b'{\n "messages": [\n {"from": "human"}\n ]\n}', [{"messages": [{"from": "human"}]}]),
        ("a.json", b'{"a": [{"x": 1}], "b": [{"x": 2}]}', [{"a": [{"x": 1}], "b": [{"x": 2}]}]),
        ("a.json", b"[{}, 12, 3.5, -Infinity, [], null,]", [{}, 12, 3.5, float("-inf"), [], None]),
        ("a.json", b" \n", []),
        ("a.json", b"", []),
        ("a.json", b"[ ]\n", []),
    ],
)  # fmt: skip
def test_what_a_file_is_told_by(tmp_path: Path, name: str, data: bytes, found: list[Any]) -> None:
    assert values(put(tmp_path / name, data)) == found


@dataclass(frozen=True)
class Damaged:
    """A file, what the sentence says, how many records come out before, and what comes out in all under salvage."""

    name: str
    data: bytes
    said: str
    before: int
    salvaged: int


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


BROKEN_LINE = lines(RECORDS[:2]) + b'{"id": tru}\n' + lines(RECORDS[2:])
PARQUET = parquet(RECORDS)
DAMAGED = {
    "array cut in a string": Damaged(
        "a.json", ARRAY[:-20],
        f"byte {len(ARRAY) - 20} (the file ends in the middle of record 5, which begins at byte", 4, 4,
    ),
    "array without its end": Damaged(
        "a.json", ARRAY[:-1],
        f"byte {len(ARRAY) - 1} (the file ends before the array does)", 5, 5,
    ),
    "array cut in its mark": Damaged(
        "a.json", b"[",
        "byte 1 (the file ends in the middle of record 1, which begins at byte 1)", 0, 0,
    ),
    "array broken inside": Damaged(
        "a.json", b'[{"a": 1}, {"a" 2}, {"a": 3}]',
        "byte 16 (not valid JSON: Expecting ':' delimiter)", 1, 1,
    ),
    "array with no comma": Damaged(
        "a.json", b'[{"a": 1} {"a": 2}]',
        "byte 10 (no comma and no closing bracket follows record 1)", 1, 1,
    ),
    "more behind the array": Damaged(
        "a.json", b'[{"a": 1}] , {"a": 2}',
        "byte 11 (something follows the end of the array)", 1, 1,
    ),
    "array not UTF-8": Damaged(
        "a.json", '[{"é": 1}, {"a": "x'.encode() + b'\xff"}, {"a": 3}]',
        "byte 12 (record 2 is not UTF-8)", 1, 2,
    ),
    "array cut in a letter": Damaged(
        "a.json", '[{"a": "é'.encode()[:-1],
        "byte 9 (the file ends in the middle of record 1", 0, 0,
    ),
    "array nested too deeply": Damaged("a.json", b"[" * 100_000, "byte 1 (not valid JSON: maximum recursion depth", 0, 0),
    "broken line": Damaged("a.jsonl", BROKEN_LINE, "line 3 (not valid JSON: Expecting value at column 8)", 2, 5),
    "last line cut": Damaged("a.jsonl", LINES[:-8], "line 5 (not valid JSON: Unterminated string", 4, 4),
    "first line cut": Damaged("a.jsonl", LINES[:19] + b"\n" + LINES, "line 1 (not valid JSON: Unterminated string", 0, 5),
    "line not UTF-8": Damaged("a.jsonl", LINES + b'{"a": "\xff"}\n' + LINES, "line 6 (not UTF-8 at its byte 8)", 5, 10),
    "UTF-16": Damaged("a.jsonl", LINES.decode().encode("utf-16"), "line 1 (not UTF-8 at its byte 1)", 0, 0),
    "NUL bytes in a line": Damaged("a.jsonl", LINES + b"\0" * 99 + b"\n" + LINES, "line 6 (it holds NUL bytes)", 5, 10),
    "NUL bytes in a text": Damaged("a.txt", b"one\n\0\0\ntwo\n", "line 2 (it holds NUL bytes)", 1, 2),
    "text not UTF-8": Damaged("a.txt", b"one\n\xe9\ntwo\n", "line 2 (not UTF-8 at its byte 1)", 1, 2),
    "line nested too deeply": Damaged(
        "a.jsonl", LINES + b'{"a":' * 100_000 + b"\n" + LINES,
        "line 6 (not valid JSON: maximum recursion", 5, 10,
    ),
    "object cut": Damaged("a.json", b'{\n "data": [\n {"a": 1},', "byte 23 (the file ends in the middle of record 1", 0, 0),
    "not data at all": Damaged("a.json", b"name,age\nAnn,7\n", "line 1 (not valid JSON: Expecting value at column 1)", 0, 0),
    "gzip cut": Damaged("a.json.gz", gz(ARRAY)[:-12], "the gzip stream breaks off", 4, 4),
    "gzip cut at once": Damaged("a.jsonl.gz", gz(LINES)[:12], "the gzip stream breaks off", 0, 0),
    "gzip of lines without its checksum": Damaged(
        "a.jsonl.gz", gz(LINES)[:-8],
        f"byte {len(LINES)} (the gzip stream breaks off)", 5, 5,
    ),
    "gzip with a wrong checksum": Damaged(
        "a.json.gz", flipped(gz(ARRAY), -6),
        f"byte {len(ARRAY)} (the gzip stream is broken: CRC check failed", 5, 5,
    ),
    "zstd cut": Damaged("a.json.zst", zstd(ARRAY)[:-12], "byte 0 (the zstd stream breaks off)", 0, 0),
    "Parquet without its footer": Damaged("a.parquet", PARQUET[:-30], "its footer (not valid Parquet: ", 0, 0),
    "Parquet without anything": Damaged("a.parquet", b"", "its footer (not valid Parquet: ", 0, 0),
    "Parquet in a cut gzip": Damaged("a.parquet.gz", gz(PARQUET)[:-30], "the gzip stream breaks off", 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED.values(), ids=list(DAMAGED))
def test_damage_is_told_in_one_sentence_and_salvaged(tmp_path: Path, case: Damaged) -> None:
    path, whole = put(tmp_path / case.name, case.data), put(tmp_path / "next.jsonl", LINES)
    found = []
    with pytest.raises(UserError) as caught:
        found += (value for value in read_records([path, whole], Tally()))
    sentence = str(caught.value)
    records = "1 whole record" if case.before == 1 else f"{case.before} whole records"
    assert sentence.startswith(f"{path} is damaged at ") and case.said in sentence
    assert sentence.endswith(
        f"after {records}: mend or replace it, or keep what can be read (--salvage of the data commands, data.salvage in a "
        "recipe)."
    )

    tally = Tally()
    files = [file for file, *_ in read_records([path, whole], tally, salvage=True)]
    assert files == [str(path)] * case.salvaged + [str(whole)] * len(RECORDS)
    assert tally.damaged and case.said in tally.damaged["message"] and tally.damaged["at"].startswith(f"{path}, ")
    lost = tally.dropped["damaged"]
    assert tally.read == tally.lost == lost and lost <= 1 + tally.damaged.get("further", 0)


def test_further_damage_is_counted_and_lost_rows_are_kept_for_the_rejects(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", b'{"a": 1}\nno\n{"a": 2}\nneither\n')
    with open(tmp_path / "rejects.jsonl", "w+") as rejects:
        tally = Tally(rejects=rejects)
        assert values([path, put(tmp_path / "b.json", b"[1")], True, tally) == [{"a": 1}, {"a": 2}]
        rejects.seek(0)
        assert [(record["row"], record["value"]) for record in map(json.loads, rejects)] == [(2, "no"), (4, "neither")]
    assert tally.damaged == {"at": f"{path}, line 2", "message": tally.damaged["message"], "further": 2}  # type: ignore[index]
    assert tally.dropped == {"damaged": 2} and tally.read == 2


def test_a_broken_page_of_a_parquet_file_ends_it_after_the_rows_before(tmp_path: Path) -> None:
    records = [{"text": f"{i} " * 500} for i in range(1000)]
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), buffer, row_group_size=250, compression="gzip")
    data = bytearray(buffer.getvalue().to_pybytes())
    data[len(data) // 2 : len(data) // 2 + 2000] = bytes(2000)
    tally = Tally()
    found = values(put(tmp_path / "a.parquet", bytes(data)), True, tally)
    assert 0 < len(found) < 1000 and found == records[: len(found)]
    assert tally.damaged and f"row {len(found) + 1} (not valid Parquet" in tally.damaged["message"]


NESTED = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=3), NESTED, max_size=3), max_size=4), st.booleans(), st.booleans(), st.data())
def test_an_array_cut_anywhere_gives_the_records_before_the_cut(
    tmp_path_factory: Any, records: list[Any], ascii_only: bool, over_lines: bool, data: Any
) -> None:
    pieces = [json.dumps(record, ensure_ascii=ascii_only, indent=2 if over_lines else None) for record in records]
    whole = ("[" + ", ".join(pieces) + "]").encode()
    cut = data.draw(st.integers(1, len(whole)))
    ends, place = [], 1
    for piece in pieces:
        ends.append(place + len(piece.encode()))
        place = ends[-1] + 2
    tally = Tally()
    found = values(put(tmp_path_factory.mktemp("cut") / "a.json", whole[:cut]), True, tally)
    assert found == records[: sum(end <= cut for end in ends)]
    assert (tally.damaged is None) == (cut == len(whole))


@settings(max_examples=60, deadline=None)
@given(st.lists(RECORD, min_size=1, max_size=4), st.sampled_from([bytes, gz]), st.data())
def test_lines_cut_anywhere_give_the_lines_before_the_cut(
    tmp_path_factory: Any, records: list[Any], packed: Any, data: Any
) -> None:
    whole = packed(lines(records))
    cut = data.draw(st.integers(1, len(whole) - 1))
    tally = Tally()
    found = values(put(tmp_path_factory.mktemp("cut") / "a.jsonl", whole[:cut]), True, tally)
    assert found == records[: len(found)]
    if packed is bytes:
        assert len(found) == sum(len(lines(records[: i + 1])) - 1 <= cut for i in range(len(records)))


def test_memory_and_time_stay_in_proportion(tmp_path: Path) -> None:
    """An array takes the memory of its largest record, and a record of many megabytes no more than linear time."""
    record = {"text": "word é " * 15_000}
    path = put(tmp_path / "a.json", json.dumps([record] * 200, ensure_ascii=False).encode())
    tracemalloc.start()
    count = sum(1 for _ in read_records(path, Tally()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 200 and path.stat().st_size > 20e6 and peak < 4e6

    seconds = []
    for size in (4_000_000, 32_000_000):
        path = put(tmp_path / "b.json", b'[{"text": "' + b"x" * size + b'"}]')
        began = time.perf_counter()
        assert len(values(path)[0]["text"]) == size
        seconds.append(time.perf_counter() - began)
    assert seconds[1] < 40 * max(seconds[0], 0.01)  # eight times the bytes


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Data files in several folders, and what is none."""
    for name, value in [
        ("b.jsonl", 1),
        ("c/a.json.gz", 2),
        ("a.parquet", 0),
        ("c/d/z.txt", 3),
        (".hidden.jsonl", 9),
        ("notes.md", 9),
    ]:
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {".parquet": parquet([{"a": value}]), ".gz": gz(b'[{"a": %d}]' % value), ".txt": b"%d" % value}
        path.write_bytes(data.get(path.suffix, b'{"a": %d}\n' % value))
    (tmp_path / "tree" / "c" / "loop").symlink_to(tmp_path / "tree")
    return tmp_path / "tree"


def test_folders_globs_and_lists_name_several_files(tree: Path) -> None:
    everything = [{"a": 0}, {"a": 1}, {"a": 2}, {"text": "3"}]
    assert values(tree) == values(str(tree)) == everything
    assert values(f"{tree}/*.*") == everything[:2] + values(tree / "notes.md")
    assert values(f"{tree}/**/*.txt") == everything[3:]
    assert values(f"{tree}/**") == [*everything[:2], *everything[2:], {"a": 9}]
    assert values([tree / "b.jsonl", f"{tree}/a*", str(tree / "c")]) == [{"a": 1}, {"a": 0}, {"a": 2}, {"text": "3"}]
    assert local_files(tree) == [tree / name for name in ("a.parquet", "b.jsonl", "c/a.json.gz", "c/d/z.txt")]
    assert [local_files(other) for other in ("-", "owner/name", tree / "none.jsonl")] == [[], [], []]


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path: Path) -> None:
    assert values(put(tmp_path / "a[1]*.jsonl", LINES)) == RECORDS


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("none.jsonl", "none.jsonl is not here: give a file, a folder, a glob in quotes, a saved data set, a hub id"),
        ("none/*.jsonl", "none/*.jsonl is not here: give a file"),
        ("data/none.jsonl", "data/none.jsonl is not here: give a file"),
        ("empty", "empty holds no data file: give a folder with .json"),
        (
            "owner/name",
            "owner/name is not here, and the hub cannot be reached: give a path, or HF_HUB_OFFLINE=1 to read what is cached.",
        ),
    ],
)
def test_a_source_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, sentence: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=re.escape(sentence)):
        values(source)


@pytest.fixture
def pipe() -> Iterator[Callable[[bytes], Any]]:
    """``pipe(data)``: the reading end of a real pipe through which the data comes."""
    writers = []

    def through(data: bytes) -> Any:
        end, begin = os.pipe()

        def write() -> None:
            with open(begin, "wb") as file:
                file.write(data)

        writers.append(threading.Thread(target=write))
        writers[-1].start()
        return open(end)

    yield through
    for writer in writers:
        writer.join()


@pytest.mark.parametrize("data", [LINES, ARRAY, gz(ARRAY), parquet(RECORDS)])
def test_stdin_is_read_whatever_its_format(pipe: Any, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    with pipe(data) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert list(read_records("-", Tally())) == [("stdin", row, record) for row, record in enumerate(RECORDS, start=1)]
    with pipe(b"tell me\nof rivers\n") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert values("-") == [{"text": "tell me"}, {"text": "of rivers"}]


def test_a_named_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    writer = threading.Thread(target=(tmp_path / "fifo").write_bytes, args=[ARRAY])
    writer.start()
    assert values(tmp_path / "fifo") == RECORDS
    writer.join()


def using(**arguments: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}]


TOOL_ROWS = [
    {"messages": using(x=1), "id": 7},
    {"messages": using(y="2", z={"u": [1]})},
    {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]},
]


def test_column_files_lose_the_nulls_that_their_schema_invents(tmp_path: Path) -> None:
    """Rows with other argument names come out as they went in, from Parquet and from a saved data set."""
    data = datasets.Dataset.from_list(TOOL_ROWS)
    data.to_parquet(str(tmp_path / "a.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    schema = pyarrow.Table.from_pylist(TOOL_ROWS)
    pyarrow.parquet.write_table(schema, tmp_path / "b.parquet")
    assert "null" in json.dumps(schema.to_pylist())
    assert values(tmp_path / "a.parquet") == values(tmp_path / "b.parquet") == values(tmp_path / "saved") == TOOL_ROWS


def test_saved_data_sets_and_their_splits(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_list([{"name": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "both"))  # type: ignore[arg-type]
    assert values(tmp_path / "both") == values(tmp_path) == [{"name": "train"}]
    assert [value for *_, value in read_records(tmp_path / "both", Tally(), split="test")] == [{"name": "test"}]
    with pytest.raises(UserError, match="both has no split 'dev': choose --split train or test"):
        list(read_records(tmp_path / "both", Tally(), split="dev"))
    assert {file.suffix for file in local_files(tmp_path / "both")} == {".json", ".arrow"}
    next((tmp_path / "both" / "train").glob("*.arrow")).write_bytes(b"no table")
    with pytest.raises(UserError, match=r"both is damaged at its tables \(.*\), after 0 whole records"):
        values(tmp_path / "both")


def test_other_values_of_column_files_become_what_json_can_hold(tmp_path: Path) -> None:
    row = {
        "a": date(2024, 2, 29),
        "b": Decimal("1.50"),
        "c": "é".encode(),
        "d": b"\xff\xfe",
        "e": float("nan"),
        "f": [None, 1],
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == [{"a": "2024-02-29", "b": "1.50", "c": "é", "d": "<2 bytes>", "f": [None, 1]}]
