"""Hidden states from an engine: the target's own, few at a time, and every fault told."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extracting import extracting
from families import FAMILIES, build, saved
from serving import Reply

from draftsmith.data.chat import Encoded
from draftsmith.data.engine import Engine, EngineStates
from draftsmith.data.extract import extract
from draftsmith.data.features import Memory, OnlineFeatures
from draftsmith.data.hidden_states import IDS, STATES
from draftsmith.data.store import Store
from draftsmith.ends import Ends
from draftsmith.errors import UserError
from draftsmith.target import Target

TAPS, LAYERS = (1, 2), (1, 2, 4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved(build(FAMILIES["qwen3"]), tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="module")
def whole(directory: str) -> Target:
    return Target.load(directory)


@pytest.fixture
def ends(directory: str) -> Ends:
    return Ends.load(directory)


def rows(count: int, longest: int = 12) -> list[Encoded]:
    draw = np.random.default_rng(0)
    lengths = draw.integers(4, longest, count)
    return [Encoded(draw.integers(3, 90, n).astype(np.int32), np.arange(n) > 1) for n in lengths]


def engine(server: Any, layers: tuple[int, ...] = LAYERS, **more: Any) -> Engine:
    return Engine(server.url, layers, **{"tries": 2, "timeout": 20.0, **more})


@pytest.mark.parametrize("width", [None, 24])
@pytest.mark.parametrize("memory", [False, True])
def test_a_batch_is_the_targets_own(width: int | None, memory: bool, whole: Target, ends: Ends, tmp_path: Path) -> None:
    examples = rows(6)
    with extracting(whole, LAYERS, tmp_path / "hs", slow=0.02) as server:
        asked = engine(server)
        asked.connect(ends, 12)
        given = EngineStates(asked, ends, TAPS, ahead=4)
        ours = OnlineFeatures(whole, examples, TAPS, None, width)
        theirs = OnlineFeatures(ends, examples, TAPS, Memory() if memory else None, width, given)
        for batch in ([0, 1, 2], [5, 0, 3], [4]):
            theirs.expect([*batch, 1, 2])
            one, other = theirs.batch(batch), ours.batch(batch)
            assert one.tokens == other.tokens and theirs.lost == 0
            for name in ("ids", "mask", "positions"):
                torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=0)
            for name in ("taps", "last"):
                mine, own = (getattr(each.features, name) for each in (one, other))
                torch.testing.assert_close(mine, own, rtol=0, atol=2e-5 * float(own.abs().max()))
        given.close()
        asked_for = [tuple(body["prompt"]) for body in server.bodies[1:]]
    if memory:
        assert len(set(asked_for)) == len(asked_for)
    assert not list((tmp_path / "hs").iterdir())  # every file is gone once it is read, and its lock


def test_no_more_is_under_way_than_is_allowed(whole: Target, ends: Ends, tmp_path: Path) -> None:
    examples = rows(40)
    with extracting(whole, LAYERS, tmp_path / "hs", before=lambda *_: time.sleep(0.01)) as server:
        given = EngineStates(engine(server, in_flight=3), ends, TAPS, ahead=8)
        source = OnlineFeatures(ends, examples, TAPS, engine=given)
        for step in range(10):
            batch = list(range(4 * step, 4 * step + 4))
            source.expect(range(4 * step, 40))
            assert len(given.pending) <= 8
            source.batch(batch)
            assert len(server.bodies) <= 4 * step + 8  # nothing beyond the window was asked for
        given.close()
    assert server.most <= 3 and len(server.bodies) == 40


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda tensors: tensors[IDS].add_(1), "the states of other tokens"),
        (lambda tensors: tensors[STATES][3, 1].fill_(float("nan")), "NaN or infinity"),
        (lambda tensors: tensors[STATES][0].fill_(float("inf")), "NaN or infinity"),
    ],
)
def test_a_row_with_wrong_states_is_named_and_teaches_nothing(
    change: Callable, said: str, whole: Target, ends: Ends, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = rows(3)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        if tensors[IDS].tolist() == examples[1].ids.tolist():
            change(tensors)

    with extracting(whole, LAYERS, tmp_path / "hs", spoil=spoil) as server:
        source = OnlineFeatures(ends, examples, TAPS, engine=EngineStates(engine(server), ends, TAPS))
        batch = source.batch([0, 1, 2])
        assert source.lost == 1 and not batch.mask[1].any() and not batch.features.taps[1].any() and batch.mask[[0, 2]].any()
        assert source.batch([1]).mask.sum() == 0 and len(server.bodies) == 3  # it is not asked for again
        assert capsys.readouterr().err.count("left out: row 1") == 1
        strict = OnlineFeatures(ends, examples, TAPS, engine=EngineStates(engine(server), ends, TAPS, strict=True))
        with pytest.raises(UserError, match=f"row 1 .*{said}"):
            strict.batch([1])
    assert not list((tmp_path / "hs").iterdir())


@pytest.mark.parametrize(
    "reply", [Reply(400, {"message": "too long"}), Reply(500, {"message": "bug"}), Reply(hang_up=True), Reply(text="<html>")]
)
def test_a_row_that_the_server_refuses_is_left_out_while_others_are_answered(
    reply: Reply, whole: Target, ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.data.endpoint.FIRST_WAIT", 0.3)
    examples = rows(6)
    bad = examples[2].ids.tolist()
    with extracting(whole, LAYERS, tmp_path / "hs", before=lambda body, _: reply if body["prompt"] == bad else None) as server:
        source = OnlineFeatures(ends, examples, TAPS, engine=EngineStates(engine(server), ends, TAPS))
        batch = source.batch(list(range(6)))
        assert source.lost == 1 and not batch.mask[2].any() and batch.mask[[0, 1, 3, 4, 5]].any(1).all()


def test_what_fails_once_is_asked_for_again(whole: Target, ends: Ends, tmp_path: Path) -> None:
    def once(body: dict[str, Any], tries: int) -> Reply | None:
        return None if tries else [Reply(503, {}), Reply(500, {}), Reply(hang_up=True)][body["prompt"][0] % 3]

    with extracting(whole, LAYERS, tmp_path / "hs", before=once) as server:
        source = OnlineFeatures(ends, rows(6), TAPS, engine=EngineStates(engine(server, tries=4), ends, TAPS))
        assert source.batch(list(range(6))).mask.any(1).all() and source.lost == 0


def test_a_server_that_dies_ends_the_run_with_one_sentence(whole: Target, ends: Ends, tmp_path: Path) -> None:
    dead: list[bool] = []
    with extracting(whole, LAYERS, tmp_path / "hs", before=lambda *_: Reply(hang_up=True) if dead else None) as server:
        source = OnlineFeatures(ends, rows(6), TAPS, engine=EngineStates(engine(server), ends, TAPS, ahead=6))
        source.batch([0, 1])
    dead.append(True)
    source.expect(range(2, 6))
    with pytest.raises(UserError, match=r"gave no hidden states in 2 tries \(cannot connect.*--resume"):
        source.batch([2, 3])


def test_a_server_that_dies_before_it_writes_is_no_rows_fault(
    whole: Target, ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's does where its worker fails: the answer names a file that never comes."""
    monkeypatch.setattr("draftsmith.data.engine.LATE", 0.1)
    lost = Reply(value={"choices": [{}], "kv_transfer_params": {"hidden_states_path": str(tmp_path / "never.safetensors")}})
    said = "never.safetensors is not there; the folder must be seen here"
    with extracting(whole, LAYERS, tmp_path / "hs", before=lambda *_: lost) as server, pytest.raises(UserError, match=said):
        engine(server).connect(ends, 12)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no states": ({"before": lambda *_: Reply(value={"choices": [{}]})}, "without a file of hidden states"),
    "no completion": ({"before": lambda *_: Reply(value=[1])}, "the reply is no completion"),
    "refused": ({"before": lambda *_: Reply(400, {"message": "no token ids here"})}, "refuses a plain sequence.*no token ids"),
    "no key": ({"before": lambda *_: Reply(401, {"message": "who?"})}, "set OPENAI_API_KEY"),
    "no such page": ({"before": lambda *_: Reply(404, {"message": "Not Found"})}, "check data.engine.url"),
    "fewer layers": ({"spoil": lambda t: t.update({STATES: t[STATES][:, 1:].clone()})}, "extracts 2 layers, and 3 are asked"),
    "another size": ({"spoil": lambda t: t.update({STATES: t[STATES][..., :8].clone()})}, "sends states of 8 numbers"),
    "another dtype": ({"spoil": lambda t: t.update({STATES: t[STATES].bfloat16()})}, "computes in bfloat16.*float32"),
    "another order": ({"spoil": lambda t: t.update({STATES: t[STATES].flip(1)})}, "extract layer 4 last"),
    "another model": ({"spoil": lambda t: t[STATES].normal_()}, "let it serve this very model"),
    "other tokens": ({"spoil": lambda t: t[IDS].add_(1)}, "the states of other tokens"),
    "no such tensor": ({"spoil": lambda t: t.pop(STATES)}, "has no hidden_states"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_engine_that_does_not_fit_is_refused_before_anything_is_asked(
    name: str, whole: Target, ends: Ends, tmp_path: Path
) -> None:
    ways, said = WRONG[name]
    with extracting(whole, LAYERS, tmp_path / "hs", **ways) as server, pytest.raises(UserError, match=said):
        engine(server).connect(ends, 12)


def test_an_address_where_nobody_serves_the_model_is_refused(whole: Target, ends: Ends, tmp_path: Path) -> None:
    said = "does not serve 'other': choose data.engine.model from m"
    with extracting(whole, LAYERS, tmp_path / "hs") as server, pytest.raises(UserError, match=said):
        engine(server, model="other").connect(ends, 12)
    with pytest.raises(UserError, match="start the engine, or mend data.engine.url"):
        engine(server).connect(ends, 12)
    with pytest.raises(UserError, match="is no address"):
        Engine("localhost:80/v1", LAYERS, tries=1).connect(ends, 12)


def test_the_last_state_of_a_post_norm_extractor_is_found_out(whole: Target, ends: Ends, tmp_path: Path) -> None:
    def normed(tensors: dict[str, torch.Tensor]) -> None:
        tensors[STATES][:, -1] = whole.final_norm(tensors[STATES][:, -1])  # type: ignore[misc]

    with extracting(whole, LAYERS, tmp_path / "hs", spoil=normed) as server, pytest.raises(UserError, match="extract layer 4"):
        engine(server).connect(ends, 12)


def test_files_may_be_seen_under_another_folder(whole: Target, ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "hs").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "hs")

    with extracting(whole, LAYERS, tmp_path / "hs") as server:
        told = engine(server, folder=tmp_path / "here").connect(ends, 12)
    assert told["layers"] == list(LAYERS) and not list((tmp_path / "hs").iterdir())


