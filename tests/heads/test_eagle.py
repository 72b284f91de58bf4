"""EAGLE-1 and HASS: what every step reads, what it costs, how it starts, and its directories."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_head
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from draftsmith.errors import UserError
from draftsmith.heads.base import Depth
from draftsmith.heads.eagle import EagleHead, EagleOptions, stream_size
from draftsmith.heads.engines.published import import_head
from draftsmith.heads.engines.registry import export, exports, read
from draftsmith.target import Features, Target


def some_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 111, shape, generator=torch.Generator().manual_seed(seed))


def predicted(head: EagleHead, ids: Tensor, features: Features, target: Target) -> list[Depth]:
    return head.predict(ids, head.taught(ids, torch.ones_like(ids, dtype=torch.bool), 0), features, target)


# -- the steps -----------------------------------------------------------------------------------------------------


def drafted_from_scratch(head: Any, ids: Tensor, last: Tensor, target: Target, row: int, depth: int) -> Tensor:
    """The output of depth ``depth`` behind ``row``, by transformers' own layers and a whole forward for every draft."""
    config: Any = LlamaConfig(**head.config.layer)
    config._attn_implementation = "eager"
    layers = [LlamaDecoderLayer(config, i) for i in range(len(head.stack))]
    layers[0].input_layernorm = nn.Identity()  # type: ignore[assignment]
    for layer, own in zip(layers, head.stack, strict=True):
        layer.load_state_dict(own.state_dict())
    features = last[: row + 1]
    for step in range(depth + 1):
        embeds = target.embed(ids[1 : row + 2 + step])
        hidden = head.fc(torch.cat([embeds, features], -1))[None]
        mask = torch.full((len(embeds), len(embeds)), float("-inf")).triu(1)[None, None]
        for layer in layers:
            rotary = head.rotary(hidden, torch.arange(len(embeds))[None])
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
        features = torch.cat([features, hidden[0, -1:]])
    return features[-1]


