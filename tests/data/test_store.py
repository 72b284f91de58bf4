"""A store gives back what was put in, or says in one sentence why not."""

import copy
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftsmith.console import stderr
from draftsmith.data.batches import collate
from draftsmith.data.chat import Encoded
from draftsmith.data.extract import extract
from draftsmith.data.manifest import Identity, Manifest, ShardEntry, weights_digest
from draftsmith.data.precision import DTYPES
from draftsmith.data.store import DamagedRow, Store, StoreWriter, checksum, raw
from draftsmith.data.upkeep import verify
from draftsmith.errors import UserError
from draftsmith.target import Features, Target

TAPS = (1, 2, 4)
HIDDEN = 32


def rows(*lengths: int) -> list[Encoded]:
    draw = np.random.default_rng(0)
    return [Encoded(draw.integers(0, 128, n).astype(np.int32), draw.random(n) < 0.5) for n in lengths]


EXAMPLES = rows(9, 30, 5, 14, 22, 3, 17, 40, 11, 28, 6, 19)


def online(target: Target, row: int, taps: tuple[int, ...] = TAPS) -> Features:
    return target.features(collate(EXAMPLES, [row], 0, None).ids, taps).rows(0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """A store of several shards in float32; tests that change it take a copy."""
    out = tmp_path_factory.mktemp("store") / "made"
    extract(tiny_target, EXAMPLES, TAPS, out, "float32", batch_tokens=60, shard_bytes=30_000, about={"max_length": 64})
    return out


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


def shards(place: Path) -> list[Path]:
    return sorted(place.glob("*.safetensors"))


def byte_of(path: Path, name: str, number: int) -> int:
    """Where in the file the bytes of a tensor's ``number``-th element begin."""
    blob = path.read_bytes()
    header_size = int.from_bytes(blob[:8], "little")
    tensor = json.loads(blob[8 : 8 + header_size])[name]
    begin, end = tensor["data_offsets"]
    return 8 + header_size + begin + number * (end - begin) // int(np.prod(tensor["shape"]))


def overwrite(path: Path, name: str, number: int, value: bytes) -> None:
    where = byte_of(path, name, number)
    with open(path, "r+b") as file:
        file.seek(where)
        file.write(value)


# -- what goes in comes out ------------------------------------------------------------------------------------------------


def test_every_row_comes_back(made: Path, tiny_target: Target) -> None:
    store = Store(made)
    assert len(store.shards) > 3 and len(store) == len(EXAMPLES) == len(store.examples)
    assert store.lengths.tolist() == [len(example.ids) for example in EXAMPLES] and store.lengths.dtype == np.int32
    for row, example in enumerate(EXAMPLES):
        encoded, features = store.read(row)
        for ours in (encoded, store.examples[row]):
            assert ours.ids.tolist() == example.ids.tolist() and ours.mask.tolist() == example.mask.tolist()
            assert ours.ids.dtype == np.int32 and ours.mask.dtype == np.bool_
        true = online(tiny_target, row)
        torch.testing.assert_close(features.taps, true.taps, atol=1e-5, rtol=0)
        torch.testing.assert_close(features.last, true.last, atol=1e-5, rtol=0)
    assert [len(example.ids) for example in store.examples[2:4]] == [5, 14]
    assert store.examples[-1].ids.tolist() == EXAMPLES[-1].ids.tolist()
    with pytest.raises(IndexError):
        store.examples[len(EXAMPLES)]
    with pytest.raises(IndexError):
        store.examples[-len(EXAMPLES) - 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [(4,), (2, 1), (4, 2, 1), (1, 4), ()])
def test_taps_in_any_order_are_served(tmp_path: Path, tiny_target: Target, dtype: str, taps: tuple[int, ...]) -> None:
    extract(tiny_target, EXAMPLES[:3], TAPS, tmp_path / "store", dtype)
    store = Store(tmp_path / "store")
    store.check(tiny_target, taps)
    for wanted in (torch.float32, torch.bfloat16):
        own = store.read(1, taps, wanted)[1]
        assert own.taps.shape == (30, len(taps) * HIDDEN) and own.taps.dtype == own.last.dtype == wanted
        whole = store.read(1, None, wanted)[1].taps.unflatten(-1, (3, HIDDEN))
        assert torch.equal(own.taps, whole[:, [TAPS.index(tap) for tap in taps]].flatten(-2))


def test_a_store_without_taps(tmp_path: Path, tiny_target: Target) -> None:
    extract(tiny_target, EXAMPLES, (), tmp_path / "store", "int8")
    store = Store(tmp_path / "store")
    assert store.read(7)[1].taps.shape == (40, 0) and store.read(7)[1].last.shape == (40, HIDDEN)
    assert verify(tmp_path / "store").sound
    with pytest.raises(UserError, match="holds no taps and not tap 2: extract the states again with it."):
        store.check(tiny_target, (2,))


def test_what_is_read_is_the_readers_own(made: Path) -> None:
    store = Store(made)
    encoded, features = store.read(0)
    encoded.ids[:] = 0
    features.taps.zero_()
    features.last.zero_()
    again = store.read(0)
    assert again[0].ids.any() and again[1].taps.any() and again[1].last.any()


def test_the_layout_on_disk(made: Path) -> None:
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["format"] == 1 and manifest["part"] == {"index": 0, "of": 1}
    assert manifest["about"] == {"target": "tiny", "max_length": 64}
    assert manifest["identity"]["taps"] == list(TAPS) and manifest["identity"]["dtype"] == "float32"
    assert {"fingerprint", "weights", "template", "dtype", "hidden_size", "vocab_size", "depth"} <= set(
        manifest["identity"]["target"]
    )
    supervised = sum(int(example.mask.sum()) for example in EXAMPLES)
    data = manifest["identity"]["data"]
    assert (data["rows"], data["tokens"], data["supervised_tokens"]) == (12, 204, supervised)
    assert sum(entry["rows"] for entry in manifest["shards"]) == 12
    for entry in manifest["shards"]:
        tensors = load_file(made / entry["file"])
        assert {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()} == {
            "ids": "int32", "mask": "bool", "offsets": "int64", "rows": "int64", "crc": "int64", "taps": "float32",
            "last": "float32",
        }  # fmt: skip
        assert tensors["taps"].shape == (entry["tokens"], 3 * HIDDEN) and len(tensors["offsets"]) == entry["rows"] + 1
        assert (made / entry["file"]).stat().st_size == entry["bytes"]


def test_reading_a_row_does_not_load_its_shard(tmp_path: Path, tiny_target: Target) -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux tells what is in memory")

    def mapped() -> int:
        """Bytes of files that are mapped and in memory."""
        line = next(line for line in status.read_text().splitlines() if line.startswith("RssFile"))
        return int(line.split()[1]) * 1024

    tokens = 40  # each row
    many = rows(*[tokens] * 3000)
    writer = StoreWriter(tmp_path / "store", Identity.of(tiny_target, many, TAPS, "float32"))
    for row, example in enumerate(many):
        writer.add(row, example, Features(torch.randn(tokens, 3 * HIDDEN), torch.randn(tokens, HIDDEN)))
    writer.flush()
    (shard,) = shards(tmp_path / "store")
    assert shard.stat().st_size > 50e6
    before = mapped()
    Store(tmp_path / "store", growing=True).read(1500)
    assert mapped() - before < 5e6


# -- CASE 17: what is wrong is named ---------------------------------------------------------------------------------------


def truncate(place: Path) -> None:
    file = shards(place)[1]
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size - 100)