def test_an_extraction_through_an_engine_goes_on_where_it_was_stopped(whole: Target, ends: Ends, tmp_path: Path) -> None:
    """The engine dies on its way; the store that the same command then finishes holds what the target itself would give."""
    examples, died = rows(40), []

    def mortal(body: dict[str, Any], _: int) -> Reply | None:
        died.append(1)
        return Reply(503, {}) if len(died) > 25 else None

    def run(server: Any) -> dict[str, Any]:
        given = EngineStates(engine(server), ends, TAPS, ahead=8, strict=True)
        return extract(ends, examples, TAPS, tmp_path / "store", "float32", batch_tokens=32, shard_bytes=5000, given=given)

    with extracting(whole, LAYERS, tmp_path / "hs", before=mortal) as server, pytest.raises(UserError, match="same command"):
        run(server)
    assert not (tmp_path / "store").exists()
    with extracting(whole, LAYERS, tmp_path / "hs") as server:
        report = run(server)
        assert report["shards_kept"] > 0 and len(server.bodies) < 40
    extract(whole, examples, TAPS, tmp_path / "own", "float32")
    store, own = Store(tmp_path / "store"), Store(tmp_path / "own")
    store.check(whole, TAPS)
    for row in range(40):
        (one, ours), (other, theirs) = store.read(row), own.read(row)
        assert one.ids.tolist() == other.ids.tolist() and one.mask.tolist() == other.mask.tolist()
        torch.testing.assert_close(ours.taps, theirs.taps, rtol=0, atol=1e-4)
        torch.testing.assert_close(ours.last, theirs.last, rtol=0, atol=1e-4)
