"""An extraction writes every row once, whatever interrupts it, and says before it starts what it needs."""

import copy
import fcntl
import hashlib
import io
import json
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import killing
import numpy as np
import pytest
import torch
from faults_extract import ROWS, contents, killed_extraction
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.cli import main
from draftsmith.console import stderr
from draftsmith.data.chat import Encoded
from draftsmith.data.extract import CHUNK_ROWS, UNITS, batches, extract, plan
from draftsmith.data.manifest import Identity, Manifest, Part
from draftsmith.data.store import Store
from draftsmith.data.upkeep import merge, verify
from draftsmith.errors import UserError
from draftsmith.target import Target

TAPS = (1, 2, 4)
HIDDEN = 32


def rows(*lengths: int) -> list[Encoded]:
    draw = np.random.default_rng(0)
    return [Encoded(draw.integers(0, 128, n).astype(np.int32), draw.random(n) < 0.5) for n in lengths]


EXAMPLES = rows(*np.random.default_rng(1).integers(3, 60, 40).tolist())
SMALL: dict[str, Any] = {"batch_tokens": 120, "shard_bytes": 60_000}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is noted on stderr."""
    written = io.StringIO()
    monkeypatch.setattr(stderr, "_file", written)
    return written


@pytest.fixture
def computed(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lines of every batch that the target runs."""
    seen: list[int] = []
    features = tiny_target.features

    def counted(ids: Any, *rest: Any) -> Any:
        seen.append(len(ids))
        return features(ids, *rest)

    monkeypatch.setattr(tiny_target, "features", counted)
    return seen


class Stop(Exception):
    pass


def stop_after(tokens: int) -> Callable[[int], None]:
    """A progress callback that ends the run."""
    left = [tokens]

    def progress(done: int) -> None:
        left[0] -= done
        if left[0] < 0:
            raise Stop

    return progress


# -- the plan --------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=300),
    st.integers(1, 4),
    st.integers(1, 300_000),
    st.integers(1, 2_000),
)
def test_every_row_is_planned_once(tiny_target: Target, lengths: list[int], of: int, shard_bytes: int, tokens: int) -> None:
    of = min(of, len(lengths))
    identity = Identity.of(tiny_target, [], TAPS, "int8")
    planned = [
        plan(np.array(lengths), Manifest(identity=identity, part=Part(index=index, of=of), shard_bytes=shard_bytes))
        for index in range(of)
    ]
    assert sorted(np.concatenate([shard for part in planned for shard in part])) == list(range(len(lengths)))
    assert [len(np.concatenate(part)) for part in planned] == [len(range(index, len(lengths), of)) for index in range(of)]
    for shard in (shard for part in planned for shard in part):
        assert len(shard)
        cut = list(batches(shard, np.array(lengths), tokens))
        assert [row for batch in cut for row in batch] == shard.tolist()
        assert all(len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= tokens for batch in cut)


def test_shards_are_about_as_large_as_asked_and_batches_have_little_padding(tiny_target: Target) -> None:
    lengths = np.random.default_rng(0).integers(10, 500, 2 * CHUNK_ROWS)
    identity = Identity.of(tiny_target, [], TAPS, "int8")
    planned = plan(lengths, Manifest(identity=identity, shard_bytes=2_000_000))
    sizes = np.array([lengths[shard].sum() * identity.bytes_per_token for shard in planned])
    assert (sizes < 2_100_000).all() and (sizes[:-1] > 1_900_000).all()
    padded = sum(len(b) * lengths[b].max() for shard in planned for b in batches(shard, lengths, 8192))
    assert lengths.sum() / padded > 0.97


# -- interrupted -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    assert killed_extraction(tmp_path, kills=10, seed=3) == {
        "kills": 10, "rows": ROWS, "rows_lost": 0, "rows_doubled": 0, "sound": True, "bytes_equal": True,
    }  # fmt: skip


