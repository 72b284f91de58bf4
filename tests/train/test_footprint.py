"""What a dry run says a run takes, held against what heads really keep, and against known models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.kinds import KINDS
from draftsmith.recipes.schema import load_recipe
from draftsmith.target import Target
from draftsmith.train import footprint, stand_in
from draftsmith.train.dry_run import dry_run, load_skeleton

VOCAB, LENGTH, LINES, DEPTHS = 300, 256, 2, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {"layers": 2},
    "peagle": {"mask_token": 127, "layers": 2},
    "medusa": {"blocks": 2},
    "hydra": {"prefix": True},
    "mlp_speculator": {},
    "redrafter": {},
    "mtp": {},
    "pard": {"layers": 2, "mask_token": 127},
    "draft_model": {"layers": 2},
    "dflash": {"layers": 2, "mask_token": 127, "anchors": 32},
}
PARAMETERS = {  # as their makers state them, in billions
    "SmolLM2-135M-Instruct": 0.1345,
    "Llama-3.1-8B-Instruct": 8.03,
    "Llama-3.3-70B-Instruct": 70.55,
    "Llama-3.2-1B-Instruct": 1.236,
    "MiMo-7B-RL-0530": 7.62,  # 7.83 with its module
    "DeepSeek-V3-0324": 671.0,
    "Kimi-K2-Instruct-0905": 1026.4,
}


@pytest.fixture(scope="module")
def target() -> Target:
    """Wide enough that linear maps, not norms, are what counts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config), None, "wide")


def head_for(kind: str, target: Target) -> DraftHead:
    options = KINDS[kind].Options.model_validate(OPTIONS[kind])
    return KINDS[kind].create(target, options, None, DEPTHS, torch.arange(VOCAB)).train()


