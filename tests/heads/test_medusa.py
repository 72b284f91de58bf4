"""Medusa: the heads against a plain re-implementation, Medusa-2's adapted target, and the layouts heads are published in."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    Qwen3MoeConfig,
)

from draftsmith.data.features import FeatureBatch
from draftsmith.errors import UserError
from draftsmith.eval.harness import measure
from draftsmith.eval.measures import tau
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.report import rows as report_rows
from draftsmith.eval.report import title
from draftsmith.eval.tree import chain, full
from draftsmith.eval.verifier import generate
from draftsmith.heads.base import supervised
from draftsmith.heads.engines.published import import_head
from draftsmith.heads.engines.registry import ENGINES, export, read
from draftsmith.heads.kinds import KINDS, load_head
from draftsmith.heads.medusa import LINEAR, MedusaHead, MedusaOptions
from draftsmith.target import Target
from draftsmith.train.objectives import Objective
from draftsmith.train.prepare import parameter_groups
from draftsmith.train.step import judged

SIZES: dict[str, Any] = dict(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64,
)  # fmt: skip
DEPTHS = 3
LORA = {"rank": 4, "alpha": 8.0}
IDS = torch.arange(5, 25)[None]
MASK = (torch.arange(20) > 6)[None]


def llama(**changes: Any) -> Target:
    torch.manual_seed(1)
    return Target(LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).float(), None, "tiny")


def medusa(target: Target, size: int = 128, scale: float = 0.1, depths: int = DEPTHS, **options: Any) -> MedusaHead:
    """A head with noise of this scale on every weight, the adapter's too."""
    ids = torch.arange(0, 3 * size, 3) if size < target.vocab_size else torch.arange(size)
    torch.manual_seed(2)
    head = MedusaHead.create(target, MedusaOptions(**options), None, depths, ids)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return head.eval()


def from_disk(directory: Path) -> Target:
    return Target(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), None, "tiny")


def batch(target: Target) -> FeatureBatch:
    return FeatureBatch(IDS, MASK, target.features(IDS, []), None, IDS.numel())


def last(target: Target) -> Tensor:
    return target.features(IDS, []).last