@pytest.mark.parametrize("case", ["eagle", "eagle-through"])
@torch.no_grad()
def test_a_step_sees_the_true_features_and_its_own_drafts_and_nothing_else(tiny_target: Target, case: str) -> None:
    """Where HASS's published mask let some of the softmax fall on hidden keys, every row here drafts as if alone."""
    head: Any = make_head(tiny_target, case)
    ids = some_ids(1, 9)
    features = tiny_target.features(ids, [])
    for i, depth in enumerate(predicted(head, ids, features, tiny_target)):
        assert len(depth.rows) == 9 - 2 - i
        for row, state in zip(depth.rows.tolist(), depth.states, strict=True):
            expected = drafted_from_scratch(head, ids[0], features.last[0], tiny_target, row, i)
            torch.testing.assert_close(state, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


def make(target: Target, depths: int = 3, size: int = 128, **options: Any) -> EagleHead:
    """A head whose every weight is random."""
    torch.manual_seed(0)
    head = EagleHead.create(target, EagleOptions(init_layer="random", **options), None, depths, torch.arange(size))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return head.eval()


def test_drafts_are_read_from_the_targets_head(tiny_target: Target) -> None:
    ids, head, small = some_ids(1, 8), make(tiny_target), make(tiny_target, size=40)
    small.target_ids.copy_(torch.arange(0, 120, 3))
    features = tiny_target.features(ids, [])
    for whole, reduced in zip(*(predicted(each, ids, features, tiny_target) for each in (head, small)), strict=True):
        assert torch.equal(whole.logits, tiny_target.logits(whole.states))
        assert torch.equal(reduced.logits, whole.logits[:, ::3][:, :40])


def test_a_row_costs_the_distance_to_the_targets_next_feature(tiny_target: Target) -> None:
    ids, head = some_ids(2, 8), make(tiny_target, feature_weight=3.0)
    features = tiny_target.features(ids, [])
    for i, depth in enumerate(predicted(head, ids, features, tiny_target)):
        for row, state, cost in zip(depth.rows.tolist(), depth.states, depth.extra, strict=True):  # type: ignore[arg-type]
            wanted = features.last[row // 8, row % 8 + 1 + i]
            torch.testing.assert_close(cost, 3.0 * F.smooth_l1_loss(state, wanted))
    assert all(depth.extra is None for depth in predicted(make(tiny_target, feature_weight=0.0), ids, features, tiny_target))


def test_detached_steps_differ_in_their_gradients_alone(tiny_target: Target) -> None:
    ids, heads = some_ids(1, 10), [make(tiny_target, detach=detach) for detach in (True, False)]
    features = tiny_target.features(ids, [])
    apart, through = (predicted(head, ids, features, tiny_target) for head in heads)
    for i, (one, other) in enumerate(zip(apart, through, strict=True)):
        assert torch.equal(one.states, other.states)
        slopes = [
            torch.autograd.grad(depth.states.sum(), head.layer.mlp.down_proj.weight, retain_graph=True)[0]
            for depth, head in zip((one, other), heads, strict=True)
        ]
        assert torch.equal(*slopes) is (i == 0)


def test_noise_is_small_uniform_and_only_while_training(tiny_target: Target) -> None:
    head = make(tiny_target, feature_noise=0.2)
    last = torch.randn(4, 50, 32)
    features = Features(last[..., :0], last)
    assert torch.equal(head.feature(features), last)
    head.train()
    shifts = head.feature(features) - last
    assert shifts.abs().max() <= 0.2 and shifts.abs().max() > 0.19 and shifts.mean().abs() < 0.01
    assert torch.equal(features.last, last)  # what is regressed on stays clean
    quiet = make(tiny_target, feature_noise=0.0).train()
    assert torch.equal(quiet.feature(features), last)


@torch.no_grad()
def test_a_warm_layer_does_in_the_features_units_what_the_targets_layer_does() -> None:
    target = llama(rms_norm_eps=1e-12)  # a stream this small would feel more
    target.final_norm.weight.fill_(1.7)  # type: ignore[union-attr]
    for layer in target.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):  # type: ignore[union-attr]
            norm.weight.add_(torch.randn(32) * 0.2)  # type: ignore[operator, union-attr]
    head: Any = EagleHead.create(target, EagleOptions(), None, 3, torch.arange(128))
    size = stream_size(target)
    stream = torch.randn(1, 6, 32)
    stream = stream / stream.square().mean(-1, keepdim=True).sqrt() * size
    rotary = head.rotary(stream, torch.arange(6)[None])
    theirs = target.layers[-1](stream, position_embeddings=rotary)
    entered, residual = head.layer.enter(1.7 * stream / size)
    q, k, v = head.layer.self_attn.project(entered, rotary)
    ours = head.layer.leave(residual, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    torch.testing.assert_close(ours, 1.7 * theirs / size, atol=1e-4, rtol=1e-3)
    assert torch.equal(head.fc.weight[:, 32:], 0.5 * torch.eye(32))


# -- its directories -----------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LAYER = {
    "self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32), "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64), "post_attention_layernorm": (32,),
}  # fmt: skip
NAMES = {"fc.weight": (32, 64)} | {f"layers.0.{name}.weight": shape for name, shape in LAYER.items()}
SECOND = {f"layers.1.{name}.weight": shape for name, shape in (LAYER | {"input_layernorm": (32,)}).items()}
BIAS = {"fc.bias": (32,)}


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> Target:
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=1, eos_token_id=2, **changes))
    return Target(model.to(dtype), None, "tiny")


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}


