"""Training on an engine's states: the run that the target itself would give, without its layers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from extracting import extracting
from families import FAMILIES, saved
from safetensors.torch import load_file
from serving import Reply
from transformers import LlamaConfig, LlamaForCausalLM
from workplace import finished, several

from draftsmith.data.extract import extract
from draftsmith.data.tally import Tally
from draftsmith.ends import Ends
from draftsmith.errors import UserError
from draftsmith.recipes.schema import Recipe, load_recipe
from draftsmith.target import Target
from draftsmith.train import prepare
from draftsmith.train.loop import train
from draftsmith.train.prepare import read_examples

LAYERS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a vocabulary that holds the tiny tokenizer's, and conversations beside it."""
    folder = tmp_path_factory.mktemp("engine")
    torch.manual_seed(0)
    config = LlamaConfig(**FAMILIES["llama"].to_diff_dict() | {"vocab_size": 128, "max_position_embeddings": 96})
    model = LlamaForCausalLM(config)
    saved(Target(model.float(), None, "tiny"), folder / "target")
    for name, count in (("train", 14), ("held", 5)):
        lines = [
            {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"well, {i} {name} " * 2}]}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def recipe(directory: Path, out: Path, **data: Any) -> Recipe:
    head = data.pop("head", {"kind": "eagle3", "taps": [1, 2, 3], "draft_vocab": 64})
    more = data.pop("train", {})
    document = {
        "target": {"name": str(directory / "target"), "dtype": "float32"},
        "data": {"train": str(directory / "train.jsonl"), "held_out": str(directory / "held.jsonl"), "max_length": 90} | data,
        "head": head,
        "train": {"batch_size": 4, "micro_batch_size": 2, "epochs": 2, "lr": 1e-3, "log_every": 1, "precision": "no"} | more,
        "eval": {"prompts": 0},
        "output": str(out),
    }
    return Recipe.model_validate(document)


def losses(out: Path) -> list[tuple[str, int, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["part"], line["step"], line["loss"]) for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    ours, theirs = losses(one), losses(other)
    assert [row[:2] for row in ours] == [row[:2] for row in theirs]
    torch.testing.assert_close([row[2] for row in ours], [row[2] for row in theirs], rtol=1e-4, atol=1e-5)
    heads = [load_file(out / "head" / "model.safetensors") for out in (one, other)]
    for name, tensor in heads[0].items():
        torch.testing.assert_close(heads[1][name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "features, pack", [("online", False), ("online", True), ("memory", False), ("write-through", False), ("store", True)]
)
def test_a_run_from_an_engine_is_the_targets_own(features: str, pack: bool, directory: Path, tmp_path: Path) -> None:
    whole = Target.load(str(directory / "target"), "float32")
    data: dict[str, Any] = {"features": features, "pack": pack}
    if features in ("store", "write-through"):
        data |= {"store": str(tmp_path / "store"), "store_dtype": "float32"}
    if features == "store":
        examples = read_examples(recipe(directory, tmp_path), "train", whole, Tally())
        extract(whole, examples, (1, 2, 3), tmp_path / "store", "float32")
    train(recipe(directory, tmp_path / "own", pack=pack))
    with extracting(whole, LAYERS, tmp_path / "hs") as server:
        train(recipe(directory, tmp_path / "engine", engine={"url": server.url, "ahead": 6, "in_flight": 3}, **data))
    assert server.most <= 3 and not list((tmp_path / "hs").iterdir())
    assert_same_run(tmp_path / "engine", tmp_path / "own")
    record = json.loads((tmp_path / "engine" / "run.json").read_text())
    assert record["target"]["fingerprint"] == whole.fingerprint


def test_the_layers_are_never_loaded(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Target.load(str(directory / "target"), "float32")
    made = []

    load = Ends.load

    def remember(*named: Any) -> Any:
        made.append(load(*named))
        return made[-1]

    monkeypatch.setattr(prepare.Ends, "load", remember)
    monkeypatch.setattr(prepare.Target, "load", None)
    with extracting(whole, LAYERS, tmp_path / "hs") as server:
        train(recipe(directory, tmp_path / "run", engine={"url": server.url}))
    assert all(parameter.is_meta for parameter in made[0].layers.parameters())


def test_an_engines_run_goes_on_after_it_died(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Target.load(str(directory / "target"), "float32")
    monkeypatch.setattr("draftsmith.data.engine.TRIES", 1)
    asked: list[int] = []

    def mortal(*_: Any) -> Reply | None:
        asked.append(1)
        return Reply(503, {}) if len(asked) > 25 else None

    change = {"train": {"checkpoint_every": 1}}
    with extracting(whole, LAYERS, tmp_path / "hs", before=mortal) as server, pytest.raises(UserError, match="--resume"):
        train(recipe(directory, tmp_path / "run", engine={"url": server.url, "ahead": 4}, **change))
    with extracting(whole, LAYERS, tmp_path / "hs") as server:
        train(recipe(directory, tmp_path / "run", engine={"url": server.url, "ahead": 4}, **change), resume=True)
    train(recipe(directory, tmp_path / "own"))
    assert_same_run(tmp_path / "run", tmp_path / "own")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"eval": {"prompts": 4}}, "set eval.prompts to 0"),
        ({"train": {"on_policy": 0.5}}, "train.on_policy runs the target"),
        ({"data": {"engine": {"url": "http://x/v1", "urll": 1}}}, "the nearest right key is data.engine.url"),
        ({"data": {"engine": {}}}, "the key data.engine.url is missing"),
    ],
)
def test_recipes_that_ask_an_engine_for_what_it_cannot_give_are_refused(
    change: dict[str, Any], said: str, directory: Path, tmp_path: Path
) -> None:
    document = recipe(directory, tmp_path / "run", engine={"url": "http://localhost:1/v1"}).model_dump(mode="json")
    for section, values in change.items():
        document[section] |= values
    (tmp_path / "r.yaml").write_text(json.dumps(document))
    with pytest.raises(UserError, match=said):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    "head, said",
    [
        ({"kind": "medusa", "options": {"lora": {"rank": 2}}}, "trains adapters in the target's layers"),
        ({"kind": "eagle"}, "start the head at random"),
        ({"kind": "mtp", "depths": 2, "options": {"init": "target"}}, "start the head at random"),
    ],
)
def test_heads_that_need_the_layers_are_refused(head: dict[str, Any], said: str, directory: Path, tmp_path: Path) -> None:
    whole = Target.load(str(directory / "target"), "float32")
    with extracting(whole, LAYERS, tmp_path / "hs") as server, pytest.raises(UserError, match=said):
        train(recipe(directory, tmp_path / "run", engine={"url": server.url}, head=head))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_share_one_engine(directory: Path, tmp_path: Path) -> None:
    whole = Target.load(str(directory / "target"), "float32")
    with extracting(whole, LAYERS, tmp_path / "hs") as server:
        file = tmp_path / "r.yaml"
        file.write_text(recipe(directory, tmp_path / "two", engine={"url": server.url, "ahead": 3}).to_yaml())
        finished([*several(2), "-m", "draftsmith.train", str(file)])
    assert not list((tmp_path / "hs").iterdir())
    train(recipe(directory, tmp_path / "own"))
    assert_same_run(tmp_path / "two", tmp_path / "own")