# -- the heads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_a_head_is_its_distinct_blocks_and_an_output_head(tiny_target: Target, lm_head: Any) -> None:
    """The reference repeats one block ``blocks`` times; here every block is its own."""
    head = medusa(tiny_target, blocks=3, lm_head=lm_head)
    weights = head.state_dict()
    x = last(tiny_target)[0]
    for depth in range(DEPTHS):
        expected = x
        for block in range(3):
            name = f"blocks.{depth}.{block}.linear"
            expected = expected + F.silu(expected @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
        rows = weights[f"lm_heads.{depth}.weight"] if lm_head == "own" else tiny_target.output_head.weight
        torch.testing.assert_close(head.guess(depth, x, tiny_target).logits, expected @ rows.T)
    assert len({weights[f"blocks.0.{block}.linear.weight"].sum().item() for block in range(3)}) == 3


def test_a_fresh_head_says_what_the_target_says(tiny_target: Target) -> None:
    head = medusa(tiny_target, scale=0.0)
    ours = head.guess(1, last(tiny_target)[0], tiny_target).logits
    torch.testing.assert_close(ours, tiny_target.logits(last(tiny_target)[0]))


# -- what Medusa-2 is taught -----------------------------------------------------------------------------------------


def test_the_base_lesson_has_the_rows_before_the_replys_tokens(tiny_target: Target) -> None:
    """A reply at 4..8: the adapted target is held to it from 3 on, the heads from 3 too, but no further than its end."""
    mask = torch.tensor([[False] * 4 + [True] * 5 + [False]])
    head = medusa(tiny_target, lora=LORA)
    maps = head.taught(torch.arange(10, 20)[None], mask, 0)
    assert [own[0].nonzero().flatten().tolist() for own in maps[:-1]] == [list(range(3, 7 - k)) for k in range(DEPTHS)]
    assert maps[-1][0].nonzero().flatten().tolist() == [3, 4, 5, 6, 7]
    assert len(medusa(tiny_target).taught(IDS, MASK, 0)) == DEPTHS


@pytest.mark.parametrize("autocast", [False, True])
def test_a_fresh_adapter_changes_nothing(tiny_target: Target, autocast: bool) -> None:
    """B is zero: states are bitwise the target's own, also where the heads compute in bfloat16, and the base lesson costs 0."""
    head = medusa(tiny_target, scale=0.0, lora=LORA).train()
    features = tiny_target.features(IDS, [])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = head.predict(IDS, head.taught(IDS, MASK, 0), features, tiny_target)
        assert torch.equal(found[-1].logits, tiny_target.logits(features.last.flatten(0, 1)[found[-1].rows]))
    assert found[-1].side is not None and (found[-1].side.loss, found[-1].side.whole, found[-1].ahead) == ("kl", True, 0)
    with head.adapted(tiny_target):
        assert torch.equal(last(tiny_target), tiny_target.features(IDS, []).last)


def test_loss_and_gradients_are_those_of_plain_matrices(tiny_target: Target) -> None:
    """Sum of the heads' weighted mean KL against the bare target, and base_weight times the mean KL of the next token, with
    W + alpha / rank * B A in the place of every W. The published code divides the latter by rows that teach nothing."""
    target, weight = tiny_target, 3.0
    head = medusa(target, lora={**LORA, "base_weight": weight})
    loss, _ = judged(head, batch(target), target, Objective("kl", depth_decay=0.8), head.taught(IDS, MASK, 0))
    loss.backward()

    own = {name: tensor.detach().clone().requires_grad_() for name, tensor in head.named_parameters()}
    changed = {}
    for name in head.config.layer["adapted"]:
        low, high = own[f"adapter.{name}.lora_A.weight"], own[f"adapter.{name}.lora_B.weight"]
        changed[f"{name}.weight"] = target.model.get_parameter(f"{name}.weight") + 8.0 / 4 * high @ low
    with torch.no_grad():
        p = target.model(IDS).logits[0].softmax(-1)
    out = functional_call(target.model, changed, (IDS,), {"output_hidden_states": True})
    state = out.hidden_states[-1][0]

    def kl(rows: Tensor, logits: Tensor) -> Tensor:
        return (p[rows] * (p[rows].log() - logits.log_softmax(-1))).sum(-1).mean()

    shares = torch.tensor([0.8**k for k in range(DEPTHS)]) / sum(0.8**k for k in range(DEPTHS))
    expected = torch.zeros(())
    for depth, own_map in enumerate(supervised(MASK, DEPTHS)):
        rows = own_map[0].nonzero().flatten()
        x = state[rows]
        x = x + F.silu(x @ own[f"blocks.{depth}.0.linear.weight"].T + own[f"blocks.{depth}.0.linear.bias"])
        expected = expected + shares[depth] * kl(rows + 1 + depth, x @ own[f"lm_heads.{depth}.weight"].T)
    rows = torch.arange(6, 19)
    expected = expected + weight * kl(rows, out.logits[0, rows])
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-5)
    for name, parameter in head.named_parameters():
        scale = float(own[name].grad.abs().max())  # type: ignore[union-attr]
        assert scale > 0
        torch.testing.assert_close(parameter.grad, own[name].grad, rtol=0, atol=1e-4 * scale, msg=name)


def test_dropout_is_at_work_while_training_alone(tiny_target: Target) -> None:
    head = medusa(tiny_target, lora={**LORA, "dropout": 0.5})

    def states() -> Tensor:
        return head.predict(IDS, head.taught(IDS, MASK, 0), tiny_target.features(IDS, []), tiny_target)[0].states

    assert torch.equal(states(), states())
    head.train()
    assert not torch.equal(states(), states())
    head.eval()
    with head.adapted(tiny_target):
        torch.testing.assert_close(last(tiny_target), last(tiny_target), rtol=0, atol=0)


