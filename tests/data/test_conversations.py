import json
import re
from pathlib import Path

import pytest

from draftsmith.data.conversations import read_conversations, read_jsonl
from draftsmith.errors import UserError

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hällo"}]}


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def test_reads_rows_in_order_with_their_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps(GOOD), "", "  ", json.dumps({**GOOD, "finish": "length"}, ensure_ascii=False))
    first, second = read_conversations(path)
    assert (first.row, first.finish, second.row, second.finish) == (1, "stop", 4, "length")
    assert first.file == str(path)
    assert first.messages == second.messages == GOOD["messages"]


def test_tolerates_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    line = json.dumps(GOOD).encode()
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + line + b"\r", line + b"\r")
    assert [c.row for c in read_conversations(path)] == [1, 2]


def test_line_separators_inside_a_string_do_not_end_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"a": "x\u2028y\x85z"}', '{"a": 2}')
    assert list(read_jsonl(path)) == [(1, {"a": "x\u2028y\x85z"}), (2, {"a": 2})]


def test_other_keys_of_a_message_are_kept(tmp_path: Path) -> None:
    row = {"messages": [GOOD["messages"][0], {**GOOD["messages"][1], "reasoning_content": "hm"}], "id": "7"}
    assert read_conversations(write(tmp_path / "a.jsonl", json.dumps(row)))[0].messages[1]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"messages": [', "line 2 is not valid JSON"),
        (b'{"messages": "\xff"}', "line 2 is not UTF-8 (byte 15): save the file as UTF-8."),
        ("[" * 100_000, "line 2 is not valid JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ("null", "line 2 is not a JSON object"),
        ('{"text": "hi"}', "line 2 has no list of messages"),
        ('{"messages": []}', "line 2 has no list of messages"),
        ('{"messages": ["hi"]}', "line 2: message 1 is not an object"),
        ('{"messages": [{"content": "hi"}]}', 'line 2: message 1 has no text under "role"'),
        ('{"messages": [{"role": "user", "content": null}]}', 'line 2: message 1 has no text under "content"'),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "line 2: message 1 holds half a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "line 2 has no assistant turn"),
        (json.dumps({**GOOD, "finish": "cut"}), "line 2 has the finish 'cut'"),
    ],
)
def test_a_broken_line_is_named_with_its_mend(tmp_path: Path, line: str | bytes, sentence: str) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps(GOOD), line)
    with pytest.raises(UserError, match=re.escape(f"{path}, {sentence}")) as caught:
        read_conversations(path)
    assert ": " in str(caught.value) and str(caught.value).endswith(".")


def test_a_missing_file_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a file: give the path of a JSONL file"):
        read_conversations(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is not a file"):
        read_conversations(tmp_path)
    with pytest.raises(UserError, match="holds no conversation"):
        read_conversations(write(tmp_path / "a.jsonl", ""))