def swap(place: Path) -> None:
    one, two = (load_file(path) for path in shards(place)[:2])
    metadata = [safe_open(path, "pt").metadata() for path in shards(place)[:2]]
    save_file(two, shards(place)[0], metadata[1])
    save_file(one, shards(place)[1], metadata[0])
    relist(place, sha256=False)


def drop_a_row(place: Path) -> None:
    """Take the last row out of a shard, and have the manifest agree."""
    file = shards(place)[0]
    metadata = safe_open(file, "pt").metadata()
    tensors = load_file(file)
    end = int(tensors["offsets"][-2])
    cut = {name: t[:end].contiguous() for name, t in tensors.items() if name not in ("offsets", "rows", "crc")}
    save_file(cut | {name: tensors[name][:-1].contiguous() for name in ("offsets", "rows", "crc")}, file, metadata)
    relist(place)


def double(place: Path) -> None:
    shutil.copy(shards(place)[0], place / "shard-00099.safetensors")
    relist(place)


def relist(place: Path, sha256: bool = True) -> None:
    """Have the manifest list the shards as they are; ``sha256`` False leaves the checksums that it had."""
    manifest = Manifest.read(place)
    old = {entry.file: entry.sha256 for entry in manifest.shards or []}
    entries = []
    for file in shards(place):
        own = safe_open(file, "pt")
        header = json.loads(own.metadata()["draftsmith"])
        offsets = own.get_tensor("offsets")
        digest = header["sha256"] if sha256 else old[file.name]
        entries.append(
            ShardEntry(file=file.name, rows=len(offsets) - 1, tokens=int(offsets[-1]), bytes=file.stat().st_size, sha256=digest)
        )
    manifest.model_copy(update={"shards": entries}).write(place)


