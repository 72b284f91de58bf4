"""Recipes: the shipped ones hold together, changes apply, mistakes name the nearest right key, a dry run loads no weights."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from draftsmith.errors import UserError
from draftsmith.eval.tree import parse
from draftsmith.heads.kinds import KINDS
from draftsmith.recipes import shelf
from draftsmith.recipes.schema import Recipe, load_recipe, shipped
from draftsmith.train.dry_run import dry_run

MINIMAL = {"target": {"name": "t"}, "data": {"train": "a", "held_out": "b"}, "head": {"kind": "eagle3"}, "output": "out"}
SIZES = {"small": (0, 1e9), "8B": (6e9, 1e10), "70B": (6e10, 1e12)}  # by the target's parameters


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    return file


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    """A folder with nothing but the config of a Llama-3.1-8B: no weights, no tokenizer."""
    LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, bos_token_id=128000, eos_token_id=128009,
    ).save_pretrained(tmp_path / "llama")  # fmt: skip
    return tmp_path / "llama"


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipe_loads(name: str):
    recipe = load_recipe(name)
    parse(recipe.eval.tree)
    assert recipe.train.batch_size % recipe.train.micro_batch_size == 0
    assert load_recipe(shipped()[name]) == recipe


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The dry run of a shipped recipe as on a machine without network, cache and data of the recipe's own."""

    @cache
    def dry(name: str) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as machine:
            machine.setenv("HF_HUB_OFFLINE", "1")
            machine.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "nothing"))
            return dry_run(load_recipe(name))

    return dry


def size_of(found: dict[str, Any]) -> str:
    return next(size for size, limits in SIZES.items() if limits[0] < found["target"]["parameters"] < limits[1])


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipe_opens_with_its_command(name: str):
    command, *what = shelf.about(shipped()[name])
    assert re.fullmatch(rf".*accelerate launch (.+ )?-m draftsmith\.train recipes/{name}\.yaml\)?", command) and what
    for config in re.findall(r"recipes/(accelerate/\S+)", command):
        assert (shipped()[name].parent / config).is_file()


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipe_names_the_source_of_its_learning_rate(name: str):
    """Also of batch, length and epochs where the target is no toy: published, or said not to be."""
    stated = re.findall(r"^  (lr|batch_size|max_length|epochs|max_steps): (.*)$", shipped()[name].read_text(), re.MULTILINE)
    small = "SmolLM2" in load_recipe(name).target.name
    unsaid = [key for key, rest in stated if "published" not in rest and (key == "lr" or not small)]
    assert "lr" in dict(stated) and not unsaid


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipe_resolves_without_network(name: str, resolved: Callable[[str], dict[str, Any]]):
    found = resolved(name)
    about = " ".join(shelf.about(shipped()[name]))
    stated = re.search(r"\(([\d.]+) billion parameters\)", about)
    assert (stated is None) == (size_of(found) == "small")
    assert stated is None or float(stated[1]) == round(found["head"]["parameters"] / 1e9, 2)
    assert found["target"]["parameters"] > 0 < found["memory"]["all"]["GB"]
    assert any("could not be read" in each and "recipes/targets/" in each for each in found["unresolved"])
    assert (found["steps"]["number"] is None) == (size_of(found) != "small" and "max_steps" not in found["steps"]["from"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_recipe_of_every_size(kind: str, resolved: Callable[[str], dict[str, Any]]):
    own = [name for name in shipped() if load_recipe(name).head.kind == kind]
    assert {size_of(resolved(name)) for name in own} == set(SIZES)


@pytest.mark.parametrize("name", shipped())
def test_a_target_that_no_gpu_holds_is_spread_and_a_sharded_head_is_not_verified(name: str, resolved: Callable):
    recipe, command = load_recipe(name), shelf.about(shipped()[name])[0]
    assert (size_of(resolved(name)) == "70B") == bool(recipe.target.parallel or recipe.data.engine)
    assert "fsdp.yaml" not in command or recipe.eval.prompts == 0


@pytest.mark.parametrize("size", SIZES)
def test_recipes_of_a_size_agree_on_what_a_size_decides(size: str, resolved: Callable[[str], dict[str, Any]]):
    """Target, precision and what is logged and decoded are one choice for all; a module's target is its own."""
    found = [load_recipe(name) for name in shipped() if size_of(resolved(name)) == size]
    assert len({(each.target.name, each.target.parallel) for each in found if each.head.kind != "mtp"}) == 1
    assert len({(each.train.precision, each.train.log_every) for each in found}) == 1


def test_the_8b_eagle3_recipe_reads_the_taps_that_engines_assume(llama_8b: Path):
    recipe = load_recipe("eagle3-llama3-8b", [f"target.name={llama_8b}"])
    default = dry_run(recipe.model_copy(update={"head": recipe.head.model_copy(update={"taps": None})}))
    assert recipe.head.taps == default["head"]["taps"] == [2, 16, 29]


def test_dry_run_says_what_it_could_not_resolve(tmp_path: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = dry_run(load_recipe(recipe_file, ["target.name=nobody/nothing"]))
    assert found["target"] is None and found["head"] is None
    assert [part.split(":")[0] for part in found["unresolved"]] == ["data.train", "data.held_out", "target", "head"]
    assert list(tmp_path.iterdir()) == [recipe_file]


def test_changes_apply_in_order_and_are_read_as_yaml(recipe_file: Path):
    changes = ["train.lr=3e-4", "train.lr=0.002", "head.taps=[1, 2]", "head.options.fc_norm=true", "target.device=null"]
    recipe = load_recipe(recipe_file, changes)
    assert recipe.train.lr == 0.002 and recipe.head.taps == [1, 2]
    assert recipe.head.options["fc_norm"] is True and recipe.target.device is None


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001"])
def test_a_rate_may_be_written_in_any_usual_way(recipe_file: Path, text: str):
    assert load_recipe(recipe_file, [f"train.lr={text}"]).train.lr == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("change", "nearest"),
    [
        ("train.epoch=2", "train.epochs"),
        ("train.batchsize=2", "train.batch_size"),
        ("data.maxlength=9", "data.max_length"),
        ("head.tap=[1]", "head.taps"),
        ("head.options.fcnorm=true", "head.options.fc_norm"),
        ("head.options.lora=4", r"head.options.(?!lora)\w+"),  # another kind has it
        ("targets.name=x", "target"),
        ("out=x", "output"),
    ],
)
def test_an_unknown_key_names_the_nearest_right_one(recipe_file: Path, change: str, nearest: str):
    with pytest.raises(UserError, match=rf"unknown key {change.split('=')[0].split('.')[0]}.* is {nearest}\."):
        load_recipe(recipe_file, [change])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["train.epochs=0"], "train.epochs"),
        (["head.kind=nope"], "eagle, eagle3"),
        (["head.options.norm_before_fc=maybe"], "head.options.norm_before_fc"),
        (["head.options.norm_before_fc=true", "head.options.fc_norm=true"], "exclude each other"),
        (["output.a=b"], "output is a value, not a section"),
    ],
)
def test_a_wrong_value_names_its_key(recipe_file: Path, changes: list[str], says: str):
    with pytest.raises(UserError, match=says):
        load_recipe(recipe_file, changes)