def test_an_interrupted_extraction_goes_on(tmp_path: Path, tiny_target: Target, computed: list[int]) -> None:
    extract(tiny_target, EXAMPLES, TAPS, tmp_path / "calm", "bfloat16", **SMALL)
    everything = sum(computed)
    assert everything == len(EXAMPLES)
    out, half = tmp_path / "out", sum(len(example.ids) for example in EXAMPLES) // 2
    with pytest.raises(Stop):
        extract(tiny_target, EXAMPLES, TAPS, out, "bfloat16", progress=stop_after(half), **SMALL)
    assert not out.exists() and (tmp_path / ".out.partial").is_dir()
    with pytest.raises(UserError, match="partial is half-written: run the command that writes it again"):
        Store(tmp_path / ".out.partial")
    (tmp_path / ".out.partial" / ".shard-00030.safetensors.partial").write_bytes(b"cut by a kill")
    computed.clear()
    progress: list[int] = []
    report = extract(tiny_target, EXAMPLES, TAPS, out, "bfloat16", progress=progress.append, **SMALL)
    assert 0 < report["shards_kept"] < report["shards"]
    assert 0 < sum(computed) < 0.7 * everything  # what was whole was not computed again
    assert sum(progress) == report["tokens"] == sum(len(example.ids) for example in EXAMPLES)
    assert contents(out) == contents(tmp_path / "calm")
    assert {path.name for path in tmp_path.iterdir()} == {"calm", "out"}


def test_a_kill_while_it_clears_up_costs_nothing(tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    run = partial(extract, tiny_target, EXAMPLES, TAPS, tmp_path / "out", "bfloat16", **SMALL)
    with pytest.raises(Stop):
        run(progress=stop_after(600))
    whole = len(list(tmp_path.rglob("shard-*.safetensors")))
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Manifest, "write", lambda *_: stop_after(0)(1))
        run()
    assert run()["shards_kept"] == whole > 0


def test_an_unreadable_rest_is_discarded_by_force_alone(tmp_path: Path, tiny_target: Target) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "manifest.json").write_text('{"format": 0}')
    with pytest.raises(UserError, match="manifest.json has format 0, and this draftsmith reads format 1"):
        extract(tiny_target, EXAMPLES, TAPS, tmp_path / "out", "bfloat16")
    assert extract(tiny_target, EXAMPLES, TAPS, tmp_path / "out", "bfloat16", force=True)["rows"] == 40


def test_a_damaged_store_is_mended_by_the_same_command(tmp_path: Path, tiny_target: Target, computed: list[int]) -> None:
    out = tmp_path / "out"
    extract(tiny_target, EXAMPLES, TAPS, out, "bfloat16", **SMALL)
    before = contents(out)
    file = sorted(out.glob("*.safetensors"))[1]
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size - 1)
    with pytest.raises(UserError, match="shard-00001"):
        Store(out)
    out.rename(tmp_path / ".out.partial")
    computed.clear()
    report = extract(tiny_target, EXAMPLES, TAPS, out, "bfloat16", **SMALL)
    assert report["shards_kept"] == report["shards"] - 1 and sum(computed) < len(EXAMPLES) / 2
    assert contents(out) == before


def test_another_extraction_does_not_go_on_with_the_rest_of_this_one(tmp_path: Path, tiny_target: Target) -> None:
    out, half = tmp_path / "out", 500
    run = partial(extract, tiny_target, out=out, **SMALL)
    with pytest.raises(Stop):
        run(EXAMPLES, TAPS, dtype="bfloat16", progress=stop_after(half))
    before = contents(tmp_path / ".out.partial")
    others: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "int8"}, "dtype bfloat16 there and int8 here"),
        ({"taps": (1, 2)}, "taps 1,2,4 there and 1,2 here"),
        ({"examples": EXAMPLES[1:]}, "rows 40 there and 39 here"),
        ({"part": Part(index=0, of=2)}, "of 1 there and 2 here"),
        ({"shard_bytes": 70_000}, "shard bytes 60000 there and 70000 here"),
    ]
    for other, differ in others:
        sentence = f"out.partial holds an unfinished extraction of other states .*{differ}.*: run that one to its end, choose"
        with pytest.raises(UserError, match=sentence):
            run(**{"examples": EXAMPLES, "taps": TAPS, "dtype": "bfloat16", **other})
    assert contents(tmp_path / ".out.partial") == before
    report = run(EXAMPLES, TAPS, dtype="int8", force=True)
    assert report["shards_kept"] == 0 and Store(out).identity.dtype == "int8"