def test_the_heads_learn_faster_than_the_adapter(tiny_target: Target) -> None:
    head = medusa(tiny_target, lora={**LORA, "heads_lr": 5.0})
    adapter, heads = parameter_groups(head, 1e-3)
    assert (adapter["lr"], heads["lr"]) == (1e-3, 5e-3)
    assert {id(p) for p in adapter["params"]} == {id(p) for p in head.adapter.parameters()}
    assert len(adapter["params"]) + len(heads["params"]) == len(list(head.parameters()))
    (alone,) = parameter_groups(medusa(tiny_target), 1e-3)
    assert alone["lr"] == 1e-3 and len(alone["params"]) == 3 * DEPTHS


# -- the target, adapted and bare ------------------------------------------------------------------------------------


def anatomy(target: Target) -> tuple[list[tuple[str, int]], dict[str, int], set[str]]:
    model = target.model
    modules = [(name, id(module)) for name, module in model.named_modules()]
    return modules, {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}, set(vars(model))


def test_training_leaves_the_bare_target_as_it_was(lively_target: Target) -> None:
    target = lively_target
    before, tensors = anatomy(target), {name: t.clone() for name, t in target.model.state_dict().items()}
    states, text = last(target), generate(target, None, [5, 6, 7], chain(1), 12).tokens
    head = medusa(target, scale=0.0, lora=LORA).train()
    optimizer = torch.optim.AdamW(parameter_groups(head, 2e-3))
    losses = []
    for _ in range(5):
        loss, _ = judged(head, batch(target), target, Objective("kl"), head.taught(IDS, MASK, 0))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert anatomy(target) == before and not any(p.requires_grad for p in target.model.parameters())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in target.model.state_dict().items())
    assert torch.equal(last(target), states) and generate(target, None, [5, 6, 7], chain(1), 12).tokens == text
    with head.adapted(target):
        assert not torch.equal(last(target), states)


def test_the_adapter_is_left_by_any_way_out_and_may_be_entered_twice(tiny_target: Target) -> None:
    head, before, bare = medusa(tiny_target, lora=LORA), anatomy(tiny_target), last(tiny_target)
    with head.adapted(tiny_target):
        outside = last(tiny_target)
        with head.adapted(tiny_target):
            assert torch.equal(last(tiny_target), outside)
        assert torch.equal(last(tiny_target), outside)  # leaving the inner one has left the outer one on
    assert not torch.equal(outside, bare)
    with pytest.raises(ZeroDivisionError), head.adapted(tiny_target), head.adapted(tiny_target):
        raise ZeroDivisionError
    assert anatomy(tiny_target) == before and torch.equal(last(tiny_target), bare)


def test_two_heads_take_turns_on_one_target(tiny_target: Target) -> None:
    one, other = medusa(tiny_target, lora=LORA), medusa(tiny_target, scale=0.2, lora=LORA)
    seen = []
    for head in (one, other, one, other):
        with head.adapted(tiny_target):
            seen.append(last(tiny_target))
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3]) and not torch.equal(seen[0], seen[1])


def test_a_head_from_its_directory_adapts_any_target_of_its_kind(tiny_target: Target, tmp_path: Path) -> None:
    head = medusa(tiny_target, lora={**LORA, "modules": "all-linear"})
    head.save(tmp_path)
    with head.adapted(tiny_target):
        adapted = last(tiny_target)
    loaded: Any = load_head(tmp_path)
    snapshot = KINDS["medusa"](head.config)
    snapshot.load_state_dict(head.state_dict())
    again = Target(copy.deepcopy(tiny_target.model), None, "again")
    for ours in (loaded, snapshot.eval()):
        for target in (tiny_target, again, tiny_target):
            with ours.adapted(target):
                assert torch.equal(last(target), adapted)
            assert not torch.equal(last(target), adapted)


def test_a_copy_of_a_head_holds_no_copy_of_its_target(tiny_target: Target) -> None:
    head = medusa(tiny_target, lora=LORA)
    unused = len(pickle.dumps(head))
    with head.adapted(tiny_target):
        adapted = last(tiny_target)
    assert len(pickle.dumps(head)) == unused
    with copy.deepcopy(head).adapted(tiny_target):
        assert torch.equal(last(tiny_target), adapted)