def edit_manifest(key: str, value: Any) -> Callable[[Path], None]:
    def edit(place: Path) -> None:
        document = json.loads((place / "manifest.json").read_text())
        document[key] = value
        (place / "manifest.json").write_text(json.dumps(document))

    return edit


def empty(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


def spoil_header(place: Path) -> None:
    with open(shards(place)[2], "r+b") as file:
        file.seek(20)
        file.write(b"\0\0\0\0")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "shard-00001.safetensors has [0-9]+ of its [0-9]+ bytes: restore a copy, or extract it again."),
    "vanished": (lambda place: shards(place)[1].unlink(), "shard-00001.safetensors is missing: restore a copy"),
    "header": (spoil_header, "shard-00002.safetensors is damaged (.*): restore a copy, or extract it again."),
    "swapped": (swap, "shard-00000.safetensors (is not the file that manifest.json lists|has [0-9]+ of its)"),
    "row dropped": (drop_a_row, "store lacks 1 of its 12 rows \\(first row [0-9]+\\): extract them again."),
    "doubled": (double, "row [0-9]+ stands both in shard-00000.safetensors and in shard-00099.safetensors of .*store: "),
    "old format": (edit_manifest("format", 0), "manifest.json has format 0, and this draftsmith reads format 1: extract the"),
    "half-written": (edit_manifest("shards", None), "store is half-written: run the command that writes it again, and it will"),
    "manifest cut": (
        lambda place: (place / "manifest.json").write_text('{"format": 1,'),
        "manifest.json is damaged (.*): rest",
    ),
    "manifest wrong": (edit_manifest("identity", {}), "manifest.json is damaged (.*): restore a copy, or extract the states"),
    "manifest no object": (lambda place: (place / "manifest.json").write_text("[]"), "manifest.json is damaged (.*): restore"),
    "fresh folder": (empty, "store has no manifest.json, so it is no whole feature store: make one with draftsmith data ext"),
    "no folder": (shutil.rmtree, "store is no directory: make a feature store with draftsmith data extract."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_case_17_a_damaged_store_does_not_open(place: Path, fault: str) -> None:
    damage, sentence = FAULTS[fault]
    damage(place)
    with pytest.raises(UserError, match=sentence):
        Store(place)


def test_case_17_a_stranger_in_the_folder_is_left_alone_and_named(place: Path) -> None:
    (place / "old.ppt").write_bytes(b"slides")
    save_file({"x": torch.ones(2)}, place / "stranger.safetensors")
    assert len(Store(place)) == 12
    findings = verify(place)
    assert findings.sound and findings.strangers == ["old.ppt", "stranger.safetensors"]


NAN = np.float32("nan").tobytes()
SPOILS = {"NaN": ("taps", NAN), "a flipped bit": ("last", b"\x01"), "an id": ("ids", b"\x7e"), "the mask": ("mask", b"\x02")}


@pytest.mark.parametrize("spoil", SPOILS)
def test_case_17_a_damaged_row_is_named_and_the_others_are_read(place: Path, spoil: str) -> None:
    name, value = SPOILS[spoil]
    file = shards(place)[1]
    numbers = load_file(file)
    assert len(numbers["rows"]) > 1
    first_of_last_row = int(numbers["offsets"][-2]) * (numbers[name].shape[1] if numbers[name].ndim == 2 else 1)
    damaged = int(numbers["rows"][-1])
    overwrite(file, name, first_of_last_row, value)
    store = Store(place)
    sentence = f"^row {damaged} is damaged in .*shard-00001.safetensors: draftsmith data verify tells what else is.$"
    with pytest.raises(DamagedRow, match=sentence):
        store.read(damaged)
    for row in set(range(len(EXAMPLES))) - {damaged}:
        assert store.read(row)[1].taps.isfinite().all()
    findings = verify(place)
    assert [(entry["shard"], entry["rows"]) for entry in findings.damaged] == [("shard-00001.safetensors", [damaged])]
    assert f"the checksum of row {damaged} differs" in findings.sentence() and not findings.missing_rows


def test_verify_finds_nan_under_a_right_checksum_and_damage_outside_of_the_rows(place: Path, tiny_target: Target) -> None:
    overwrite(shards(place)[0], "crc", 0, b"\x00\x01\x02\x03")
    found = verify(place).damaged
    assert [entry["shard"] for entry in found] == ["shard-00000.safetensors"] and len(found[0]["rows"]) == 1
    file = shards(place)[1]
    metadata, tensors = safe_open(file, "pt").metadata(), load_file(file)
    tensors["last"][0, 0] = torch.nan
    span = slice(int(tensors["offsets"][0]), int(tensors["offsets"][1]))
    tensors["crc"][0] = checksum({name: tensors[name][span] for name in ("ids", "mask", "taps", "last")})
    save_file(tensors, file, metadata)
    words = verify(place).damaged[1]["why"]
    assert words == f"row {int(tensors['rows'][0])} holds NaN or infinity, its checksum differs, outside of the rows"


def test_verify_names_every_damaged_shard(place: Path) -> None:
    total = len(shards(place))
    truncate(place)
    shards(place)[2].unlink()
    findings = verify(place)
    assert [entry["shard"] for entry in findings.damaged] == ["shard-00001.safetensors", "shard-00002.safetensors"]
    assert "bytes" in findings.damaged[0]["why"] and "is missing" in findings.damaged[1]["why"]
    assert findings.missing_rows and findings.rows + len(findings.missing_rows) == 12 and findings.shards == total


# -- whose states ----------------------------------------------------------------------------------------------------------


def other_template(target: Target, make_tokenizer: Callable[..., Any]) -> Target:
    return Target(target.model, make_tokenizer("generation"), "other")


def other_weights(target: Target, _: Any) -> Target:
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight.mul_(1.01)
    return Target(model, target.tokenizer, "tuned")


def other_sizes(target: Target, _: Any) -> Target:
    config = copy.deepcopy(target.config)
    config.hidden_size, config.vocab_size = 64, 256
    return Target(type(target.model)(config).float(), target.tokenizer, "wide")


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        (other_template, "template [0-9a-f]{16} there and [0-9a-f]{16} here; fingerprint"),
        (other_weights, r"\(weights [0-9a-f]{16} there and [0-9a-f]{16} here\)"),
        (other_sizes, "hidden size 32 there and 64 here; vocab size 128 there and 256 here"),
    ],
)
def test_another_targets_store_is_refused(
    made: Path, tiny_target: Target, tiny_tokenizer_factory: Callable[..., Any], other: Callable[..., Target], differ: str
) -> None:
    given = other(tiny_target, tiny_tokenizer_factory)
    with pytest.raises(UserError, match=f"made holds states of tiny, which is not {given.name} as it is here .*{differ}"):
        Store(made).check(given, TAPS)