def test_what_exists_is_replaced_by_force_alone(tmp_path: Path, tiny_target: Target, computed: list[int]) -> None:
    out = tmp_path / "out"
    extract(tiny_target, EXAMPLES, TAPS, out, "float32")
    before, runs = contents(out), len(computed)
    with pytest.raises(UserError, match="out exists: choose another output, or pass --force to replace it."):
        extract(tiny_target, EXAMPLES, TAPS, out, "int8")
    assert contents(out) == before and len(computed) == runs
    extract(tiny_target, EXAMPLES, TAPS, out, "int8", force=True)
    assert Store(out).identity.dtype == "int8" and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_processes_do_not_write_one_store(tmp_path: Path, tiny_target: Target) -> None:
    out = tmp_path / "out"
    with open(tmp_path / ".out.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is writing .*out: wait for it, or choose another output."):
            extract(tiny_target, EXAMPLES, TAPS, out, "float32")
    assert extract(tiny_target, EXAMPLES, TAPS, out, "float32")["rows"] == 40  # the lock of one that died holds nobody


# -- what it needs ---------------------------------------------------------------------------------------------------------

Disk = namedtuple("Disk", "total used free")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_case_17_the_estimate_is_what_the_store_takes(
    tmp_path: Path, tiny_target: Target, said: io.StringIO, dtype: str
) -> None:
    report = extract(tiny_target, rows(*[60] * 400), TAPS, tmp_path / "out", dtype)
    number, unit = said.getvalue().split(" takes ")[1].split(";")[0].split()
    estimate = float(number) * UNITS[unit]
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert estimate == pytest.approx(size, rel=0.05)
    per_number = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1 + 2 / 32}[dtype]
    assert report["bytes"] == pytest.approx((len(TAPS) + 1) * HIDDEN * per_number * report["tokens"], rel=0.05)


def test_case_17_a_disk_that_is_too_small_is_told_before_the_first_byte(
    tmp_path: Path, tiny_target: Target, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(10**9, 10**9 - 1024, 1024))
    sentence = r"out needs 633 kB and its disk has 1.02 kB free: make room, choose dtype int8 or fewer taps, or spread the"
    with pytest.raises(UserError, match=sentence):
        extract(tiny_target, EXAMPLES, TAPS, tmp_path / "out", "float32")
    assert not list(tmp_path.iterdir()) and not computed