@pytest.mark.parametrize("shape", [chain(DEPTHS), full([3, 2, 1])], ids=lambda shape: shape.name)
@pytest.mark.parametrize("lora", [LORA, {**LORA, "modules": ["down_proj", "lm_head"]}], ids=["linear", "lm_head"])
def test_the_text_is_the_adapted_targets(lively_target: Target, lora: dict, shape: Any) -> None:
    head = medusa(lively_target, scale=0.3, lora=lora)
    prompt = [1, 40, 41, 42]
    bare = generate(lively_target, None, prompt, chain(1), 24).tokens
    with head.adapted(lively_target):
        plain = generate(lively_target, None, prompt, chain(1), 24).tokens
        assert generate(lively_target, head, prompt, shape, 24).tokens == plain
    assert plain != bare


def test_a_measurement_is_of_the_adapted_target_and_says_so(tiny_target: Target) -> None:
    prompts = [Prompt([{"role": "user", "content": text}]) for text in ("hi", "the sea")]
    head = medusa(tiny_target, scale=0.15, lora=LORA)
    result = measure(tiny_target, HeadProposer(head, chain(2)), prompts, 20)

    def drafted() -> float:
        return tau([generate(tiny_target, head, prompt.ids(tiny_target), chain(2), 20) for prompt in prompts])

    bare = drafted()
    with head.adapted(tiny_target):
        assert result["tau"] == drafted() != bare
    assert result["lossless"] is True and result["lossless_to"] == "the target with the head's adapters"
    assert ("with respect to", "the target with the head's adapters") in report_rows(result)
    assert title(result).endswith("adapted target")
    plain = measure(tiny_target, HeadProposer(medusa(tiny_target), chain(2)), prompts, 8)
    assert plain["lossless_to"] == "the target" and "adapted" not in title(plain)


# -- what cannot be adapted ------------------------------------------------------------------------------------------


def causal_lm(config: Any) -> Target:
    return Target(AutoModelForCausalLM.from_config(config).float(), None, "another")


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        (
            lambda: llama(tie_word_embeddings=True),
            {"lora": {"modules": ["q_proj", "lm_head"]}},
            "ties lm_head to its embedding",
        ),
        (llama, {"lora": {"modules": ["lm_head"]}, "lm_head": "shared"}, "leave it out of lora.modules"),
        (llama, {"lora": {"modules": ["query"]}}, "name its linear modules in head.options.lora.modules"),
        (llama, {"lora": {"modules": ["embed_tokens"]}}, "embed_tokens of tiny is no linear module"),
        (lambda: causal_lm(GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4)), {"lora": {}}, "do not fit another"),
        (
            lambda: causal_lm(Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)),
            {"lora": {}},
            "experts of another is no linear",
        ),
    ],
    ids=["tied", "shared", "unknown", "embedding", "gpt2", "experts"],
)
def test_what_cannot_be_adapted_is_refused_and_left_alone(target: Callable[[], Target], options: dict, said: str) -> None:
    found = target()
    before = anatomy(found)
    with pytest.raises(UserError, match=said):
        MedusaHead.create(found, MedusaOptions(**options), None, DEPTHS, torch.arange(128))
    assert anatomy(found) == before


def test_gpt2s_turned_around_layers_are_adapted(tmp_path: Path) -> None:
    target = causal_lm(GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    head = medusa(target, lora={**LORA, "modules": "all-linear"})
    out = export(head, target, "vllm-merged", tmp_path / "out", DEPTHS)
    with head.adapted(target):
        torch.testing.assert_close(last(from_disk(out / "target")), last(target), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: causal_lm(GPT2Config(vocab_size=128, n_embd=32, n_layer=4, n_head=4)), "do not fit another"),
        (lambda: causal_lm(PhiConfig(**SIZES)), "another has not the linear modules"),
        (lambda: llama(intermediate_size=96), "tiny has not the linear modules"),
    ],
    ids=["no module", "fewer modules", "wider modules"],
)
def test_a_target_of_another_build_is_refused_and_left_alone(other: Callable[[], Target], said: str) -> None:
    """One whose hidden size, vocabulary and depth agree, as --force lets through."""
    head, found = medusa(llama(), lora={**LORA, "modules": ["q_proj", "gate_proj"]}), other()
    before = anatomy(found)
    with pytest.raises(UserError, match=said), head.adapted(found):
        pass
    assert anatomy(found) == before


