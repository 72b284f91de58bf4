"""Hidden-state files of other tools: into a store and out again, and what does not fit is refused."""

import fcntl
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from families import FAMILIES, build, saved
from safetensors.torch import load_file, save_file

from draftsmith.cli import app
from draftsmith.data.chat import Encoded
from draftsmith.data.extract import extract
from draftsmith.data.hidden_states import IDS, SCALES, STATES, NoStates, load, lock_of, save
from draftsmith.data.interchange import FOLDER, export, file_of
from draftsmith.data.store import Store
from draftsmith.errors import UserError
from draftsmith.target import Target

LAYERS, ROWS = (1, 2, 4), 7


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Gemma: its norm has an offset, its logits a cap."""
    return str(saved(build(FAMILIES["gemma2"]), tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="module")
def target(directory: str) -> Target:
    return Target.load(directory)


@pytest.fixture
def prepared(target: Target, tmp_path: Path) -> Path:
    """What speculators leaves: its data set, and a file of the library's own hidden states for every row, the last before the
    norm."""
    draw, table = np.random.default_rng(0), []
    (tmp_path / "prepared" / FOLDER).mkdir(parents=True)
    for row in range(ROWS):
        ids = torch.tensor(draw.integers(3, 90, int(draw.integers(5, 14))))
        states = target.features(ids[None], LAYERS).taps[0].unflatten(-1, (len(LAYERS), -1))
        save_file({IDS: ids, STATES: states.contiguous()}, file_of(tmp_path / "prepared" / FOLDER, row))
        mask = [int(i > 2) for i in range(len(ids))]
        table.append({"input_ids": ids.tolist(), "loss_mask": mask, "seq_len": len(ids)})
    datasets.Dataset.from_list(table).save_to_disk(str(tmp_path / "prepared"))
    return tmp_path / "prepared"


def run(*line: object) -> None:
    app(list(map(str, line)), standalone_mode=False)


def bring_in(prepared: Path, directory: str, *more: object, layers: str = "1,2,4") -> None:
    out = prepared.parent / "store"
    run("data", "import", prepared, "--target", directory, "--layers", layers, "--out", out, "--dtype", "float32", *more)


def test_a_store_from_files_is_the_one_that_the_target_writes(prepared: Path, directory: str, target: Target) -> None:
    bring_in(prepared, directory)
    table = datasets.load_from_disk(str(prepared))
    examples = [Encoded(np.array(row["input_ids"], np.int32), np.array(row["loss_mask"], bool)) for row in table]  # type: ignore
    extract(target, examples, (1, 2), prepared.parent / "own", "float32")
    store, own = Store(prepared.parent / "store"), Store(prepared.parent / "own")
    assert store.identity.data == own.identity.data
    store.check(target, (1, 2))
    for row in range(ROWS):
        (one, ours), (other, theirs) = store.read(row), own.read(row)
        assert one.ids.tolist() == other.ids.tolist() and one.mask.tolist() == other.mask.tolist()
        torch.testing.assert_close(ours.taps, theirs.taps, rtol=0, atol=1e-4)
        torch.testing.assert_close(ours.last, theirs.last, rtol=0, atol=1e-4)


def test_files_come_out_as_they_went_in(prepared: Path, directory: str) -> None:
    bring_in(prepared, directory, "--taps", "1,2,4")
    back = prepared.parent / "back"
    run("data", "export", prepared.parent / "store", "--out", back)
    for row in range(ROWS):
        one, other = (load_file(file_of(folder / FOLDER, row)) for folder in (back, prepared))
        assert one[IDS].dtype == torch.int64 and one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert datasets.load_from_disk(str(back)).to_list() == datasets.load_from_disk(str(prepared)).to_list()  # type: ignore
    assert not [file.name for file in back.iterdir() if file.name.startswith(".")]


def test_a_store_without_the_state_before_the_norm_is_not_written(prepared: Path, directory: str) -> None:
    bring_in(prepared, directory)
    with pytest.raises(UserError, match="--taps 1,2,4"):
        export(prepared.parent / "store", prepared.parent / "back")
    assert not (prepared.parent / "back").exists()


def test_rows_without_their_own_states_are_left_out_and_counted(
    prepared: Path, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file_of(prepared / FOLDER, 2).unlink()
    spoil(prepared, 4, lambda held: held[IDS].add_(1))
    with pytest.raises(UserError, match="row 2 .*no file"):
        bring_in(prepared, directory, "--strict")
    bring_in(prepared, directory, "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["left_out"] == {"no file": 1, "a file of other tokens": 1} and told["rows"] == ROWS - 2
    table = datasets.load_from_disk(str(prepared)).to_list()  # type: ignore[union-attr]
    kept = [Store(prepared.parent / "store").example(row).ids.tolist() for row in range(ROWS - 2)]
    assert kept == [row["input_ids"] for i, row in enumerate(table) if i not in (2, 4)]


def spoil(prepared: Path, row: int, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    held = load_file(file_of(prepared / FOLDER, row))
    change(held)
    save_file(held, file_of(prepared / FOLDER, row))


@pytest.mark.parametrize(
    "change, layers, more, said",
    [
        (None, "1,2", (), "--layers ends with 2"),
        (None, "2,4", (), "holds 3 layers of 32 numbers, and 2 of 32 are named"),
        (None, "1,2,9", (), "tap 9 is outside the target"),
        (None, "1,2,4", ("--taps", "3"), "tap 3 is none of the layers"),
        (lambda t: t.update({STATES: t[STATES][..., :8].clone()}), "1,2,4", (), "3 layers of 8 numbers"),
        (lambda t: t[STATES][0].fill_(float("nan")), "1,2,4", (), "row 1 holds NaN"),
        (lambda t: t.update({STATES: t[STATES][:2].clone()}), "1,2,4", (), "holds hidden_states of shape"),
        (lambda t: t.pop(STATES), "1,2,4", (), "has no hidden_states"),
        (lambda t: t.update({STATES: t[STATES].to(torch.float8_e4m3fn)}), "1,2,4", (), "without hidden_states_scales"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Any, layers: str, more: tuple[str, ...], said: str, prepared: Path, directory: str
) -> None:
    if change:
        spoil(prepared, 1, change)
    with pytest.raises(UserError, match=said):
        bring_in(prepared, directory, *more, layers=layers)
    assert not (prepared.parent / "store").exists()


def test_damaged_files_and_folders_of_another_kind_are_named(prepared: Path, directory: str) -> None:
    file = file_of(prepared / FOLDER, 3)
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(UserError, match="hs_3.safetensors is damaged"):
        bring_in(prepared, directory)
    with pytest.raises(UserError, match="is no prepared data set"):
        bring_in(prepared.parent, directory)
    with pytest.raises(UserError, match="has states of none of the 7 rows"):
        bring_in(prepared, directory, "--files", prepared.parent)


def test_float8_states_come_with_their_scales(tmp_path: Path) -> None:
    """As hs-connectors writes them: one scale a token, its largest number over 448."""
    states, ids = torch.randn(6, 3, 32) * torch.logspace(-2, 2, 6)[:, None, None], torch.arange(6)
    scales = states.abs().amax((1, 2), keepdim=True) / 448
    save_file({IDS: ids, STATES: (states / scales).to(torch.float8_e4m3fn), SCALES: scales}, tmp_path / "hs_0.safetensors")
    own, read = load(tmp_path / "hs_0.safetensors")
    assert own.tolist() == ids.tolist() and read.dtype == torch.bfloat16
    assert (
        (read.float() - states).abs() <= states.abs() / 14 + scales * 2**-9
    ).all()  # three bits of a number, and half a step


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "hs_0.safetensors"
    with lock_of(path).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path.write_bytes(b"half")
        with pytest.raises(NoStates, match="still being written"):
            load(path, locked=0.05)

        def finish() -> None:
            time.sleep(0.1)
            save(path, torch.arange(4), torch.ones(4, 2, 8))
            fcntl.flock(lock, fcntl.LOCK_UN)

        writer = threading.Thread(target=finish)
        writer.start()
        assert load(path, locked=30)[1].shape == (4, 2, 8)
        writer.join()