def test_what_is_written_already_needs_no_room(
    tmp_path: Path, tiny_target: Target, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = extract(tiny_target, EXAMPLES, TAPS, tmp_path / "calm", "float32", **SMALL)["bytes"]
    with pytest.raises(Stop):
        extract(tiny_target, EXAMPLES, TAPS, tmp_path / "out", "float32", progress=stop_after(600), **SMALL)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(10**9, 10**9, total * 2 // 3))
    extract(tiny_target, EXAMPLES, TAPS, tmp_path / "out", "float32", **SMALL)
    assert "of them written before" in said.getvalue().splitlines()[-1]


def with_norm(target: Target, value: float) -> Target:
    """A target whose last states are all ``value`` times as large."""
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        model.model.norm.weight.mul_(value)
    return Target(model, target.tokenizer, "spoiled")


def test_states_that_no_store_may_hold_stop_it_with_the_row(tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(UserError, match="^row [0-9]+ holds NaN or infinity: load the target in bfloat16 or float32, or leave"):
        extract(with_norm(tiny_target, torch.nan), EXAMPLES, TAPS, tmp_path / "nan", "bfloat16", **SMALL)
    massive = with_norm(tiny_target, 1e5)
    with pytest.raises(UserError, match="^row [0-9]+ reaches [0-9]+, and float16 ends at 65504: use bfloat16.$"):
        extract(massive, EXAMPLES, TAPS, tmp_path / "float16", "float16", **SMALL)
    assert {path.name for path in tmp_path.iterdir()} == {".nan.partial", ".float16.partial"}
    assert not list(tmp_path.rglob("*.safetensors"))  # no shard that leaves a row out
    for dtype in ("bfloat16", "int8"):
        extract(massive, EXAMPLES, TAPS, tmp_path / dtype, dtype)
        last = torch.cat([Store(tmp_path / dtype).read(row)[1].last for row in range(40)])
        assert last.isfinite().all() and last.abs().max() > 1e5


def test_what_cannot_be_extracted(tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(
        UserError, match="a conversation of 65 tokens is longer than the 64 positions of 'tiny': set max_length"
    ):
        extract(tiny_target, rows(65), TAPS, tmp_path / "out", "int8")
    with pytest.raises(UserError, match="taps \\[2, 1\\] must be distinct and rising"):
        extract(tiny_target, EXAMPLES, (2, 1), tmp_path / "out", "int8")
    with pytest.raises(UserError, match="part 3 of 4 has no rows, for there are only 2: use fewer parts."):
        extract(tiny_target, rows(5, 6), TAPS, tmp_path / "out", "int8", Part(index=3, of=4))
    assert not list(tmp_path.glob("*"))


# -- parts -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> list[Path]:
    """Three parts of one extraction."""
    place = tmp_path_factory.mktemp("parts")
    outs = [place / f"part{index}" for index in range(3)]
    for index, out in enumerate(outs):
        extract(tiny_target, EXAMPLES, TAPS, out, "float32", Part(index=index, of=3), **SMALL)
    return outs


def test_parts_join_into_the_whole(tmp_path: Path, tiny_target: Target, parts: list[Path]) -> None:
    with pytest.raises(UserError, match="part1 is part 1 of 3: join the parts with draftsmith data merge."):
        Store(parts[1]).check(tiny_target, TAPS)
    assert [row for row in range(40) if row in Store(parts[1])] == list(range(1, 40, 3))
    merge([parts[2], parts[0], parts[1]], tmp_path / "joined")
    extract(tiny_target, EXAMPLES, TAPS, tmp_path / "whole", "float32", **SMALL)
    joined, whole = Store(tmp_path / "joined"), Store(tmp_path / "whole")
    joined.check(tiny_target, TAPS)
    assert joined.identity == whole.identity and len(joined) == 40
    for row, example in enumerate(EXAMPLES):
        encoded, features = joined.read(row)
        assert encoded.ids.tolist() == example.ids.tolist()
        torch.testing.assert_close(features.taps, whole.read(row)[1].taps, atol=1e-5, rtol=0)
    assert verify(tmp_path / "joined").sound
    one = next((tmp_path / "joined").glob("*.safetensors"))
    assert one.stat().st_nlink == 2  # nothing was copied
    with pytest.raises(UserError, match="joined exists"):
        merge(parts, tmp_path / "joined")


def test_parts_that_do_not_fit_together(tmp_path: Path, tiny_target: Target, parts: list[Path]) -> None:
    others = {
        "int8": partial(extract, tiny_target, EXAMPLES, TAPS, dtype="int8", part=Part(index=1, of=3)),
        "fifth": partial(extract, tiny_target, EXAMPLES, TAPS, dtype="float32", part=Part(index=1, of=5)),
    }
    for name, make in others.items():
        make(out=tmp_path / name)
    damaged = Path(shutil.copytree(parts[1], tmp_path / "damaged"))
    (damaged / "shard-00000.safetensors").unlink()
    refused = {
        "part 1 of 3 is missing \\(2 are given\\): give the directory of every part.": [parts[0], parts[2]],
        "part0 and .*part0 are both part 0: give each part once.": [parts[0], parts[1], parts[0]],
        "part0 and .*int8 hold different states \\(dtype float32 there and int8 here\\): join": [parts[0], tmp_path / "int8"],
        "part0 is one of 3 parts and .*fifth one of 5: join parts of one extraction.": [parts[0], tmp_path / "fifth"],
        "damaged/shard-00000.safetensors is missing: restore a copy": [parts[0], damaged, parts[2]],
    }
    for sentence, stores in refused.items():
        with pytest.raises(UserError, match=sentence):
            merge(stores, tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


# -- the command line ------------------------------------------------------------------------------------------------------


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["draftsmith", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target, tiny_tokenizer_factory: Callable[..., Any]) -> Path:
    """A folder with a target and a file of conversations."""
    place = tmp_path_factory.mktemp("cli")
    tiny_target.model.save_pretrained(place / "target")
    tiny_tokenizer_factory().save_pretrained(place / "target")
    lines = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "so " * n}]}
        for n in range(1, 9)
    ]
    (place / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def test_extract_merge_and_verify_from_the_command_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = partial(command, capsys, monkeypatch, "data")
    base = ("extract", data / "talk.jsonl", "--target", data / "target", "--taps", "1,3", "--max-length", 60, "--dtype", "int8")
    for index in range(2):
        code, out, err = run(*base, "--out", tmp_path / f"p{index}", "--num-shards", 2, "--shard", index, "--json")
        assert code == 0, err
        document = json.loads(out)
        assert document["rows"] == 4 and document["data"]["rows"]["kept"] == 8 and document["bytes"] > 0
    code, out, err = run("merge", tmp_path / "p0", tmp_path / "p1", "--out", tmp_path / "store", "--json")
    assert code == 0 and json.loads(out)["rows"] == 8, err
    code, out, err = run("verify", tmp_path / "store")
    assert code == 0 and out.startswith("8 rows in 2 shards are sound: "), err
    assert Store(tmp_path / "store").identity.taps == (1, 3)
    digest = hashlib.sha256((data / "talk.jsonl").read_bytes()).hexdigest()
    assert Store(tmp_path / "store").manifest.about["files"] == [{"path": str(data / "talk.jsonl"), "sha256": digest}]
    code, _, err = run(*base, "--out", tmp_path / "store")
    assert code == 2 and err.endswith("store exists: choose another output, or pass --force to replace it.\n")

    next((tmp_path / "store").glob("*.safetensors")).unlink()
    code, out, err = run("verify", tmp_path / "store", "--json")
    document = json.loads(out)
    assert code == 2 and not document["sound"] and len(document["damaged"]) == 1 and len(document["missing_rows"]) == 4
    assert err.startswith("error: ") and "store is damaged (" in err and err.count("\n") == 1


def test_the_default_taps_are_the_head_kinds(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ("data", "extract", data / "talk.jsonl", "--target", data / "target", "--max-length", 60)
    for kind, taps in (("eagle3", (2, 3, 4)), ("medusa", ())):
        code, _, err = command(capsys, monkeypatch, *base, "--head", kind, "--out", tmp_path / kind)
        assert code == 0, err
        assert Store(tmp_path / kind).identity.taps == taps


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--shard", "2", "--num-shards", "2"), "error: --shard 2 is none of 2: give 0 to 1, or raise --num-shards."),
        (("--head", "eagle9"), "error: --head 'eagle9' is no head kind: choose dflash, draft_model, eagle, eagle3, hydra"),
        (("--taps", "1;2"), "error: --taps '1;2' is no list of layers: write numbers with commas, such as 2,15,27."),
        (("--taps", "1,9"), "error: tap 9 is outside the target"),
        (("--dtype", "int4"), "error: dtype 'int4' is none that a store keeps: choose float32"),
    ],
)
def test_mistakes_on_the_command_line(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    sentence: str,
) -> None:
    base = ("data", "extract", data / "talk.jsonl", "--target", data / "target", "--max-length", 60, "--out", tmp_path / "out")
    code, _, err = command(capsys, monkeypatch, *base, *flags)
    assert code == 2 and sentence in err and not (tmp_path / "out").exists()


def test_the_kill_loop_counts_its_hits_and_tells_a_failure() -> None:
    assert killing.kill_until_done(partial(sleep, 0), kills=3, seed=0, longest=20) == 0
    with pytest.raises(RuntimeError, match="the job ended with status 1"):
        killing.kill_until_done(partial(sleep, -1), kills=3, seed=0, longest=20)