def test_a_target_with_adapters_of_its_own_is_refused() -> None:
    target, other = llama(), llama()
    head = medusa(target, lora=LORA)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), other.model)
    with pytest.raises(UserError, match="carries adapters already"), head.adapted(other):
        pass


@pytest.mark.parametrize(
    "options", [{"heads_lr": 2.0}, {"lora": {"rank": 0}}, {"lora": {"modules": []}}, {"lora": {"ranks": 4}}, {"lora": 8}]
)
def test_wrong_options(options: dict) -> None:
    with pytest.raises(ValidationError):
        MedusaOptions.model_validate(options)
    assert MedusaOptions.model_validate({"lora": {}}).lora.modules == LINEAR  # type: ignore[union-attr]


# -- exports ---------------------------------------------------------------------------------------------------------

FILES = {
    "vllm": "model.safetensors",
    "vllm-merged": "model.safetensors",
    "tgi": "medusa_lm_head.safetensors",
    "tensorrt-llm-legacy": "medusa_lm_head.pt",
}


def stored(directory: Path, engine: str) -> dict[str, Tensor]:
    path = directory / FILES[engine]
    return torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path)


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def identical(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("engine", ["tgi", "tensorrt-llm-legacy"])
def test_the_references_names_and_config(engine: str, blocks: int, tmp_path: Path) -> None:
    target = llama()
    head = medusa(target, blocks=blocks)
    out = export(head, target, engine, tmp_path / "out", draft_length=2)
    expected: dict[str, tuple[int, ...]] = {f"{i}.{blocks}.weight": (128, 32) for i in range(DEPTHS)}
    for i in range(DEPTHS):
        expected |= {f"{i}.{j}.linear.weight": (32, 32) for j in range(blocks)}
        expected |= {f"{i}.{j}.linear.bias": (32,) for j in range(blocks)}
    assert {name: tuple(tensor.shape) for name, tensor in stored(out, engine).items()} == expected
    found = config_of(out)
    assert (found["medusa_num_heads"], found["medusa_num_layers"], found["base_model_name_or_path"]) == (DEPTHS, blocks, "tiny")
    assert "architectures" not in found and "version" not in found  # with one TGI takes the directory for a whole model's
    assert sorted(path.name for path in out.iterdir()) == ["config.json", FILES[engine]]
    again = read(engine, "medusa", out, target)
    identical(again.state_dict(), head.state_dict())


def test_shared_output_heads_in_the_references_layout(tmp_path: Path) -> None:
    """TGI's second version holds no output heads; TensorRT-LLM wants one for every head, which its file holds once."""
    target = llama()
    head = medusa(target, lm_head="shared")
    tgi = export(head, target, "tgi", tmp_path / "tgi", DEPTHS)
    assert set(stored(tgi, "tgi")) == {f"{i}.0.linear.{part}" for i in range(DEPTHS) for part in ("weight", "bias")}
    trt = export(head, target, "tensorrt-llm-legacy", tmp_path / "trt", DEPTHS)
    found = stored(trt, "tensorrt-llm-legacy")
    assert all(torch.equal(found[f"{i}.1.weight"], target.output_head.weight) for i in range(DEPTHS))
    assert len({found[f"{i}.1.weight"].data_ptr() for i in range(DEPTHS)}) == 1
    for engine, out in (("tgi", tgi), ("tensorrt-llm-legacy", trt)):
        again = read(engine, "medusa", out, target)
        assert again.options.lm_head == "shared" and config_of(out)["version"] == "2"
        identical(again.state_dict(), head.state_dict())
    with pytest.raises(UserError, match="one residual block alone"):
        export(medusa(target, lm_head="shared", blocks=2), target, "tgi", tmp_path / "more", DEPTHS)


@pytest.mark.parametrize("engine", ["vllm", "tgi", "tensorrt-llm-legacy"])
def test_a_reduced_vocabulary_comes_back(engine: str, tmp_path: Path) -> None:
    target = llama()
    head = medusa(target, size=40)
    out = export(head, target, engine, tmp_path / "out", DEPTHS)
    identical(read(engine, "medusa", out, target).state_dict(), head.state_dict())
    x = last(target)[0]
    found = stored(out, engine)
    rows = found["lm_heads.1.weight" if engine == "vllm" else "1.1.weight"]
    ours = head.target_ids[head.guess(1, x, target).logits.argmax(-1)]
    assert torch.equal((head.blocks[1](x) @ rows.T).argmax(-1), ours)


def test_vllm_is_told_of_biases_where_there_are_some(tmp_path: Path) -> None:
    target = llama()
    fresh = export(medusa(target, scale=0.0), target, "vllm", tmp_path / "fresh", DEPTHS)
    trained = export(medusa(target), target, "vllm", tmp_path / "trained", DEPTHS)
    for out, has in ((fresh, False), (trained, True)):
        assert config_of(out)["medusa_fc_bias"] is has
        assert any(name.endswith(".bias") for name in stored(out, "vllm")) is has


@pytest.mark.parametrize("engine", FILES)
@pytest.mark.parametrize("size", [40, 128])
def test_medusa_2_travels_with_its_adapter_or_its_merged_target(engine: str, size: int, tmp_path: Path) -> None:
    target = llama()
    head = medusa(target, size=size, lora=LORA)
    out = export(head, target, engine, tmp_path / "out", DEPTHS)
    merged = engine != "vllm"
    assert {path.name for path in out.iterdir()} == {"config.json", FILES[engine], "adapter"} | (
        {"target"} if merged else set()
    )
    assert not any("lora" in name for name in stored(out, engine))
    with head.adapted(target):
        adapted, logits = last(target), target.model(IDS).logits
    carried = PeftModel.from_pretrained(copy.deepcopy(target.model), str(out / "adapter"))
    torch.testing.assert_close(carried(IDS).logits, logits, rtol=1e-6, atol=1e-6)
    again: Any = read(engine, "medusa", out, target)
    if not merged:
        assert again.options == head.options and again.config.layer == head.config.layer
        identical(again.state_dict(), head.state_dict())
        with again.adapted(target):
            assert torch.equal(last(target), adapted)
        assert import_head(out, target).adapts
        return
    served = from_disk(out / "target")
    torch.testing.assert_close(served.model(IDS).logits, logits, rtol=1e-5, atol=1e-5)
    assert served.fingerprint == target.fingerprint and not again.adapts
    if engine == "tgi":
        assert config_of(out)["base_model_name_or_path"] == "target"
    with head.adapted(target):
        ours = generate(target, head, [5, 6, 7], chain(DEPTHS), 20)
    theirs = generate(served, read(engine, "medusa", out, served), [5, 6, 7], chain(DEPTHS), 20)
    assert (theirs.tokens, theirs.accepted) == (ours.tokens, ours.accepted)


def test_an_adapted_output_head_is_merged_too(tmp_path: Path) -> None:
    target = llama()
    head = medusa(target, lora={**LORA, "modules": ["v_proj", "lm_head"]})
    out = export(head, target, "vllm-merged", tmp_path / "out", DEPTHS)
    with head.adapted(target):
        torch.testing.assert_close(from_disk(out / "target").model(IDS).logits, target.model(IDS).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(target.output_head.weight, llama().output_head.weight)


def test_adapter_files_are_as_peft_names_them(tmp_path: Path) -> None:
    target = llama()
    out = export(medusa(target, lora={**LORA, "modules": ["q_proj", "down_proj"]}), target, "vllm", tmp_path / "out", DEPTHS)
    names = load_file(out / "adapter" / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.{}.{}.lora_{}.weight"
    assert names.keys() == {
        layer.format(i, module, half) for i in range(4) for module in ("self_attn.q_proj", "mlp.down_proj") for half in "AB"
    }
    assert names[layer.format(0, "mlp.down_proj", "A")].shape == (4, 64)
    found = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (found["r"], found["lora_alpha"], found["peft_type"], found["bias"]) == (4, 8.0, "LORA", "none")
    assert found["target_modules"] == ["down_proj", "q_proj"] and found["base_model_name_or_path"] == "tiny"


def test_a_confidence_stays_behind(tmp_path: Path) -> None:
    """No engine reads one beside Medusa heads."""
    target = llama()
    head = MedusaHead.create(target, MedusaOptions(), None, DEPTHS, torch.arange(128), confidence=True)
    for engine in ("vllm", "tgi"):
        assert not any("confidence" in name for name in stored(export(head, target, engine, tmp_path / engine, 2), engine))


def test_there_is_nothing_to_merge_in_medusa_1(tmp_path: Path) -> None:
    target = llama()
    with pytest.raises(UserError, match="nothing to merge: export it to vllm"):
        export(medusa(target), target, "vllm-merged", tmp_path / "out", DEPTHS)
    assert not list(tmp_path.iterdir())


def test_a_bfloat16_target_takes_a_merged_adapter(tmp_path: Path) -> None:
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    target = Target(model.to(torch.bfloat16), None, "tiny")
    out = export(medusa(target, lora=LORA), target, "tgi", tmp_path / "out", DEPTHS)
    assert {tensor.dtype for tensor in load_file(out / "target" / "model.safetensors").values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in load_file(out / "adapter" / "adapter_model.safetensors").values()} == {torch.float32}


# -- published checkpoints -------------------------------------------------------------------------------------------


def reference(heads: int, blocks: int = 1, own: bool = True, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """Tensors by the names and shapes of the Medusa repository's published files."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for i in range(heads):
        for j in range(blocks):
            found[f"{i}.{j}.linear.weight"] = torch.randn(32, 32, generator=generator)
            found[f"{i}.{j}.linear.bias"] = torch.randn(32, generator=generator)
        if own:
            found[f"{i}.{blocks}.weight"] = torch.randn(128, 32, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def published(directory: Path, file: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    torch.save(tensors, directory / file) if file.endswith(".pt") else save_file(tensors, directory / file)
    return directory


CONFIG = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 5, "medusa_num_layers": 1}


@pytest.mark.parametrize(
    ("file", "engine"), [("medusa_lm_head.pt", "tensorrt-llm-legacy"), ("medusa_lm_head.safetensors", "tgi")]
)
@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (CONFIG, reference(5)),
        (CONFIG | {"medusa_num_heads": 2}, reference(5)),  # as the first published config has it, beside a file of five
        ({"medusa_num_heads": 3, "medusa_num_layers": 2}, reference(3, blocks=2, dtype=torch.float32)),
        ({"medusa_num_heads": 4}, reference(4, dtype=torch.bfloat16)),
    ],
    ids=["v1", "fewer in config", "two blocks", "no layers key"],
)
def test_published_heads_come_back_byte_by_byte(
    file: str, engine: str, config: dict, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    target = llama()
    directory = published(tmp_path / "published", file, config, tensors)
    for head in (read(engine, "medusa", directory, target), import_head(directory, target)):
        assert head.kind == "medusa" and head.options.lm_head == "own"
        out = export(head, target, engine, tmp_path / "again", head.config.depths, force=True)
        identical(stored(out, engine), tensors)
    assert generate(target, import_head(directory, target).float(), [5, 6, 7], chain(2), 9).tokens


def test_published_heads_of_the_second_version(tmp_path: Path) -> None:
    target, tensors = llama(), reference(3, own=False)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "version": "2", "base_model_name_or_path": "a/b"}
    head = import_head(published(tmp_path / "in", "medusa_lm_head.safetensors", config, tensors), target)
    assert head.options.lm_head == "shared"
    identical(stored(export(head, target, "tgi", tmp_path / "out", 3), "tgi"), tensors)


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_a_checkpoint_of_target_and_heads_together(prefix: str, tmp_path: Path) -> None:
    """Published Medusa-2 models: the tuned target's tensors, and the heads' under a prefix."""
    target, tensors = llama(), reference(2, dtype=torch.float32)
    whole = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    whole |= {prefix + name: tensor for name, tensor in tensors.items()}
    config = {**LlamaConfig(**SIZES).to_dict(), "medusa_num_heads": 2, "medusa_num_layers": 1}
    head = import_head(published(tmp_path / "in", "model.safetensors", config, whole), target)
    identical(stored(export(head, target, "tgi", tmp_path / "out", 2), "tgi"), tensors)


@pytest.mark.parametrize("biased", [False, True])
def test_published_vllm_directories(biased: bool, tmp_path: Path) -> None:
    target = llama()
    tensors = {f"lm_heads.{i}.weight": torch.randn(128, 32).half() for i in range(3)}
    tensors |= {f"blocks.{i}.layers.0.weight": torch.randn(32, 32).half() for i in range(3)}
    if biased:
        tensors |= {f"blocks.{i}.layers.0.bias": torch.randn(32).half() for i in range(3)}
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 128}
    directory = published(tmp_path / "in", "model.safetensors", config | ({"medusa_fc_bias": True} if biased else {}), tensors)
    head = import_head(directory, target)
    identical(stored(export(head, target, "vllm", tmp_path / "out", 3), "vllm"), tensors)


def test_vllm_directories_with_the_references_names(tmp_path: Path) -> None:
    """vLLM reads them, too: by any key with num and heads, or num and layers, in it."""
    target, tensors = llama(), reference(3)
    config = {"model_type": "medusa", "medusa_num_heads": 3, "medusa_num_layers": 1, "medusa_fc_bias": True}
    head = read("vllm", "medusa", published(tmp_path / "in", "model.safetensors", config, tensors), target)
    again = stored(export(head, target, "tgi", tmp_path / "out", 3), "tgi")
    identical(again, tensors)


def swap(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, tensor) if tensor is not None else tensors.__delitem__(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap("1.0.linear.bias", None), r"'blocks\.1\.0\.linear\.bias' has shape None"),
        (swap("2.1.weight", None), r"'lm_heads\.2\.weight' has shape None"),
        (swap("0.0.linear.weight", torch.zeros(16, 16)), r"\(16, 16\).*\(32, 32\)"),
        (swap("0.1.weight", torch.zeros(64, 32)), r"\(64, 32\).*\(128, 32\)"),
        (swap("0.2.weight", torch.zeros(128, 32)), r"'0\.2\.weight' has no place in Medusa heads of 1"),
        (swap("0.1.linear.weight", torch.zeros(32, 32)), r"'0\.1\.linear\.weight' has no place"),
        (swap("stray", torch.zeros(1)), "'stray' has no place"),
        (swap("fc.0.linear.weight", torch.zeros(32, 32)), r"'fc\.0\.linear\.weight' has no place"),
    ],
    ids=["bias", "lm_head", "hidden size", "vocabulary", "misnumbered", "third block", "stray", "no number"],
)
def test_mismatches_are_named(change: Callable[[dict[str, Tensor]], None], said: str, tmp_path: Path) -> None:
    tensors = reference(3)
    change(tensors)
    directory = published(tmp_path / "in", "medusa_lm_head.pt", CONFIG | {"medusa_num_heads": 3}, tensors)
    with pytest.raises(UserError, match=said):
        import_head(directory, llama())


def test_more_heads_than_there_are_and_another_targets_are_refused(tmp_path: Path) -> None:
    directory = published(tmp_path / "in", "medusa_lm_head.pt", CONFIG, reference(3))
    with pytest.raises(UserError, match="asks for 5 heads and its tensors hold 3"):
        import_head(directory, llama())
    target = llama()
    out = export(medusa(target, lm_head="shared"), target, "tensorrt-llm-legacy", tmp_path / "out", DEPTHS)
    other = llama()
    with torch.no_grad():
        other.output_head.weight.add_(1)
    with pytest.raises(UserError, match="belongs to another target"):
        read("tensorrt-llm-legacy", "medusa", out, other)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    directory = published(tmp_path / "in", "medusa_lm_head.pt", CONFIG, reference(5))
    path = directory / "medusa_lm_head.pt"
    path.write_bytes(path.read_bytes()[:1000])
    for reading in (lambda: read("tensorrt-llm-legacy", "medusa", directory, llama()), lambda: import_head(directory, llama())):
        with pytest.raises(UserError, match=r"medusa_lm_head\.pt cannot be read"):
            reading()


def test_every_engine_of_medusa_is_tested_here() -> None:
    assert {name for name, engine in ENGINES.items() if "medusa" in engine.layouts} == set(FILES)