def config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("engine", "more"), [("vllm", {}), ("sglang", BIAS)])
def test_names_shapes_and_the_way_back(engine: str, more: dict[str, Any], layers: int, tmp_path: Path) -> None:
    target = llama()
    head = make(target, layers=layers)
    out = export(head, target, engine, tmp_path / "out", draft_length=3)
    assert shapes(out) == NAMES | more | (SECOND if layers == 2 else {})
    again: Any = read(engine, "eagle", out, target)
    assert {name: tensor.tolist() for name, tensor in again.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in head.state_dict().items()
    }
    found = config(out)
    assert found["architectures"] == [{"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}[engine]]
    assert found["model_type"] == "llama" and found["num_hidden_layers"] == layers and found["tie_word_embeddings"] is False
    assert not {"bias", "draft_vocab_size", "num_aux_hidden_states"} & found.keys()
    if more:
        assert not load_file(out / "model.safetensors")["fc.bias"].any()


def test_every_parameter_of_vllms_module_has_a_tensor(tmp_path: Path) -> None:
    """By the rules of vLLM 0.32's llama_eagle.py: no norm before the first layer, none behind the last, no head."""
    out = export(make(llama(), layers=2), llama(), "vllm", tmp_path / "out", draft_length=3)
    width, found = 32, config(out)
    parameters: dict[str, tuple[int, ...]] = {"model.fc.weight": (width, 2 * width)}
    for i in range(found["num_hidden_layers"]):
        q, kv = found["num_attention_heads"] * found["head_dim"], found["num_key_value_heads"] * found["head_dim"]
        layer = {"q_proj": (q, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (width, q)}
        parameters |= {f"model.layers.{i}.self_attn.{name}.weight": shape for name, shape in layer.items()}
        for name in ("gate_proj", "up_proj"):
            parameters[f"model.layers.{i}.mlp.{name}.weight"] = (found["intermediate_size"], width)
        parameters[f"model.layers.{i}.mlp.down_proj.weight"] = (width, found["intermediate_size"])
        for name in ("input_layernorm", "post_attention_layernorm")[i == 0 :]:
            parameters[f"model.layers.{i}.{name}.weight"] = (width,)
    assert {f"model.{name}": shape for name, shape in shapes(out).items()} == parameters


def test_a_trained_bias_is_kept_by_sglang_and_refused_for_vllm(tmp_path: Path) -> None:
    target, head = llama(), make(llama(), bias=True)
    with pytest.raises(UserError, match=r"vLLM drops an EAGLE-1 head's fc\.bias: export it for sglang"):
        export(head, target, "vllm", tmp_path / "vllm", draft_length=3)
    out = export(head, target, "sglang", tmp_path / "sglang", draft_length=3)
    assert torch.equal(load_file(out / "model.safetensors")["fc.bias"], head.fc.bias)
    with torch.no_grad():
        head.fc.bias.zero_()
    assert shapes(export(head, target, "vllm", tmp_path / "vllm", draft_length=3)) == NAMES  # zeros are none


def test_a_reduced_vocabulary_is_refused(tmp_path: Path) -> None:
    assert exports("eagle") == ["vllm", "sglang"]
    for engine in exports("eagle"):
        with pytest.raises(UserError, match=r"train it with head\.draft_vocab null"):
            export(make(llama(), size=40), llama(), engine, tmp_path / "out", draft_length=3)
    assert not list(tmp_path.iterdir())


def test_a_scaled_embedding_travels_to_vllm_and_is_refused_for_sglang(tmp_path: Path) -> None:
    torch.manual_seed(1)
    target = Target(GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=8)).float(), None, "tinyg")
    looked_up = target.embed(torch.arange(128))
    if torch.equal(looked_up, target.embed.get_parameter("weight")):
        pytest.skip("this release of transformers scales Gemma's embedding outside its layer")
    out = export(make(target), target, "vllm", tmp_path / "out", draft_length=3)
    assert torch.equal(load_file(out / "model.safetensors")["embed_tokens.weight"], looked_up)
    with pytest.raises(UserError, match="does more than look them up"):
        export(make(target), target, "sglang", tmp_path / "sglang", draft_length=3)


# -- published heads -----------------------------------------------------------------------------------------------

PUBLISHED: dict[str, Any] = {  # the keys of the paper's repository
    "architectures": ["LlamaForCausalLM"], "bias": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 64, "max_position_embeddings": 64,
    "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "pad_token_id": 0,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.28.1", "use_cache": True, "vocab_size": 128,
}  # fmt: skip


def published(tmp_path: Path, target: Target, change: Any = None, binary: bool = False, **keys: Any) -> Path:
    generator = torch.Generator().manual_seed(4)
    shape = NAMES | BIAS
    tensors = {name: (0.2 * torch.randn(size, generator=generator)).to(target.dtype) for name, size in shape.items()}
    tensors["embed_tokens.weight"] = target.embed.get_parameter("weight").detach().clone()
    if change:
        change(tensors)
    tmp_path.mkdir(exist_ok=True)
    if binary:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | keys))
    return tmp_path


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_papers_heads_are_read_and_written_again_byte_for_byte(binary: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    target = llama(dtype)
    source = published(tmp_path / "source", target, binary=binary)
    head: Any = import_head(source, target)
    assert (head.kind, head.options.bias, head.config.depths, head.config.taps) == ("eagle", True, 5, [])
    assert head.config.layer["rope_parameters"]["rope_theta"] == 10000.0
    out = export(head, target, "sglang", tmp_path / "out", draft_length=5)
    theirs: dict[str, Tensor] = torch.load(source / "pytorch_model.bin") if binary else load_file(source / "model.safetensors")
    ours = load_file(out / "model.safetensors")
    assert ours.keys() == theirs.keys() - {"embed_tokens.weight"}
    for name, tensor in ours.items():
        assert tensor.dtype == dtype and torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


def test_a_published_head_computes_what_its_tensors_say(tmp_path: Path) -> None:
    """Its fc's bias counts, and RoPE has the base that its config names."""
    target = llama()
    head: Any = import_head(published(tmp_path, target, rope_theta=500000.0), target)
    theirs = load_file(tmp_path / "model.safetensors")
    ids = some_ids(1, 5)
    last = target.features(ids, []).last
    sizes: Any = LlamaConfig(**SIZES, rms_norm_eps=1e-5)
    sizes._attn_implementation = "eager"
    layer = LlamaDecoderLayer(sizes, 0)
    layer.input_layernorm = nn.Identity()  # type: ignore[assignment]
    own = {name.removeprefix("layers.0."): tensor for name, tensor in theirs.items() if name.startswith("layers.0.")}
    layer.load_state_dict(own)
    frequencies = 500000.0 ** -(torch.arange(0, 8, 2) / 8)
    angles = torch.arange(4)[:, None] * torch.cat([frequencies, frequencies])
    entered = torch.cat([target.embed(ids[:, 1:]), last[:, :4]], -1) @ theirs["fc.weight"].T + theirs["fc.bias"]
    mask = torch.full((4, 4), float("-inf")).triu(1)[None, None]
    expected = layer(entered, attention_mask=mask, position_embeddings=(angles.cos()[None], angles.sin()[None]))
    ours = predicted(head, ids, target.features(ids, []), target)[0]
    torch.testing.assert_close(ours.states, expected[0, ours.rows], atol=1e-4, rtol=1e-4)


def test_zeros_are_no_bias_and_old_files_frequencies_no_tensor(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["fc.bias"].zero_()
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    target = llama()
    head: Any = import_head(published(tmp_path / "source", target, change), target)
    assert not head.options.bias
    assert shapes(export(head, target, "vllm", tmp_path / "out", draft_length=5)) == NAMES


@pytest.mark.parametrize(
    ("change", "keys", "said"),
    [
        (lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(32)}), {}, "input_layernorm"),
        (lambda t: t.update({"norm.weight": torch.ones(32)}), {}, r"norm\.weight"),
        (lambda t: t.pop("fc.weight"), {}, r"'fc\.weight' has shape None"),
        (lambda t: t["embed_tokens.weight"].add_(1), {}, r"embed_tokens\.weight is not what tiny's embedding gives"),
        (None, {"vocab_size": 256}, "vocab_size is 256, and tiny has 128"),
        (None, {"hidden_size": 64}, "hidden_size is 64, and tiny has 32"),
        (None, {"num_hidden_layers": 2, "architectures": ["LlamaForCausalLMEagle"]}, r"further\.0"),
    ],
)
def test_what_is_odd_in_a_published_head_is_named(change: Any, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    target = llama()
    with pytest.raises(UserError, match=said):
        import_head(published(tmp_path, target, change, **keys), target)
