"""A journal after kills: what it holds, what it refuses, and that nothing is in it twice."""

from pathlib import Path

import pytest

from draftsmith.data.journal import Journal
from draftsmith.errors import UserError

HEADER = {"writer": {"model": "m"}, "settings": {"temperatures": (0.0, 1.0), "seed": 0}}


def entry(index: int) -> dict:
    return {"index": index, "row": {"text": f"é {index}"}}


def filled(path: Path, *indices: int) -> None:
    with Journal.opened(path, HEADER, False) as journal:
        journal.append([entry(index) for index in indices])


def indices(path: Path, in_order: bool = True) -> list[int]:
    with Journal.opened(path, HEADER, False) as journal:
        return [each["index"] for each in journal.entries(in_order)]


def test_entries_are_found_again_in_either_order(tmp_path: Path):
    filled(tmp_path / "j", 2, 0)
    filled(tmp_path / "j", 1)
    assert indices(tmp_path / "j") == [0, 1, 2] and indices(tmp_path / "j", False) == [2, 0, 1]


def test_a_file_cut_anywhere_is_read_up_to_there_and_goes_on(tmp_path: Path):
    filled(tmp_path / "whole", 0, 1)
    data = (tmp_path / "whole").read_bytes()
    lines = data.splitlines(keepends=True)
    for length in range(len(data) + 1):
        path = tmp_path / "cut"
        path.write_bytes(data[:length])
        have = [i for i in (0, 1) if length >= sum(map(len, lines[: i + 2]))]
        with Journal.opened(path, HEADER, False) as journal:
            assert [each["index"] for each in journal.entries()] == have
            journal.append([entry(i) for i in (0, 1) if i not in have])
        assert path.read_bytes() == data


def test_other_settings_are_named_and_only_force_lets_them_go(tmp_path: Path):
    path = tmp_path / "j"
    filled(path, 0)
    other = {"writer": {"model": "m"}, "settings": {"temperatures": [0.0], "seed": 1}}
    said = r"settings.seed was 0 and is 1; settings.temperatures was \[0.0, 1.0\]"
    with pytest.raises(UserError, match=said), Journal.opened(path, other, False):
        pass
    assert indices(path) == [0]
    with Journal.opened(path, HEADER, True) as journal:  # the same settings: forcing does not undo what is done
        assert list(journal.places) == [0]
    with Journal.opened(path, other, True) as journal:
        assert not journal.places


def test_one_process_at_a_time(tmp_path: Path):
    with (
        Journal.opened(tmp_path / "j", HEADER, False),
        pytest.raises(UserError, match="is being written by another process"),
        Journal.opened(tmp_path / "j", HEADER, True),
    ):
        pass
    filled(tmp_path / "j", 0)


def test_damage_in_the_middle_is_named(tmp_path: Path):
    filled(tmp_path / "j", 0, 1)
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    (tmp_path / "j").write_bytes(lines[0] + b'{"ind\x00\n' + lines[2])
    with pytest.raises(UserError, match="j, line 2 is damaged"):
        indices(tmp_path / "j")


def test_an_index_cannot_come_out_twice(tmp_path: Path):
    filled(tmp_path / "j", 0)
    with pytest.raises(AssertionError, match="twice"):
        filled(tmp_path / "j", 0)