def kept_for_backward(head: DraftHead, target: Target) -> int:
    """Bytes that autograd keeps of a forward over two full lines, weights left out."""
    ids = torch.randint(VOCAB - 10, (LINES, LENGTH), generator=torch.Generator().manual_seed(0))
    features = target.features(ids, head.config.taps)
    rows = head.taught(ids, torch.ones_like(ids, dtype=torch.bool), 0)
    weights = {p.untyped_storage().data_ptr() for module in (head, target.model) for p in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        head.predict(ids, rows, features, target)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_told_within_a_factor_of_two(kind: str, target: Target):
    head = head_for(kind, target)
    recipe = load_recipe("demo", ["train.precision=no", f"train.micro_batch_size={LINES}", f"data.max_length={LENGTH}"])
    told = footprint.memory(recipe, target, head, torch.float32, torch.device("cpu"))["activations"].bytes
    assert 0.5 < kept_for_backward(head, target) / told < 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_activations_that_are_computed_again_are_told_within_a_factor_of_three(kind: str, target: Target):
    head = head_for(kind, target)
    changes = ["train.precision=no", f"train.micro_batch_size={LINES}", f"data.max_length={LENGTH}"]
    recipe = load_recipe("demo", [*changes, "train.gradient_checkpointing=true"])
    told = footprint.memory(recipe, target, head, torch.float32, torch.device("cpu"))["activations"].bytes
    head.recompute()
    assert 1 / 3 < kept_for_backward(head, target) / told < 3


def test_a_target_behind_an_engine_is_its_ends_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    held = dry_run(load_recipe("mtp-deepseek-v3"))["memory"]["target weights"]
    assert held["GB"] == pytest.approx(2 * 129280 * 7168 * 2 / 1e9, abs=1e-3) and "data.engine" in held["from"]
    spread = dry_run(load_recipe("eagle3-llama3-70b"))["memory"]["target weights"]
    assert spread["GB"] == pytest.approx(141.107, abs=1e-3) and "target.parallel: fsdp" in spread["from"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_heads_arithmetic_is_that_of_its_linear_maps(kind: str, target: Target):
    head, done = head_for(kind, target), 0

    def count(map_: nn.Linear, args: tuple, output: torch.Tensor) -> None:
        nonlocal done
        done += 6 * map_.weight.numel() * args[0].numel() // args[0].shape[-1]

    for map_, _ in footprint.applied(head, LENGTH):
        map_.register_forward_hook(count)
    ids = torch.randint(VOCAB - 10, (LINES, LENGTH), generator=torch.Generator().manual_seed(0))
    rows = head.taught(ids, torch.ones_like(ids, dtype=torch.bool), 0)
    head.predict(ids, rows, target.features(ids, head.config.taps), target)
    assert footprint.arithmetic(target, head, LENGTH)["head"] == pytest.approx(done / ids.numel(), rel=0.5)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_stand_in_has_the_models_own_size(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    skeleton, why = load_skeleton(f"nowhere/{name}")
    assert footprint.numbers(skeleton.model) / 1e9 == pytest.approx(PARAMETERS[name], rel=1e-3)
    assert why and f"recipes/targets/{name}.json" in why


def test_every_stand_in_is_checked():
    assert {file.stem for file in stand_in.SHAPES.glob("*.json")} == set(PARAMETERS)


def test_a_mixture_counts_the_experts_that_a_token_meets(monkeypatch: pytest.MonkeyPatch):
    """DeepSeek states 37 billion active parameters for V3, its output head and embedding among them."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    skeleton, _ = load_skeleton("nowhere/DeepSeek-V3-0324")
    with torch.device("meta"):
        head = KINDS["medusa"].create(skeleton, KINDS["medusa"].Options(), None, 1, torch.arange(8))  # type: ignore[call-arg]
    flops = footprint.arithmetic(skeleton, head, 1)
    assert (flops["target"] + 2 * flops["teacher"]) / 2e9 == pytest.approx(37, rel=0.03)


def test_every_number_says_what_it_is_from(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = dry_run(load_recipe("eagle3-llama3-8b"))
    parts = [*found["memory"].values(), *found["disk"].values()]
    assert parts and all(set(part) == {"GB", "from"} and part["from"] for part in parts)
    assert found["memory"]["target weights"]["GB"] == 16.0605 and found["features"]["bytes_per_token"] == 4 * 4096 * 2
    assert found["memory"]["optimizer"]["GB"] == pytest.approx(2 * found["memory"]["head weights"]["GB"], rel=1e-3)
    whole = found["memory"].pop("all")["GB"]
    assert whole == pytest.approx(sum(part["GB"] for part in found["memory"].values()), abs=1e-3)


def test_steps_and_tokens_are_those_of_the_data():
    """The demo's data are there: its rows give the steps, its first conversations the tokens."""
    found = dry_run(
        load_recipe("demo", ["train.max_steps=null", "train.epochs=2", "data.features=write-through", "data.store=s"])
    )
    assert found["steps"]["number"] == 2 * -(-1240 // 8)
    assert 1240 * 100 < found["tokens"]["per_epoch"] < 1240 * 320
    assert found["disk"]["store"]["GB"] == pytest.approx(found["tokens"]["per_epoch"] * (4 * 576 * 2 + 5) / 1e9, abs=1e-4)
    capped = dry_run(load_recipe("demo", ["data.features=write-through", "data.store=s", "data.store_budget=0.5"]))
    assert capped["disk"]["store"]["GB"] == 0.5


def test_an_unknown_model_has_no_stand_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError):
        stand_in.config_of("nobody/nothing")
    with pytest.raises(UserError, match=r"head\.options\.model"):
        dry_run(load_recipe("draft_model-smollm2", ["head.options={model: nobody/nothing}"]))


def test_a_dry_run_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without hub and cache the demo's target is known by its shape; its weights are not asked of the package index."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = dry_run(load_recipe("demo"))
    assert found["target"]["parameters"] == 134_515_008 and not list(tmp_path.iterdir())
    assert any("SmolLM2-135M-Instruct.json" in each for each in found["unresolved"])


def test_an_engine_leaves_the_ends_of_a_70b_and_the_states_ahead() -> None:
    """Embedding and output head of Llama 3 70B: 2 x 128256 x 8192 bfloat16 numbers; states of three taps and the last layer."""
    changes = ["data.engine.url=http://x/v1", "data.engine.ahead=10", "eval.prompts=0", "target.dtype=bfloat16"]
    recipe = load_recipe("eagle3-llama3-8b", [*changes, "target.name=meta-llama/Llama-3.3-70B-Instruct", "head.taps=null"])
    memory = dry_run(recipe)["memory"]
    assert memory["target weights"]["GB"] == pytest.approx(2 * 128256 * 8192 * 2 / 1e9, rel=1e-3)
    assert memory["states ahead"]["GB"] == pytest.approx(10 * recipe.data.max_length * 4 * 8192 * 2 / 1e9, rel=1e-3)