@pytest.mark.parametrize("text", ["- a list", "just words", ": {", ""])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError, match=r"r\.yaml"):
        load_recipe(tmp_path / "r.yaml")


def test_a_missing_key_is_named(tmp_path: Path):
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({**MINIMAL, "data": {"train": "a"}}))
    with pytest.raises(UserError, match=r"data\.held_out is missing"):
        load_recipe(tmp_path / "r.yaml")


def test_the_resolved_recipe_reads_back(recipe_file: Path, tmp_path: Path):
    recipe = load_recipe(recipe_file)
    (tmp_path / "resolved.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "resolved.yaml").model_dump() == recipe.model_dump()
    assert set(yaml.safe_load(recipe.to_yaml())) == set(Recipe.model_fields)


def test_data_beside_the_recipe_is_found(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir("/")
    (tmp_path / "a").write_text("")
    assert load_recipe(recipe_file).sources("train") == [str(tmp_path / "a")]
    named = load_recipe(recipe_file, ["data.train=[a, 'a*', owner/name]"]).sources("train")
    assert named == [str(tmp_path / "a"), str(tmp_path / "a*"), "owner/name"]
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a").write_text("")
    monkeypatch.chdir(tmp_path / "here")
    assert load_recipe(recipe_file).sources("train") == ["a"], "the working directory comes first"


def test_no_needs_no_quotes(recipe_file: Path):
    assert load_recipe(recipe_file, ["train.precision=no"]).train.precision == "no"


def test_a_store_is_named_where_one_is_read(recipe_file: Path):
    with pytest.raises(UserError, match="data: features: store needs data.store: name the store's directory"):
        load_recipe(recipe_file, ["data.features=store"])
    assert load_recipe(recipe_file, ["data.features=write-through", "data.store=s"]).data.store == "s"


def test_every_recipe_is_copied_with_what_it_names(tmp_path: Path):
    for name in shipped():
        written = shelf.copy(name, tmp_path / name, force=False)
        assert load_recipe(written[0]).model_dump() == load_recipe(name).model_dump()
        text = written[0].read_text()
        assert ("accelerate/" in text) == (tmp_path / name / "accelerate" / "ddp.yaml").exists()