def test_the_same_target_in_another_dtype_is_no_other_target(made: Path, tiny_target: Target) -> None:
    half = Target(copy.deepcopy(tiny_target.model).to(torch.bfloat16), tiny_target.tokenizer, "tiny")
    assert weights_digest(half) != weights_digest(tiny_target)
    Store(made).check(half, TAPS)


def test_missing_taps_are_named(made: Path, tiny_target: Target) -> None:
    with pytest.raises(UserError, match="made holds taps 1,2,4 and not tap 3: extract the states again with it."):
        Store(made).check(tiny_target, (1, 3))
    with pytest.raises(UserError, match="made holds taps 1,2,4 and not tap 0"):
        Store(made).read(0, (0,))


# -- growing ---------------------------------------------------------------------------------------------------------------


def test_a_growing_store_takes_rows_from_several_writers(tmp_path: Path, tiny_target: Target) -> None:
    place, identity = tmp_path / "grown", Identity.of(tiny_target, EXAMPLES, TAPS, "bfloat16")
    writers = [StoreWriter(place, identity, shard_bytes=20_000, name=f"rank{rank}") for rank in range(2)]
    store = Store(place, growing=True)
    assert len(store) == 0 and 3 not in store
    for row in range(10):
        writers[row % 2].add(row, EXAMPLES[row], online(tiny_target, row))
    store.refresh()
    early = len(store)
    assert 0 < early < 10  # some shards were full, the rest waits
    for writer in writers:
        writer.flush()
        writer.flush()  # nothing waits: nothing is written
    store.refresh()
    assert len(store) == 10 and 9 in store and 11 not in store
    with pytest.raises(KeyError):
        store.read(11)
    late = StoreWriter(place, identity, name="rank0")  # the same name after a restart; row 3 comes a second time
    for row in (3, 10, 11):
        late.add(row, EXAMPLES[row], online(tiny_target, row))
    late.flush()
    store.refresh()
    assert len(store) == len(Store(place, growing=True)) == 12
    for row in range(12):
        torch.testing.assert_close(store.read(row)[1].last, online(tiny_target, row).last, atol=0.02, rtol=0)
    findings = verify(place)
    assert findings.sound and findings.growing and findings.rows == 12
    with pytest.raises(UserError, match="grown is half-written"):
        Store(place)


def test_a_growing_store_leaves_out_what_is_damaged(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    monkeypatch.setattr(stderr, "_file", said)
    place = tmp_path / "grown"
    writer = StoreWriter(place, Identity.of(tiny_target, EXAMPLES, TAPS, "bfloat16"), shard_bytes=1)
    for row in range(3):
        writer.add(row, EXAMPLES[row], online(tiny_target, row))
    save_file({"x": torch.ones(2)}, place / "stranger.safetensors")
    truncate(place)
    store = Store(place, growing=True)
    store.refresh()
    assert [row for row in range(12) if row in store] == [0, 2]
    first, second = said.getvalue().splitlines()  # each named once
    assert "left out: " in first and "shard-00001.safetensors is damaged" in first
    assert "stranger.safetensors is no shard of this store: move it away" in second


def test_a_writer_refuses_a_store_of_other_states_and_a_folder_of_other_things(tmp_path: Path, tiny_target: Target) -> None:
    identity = Identity.of(tiny_target, EXAMPLES, TAPS, "bfloat16")
    StoreWriter(tmp_path / "store", identity)
    StoreWriter(tmp_path / "store", identity)
    with pytest.raises(UserError, match=r"store is a store of other states \(dtype bfloat16 there and int8 here\): choose"):
        StoreWriter(tmp_path / "store", Identity.of(tiny_target, EXAMPLES, TAPS, "int8"))
    with pytest.raises(UserError, match="other states .*examples [0-9a-f]{8}… there and [0-9a-f]{8}… here"):
        StoreWriter(tmp_path / "store", Identity.of(tiny_target, EXAMPLES[::-1], TAPS, "bfloat16"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="home holds letter.txt and no store: choose an empty or a new directory."):
        StoreWriter(tmp_path / "home", identity)


def test_what_a_store_cannot_be_of(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="tap 5 is outside the target"):
        Identity.of(tiny_target, EXAMPLES, (1, 5), "int8")
    with pytest.raises(UserError, match="dtype 'int4' is none that a store keeps: choose float32, bfloat16, float16, int8."):
        Identity.of(tiny_target, EXAMPLES, TAPS, "int4")


@pytest.mark.parametrize(
    "tensor", [torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(0, 2), torch.ones(4, 4).T, torch.ones(2) > 0]
)
def test_raw_is_every_byte(tensor: torch.Tensor) -> None:
    assert raw(tensor).nbytes == len(raw(tensor)) == tensor.nbytes
