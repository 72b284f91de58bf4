"""EAGLE-3 with several layers, its directories engine by engine, and published heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_head
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from draftsmith.errors import UserError
from draftsmith.heads.eagle3 import Eagle3Head, Eagle3Options
from draftsmith.heads.engines.published import import_head
from draftsmith.heads.engines.registry import export, exports, read
from draftsmith.target import Target


def some_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 111, shape, generator=torch.Generator().manual_seed(seed))


# -- several layers ------------------------------------------------------------------------------------------------


def drafted_from_scratch(head: Any, ids: Tensor, taps: Tensor, target: Target, row: int, depth: int) -> Tensor:
    """The logits of depth ``depth`` behind ``row``: a whole forward for every draft, further layers by transformers."""
    config: Any = LlamaConfig(**head.config.layer)
    config._attn_implementation = "eager"
    further = [LlamaDecoderLayer(config, i) for i in range(len(head.further))]
    for layer, own in zip(further, head.further, strict=True):
        layer.load_state_dict(own.state_dict())
    features, first, normed = head.fuse(taps[: row + 1]), head.layer, None
    for step in range(depth + 1):
        embeds = target.embed(ids[1 : row + 2 + step])
        time = len(embeds)
        mask = torch.full((time, time), float("-inf")).triu(1)[None, None]
        rotary = head.rotary(embeds[None], torch.arange(time)[None])
        read = torch.cat([first.input_layernorm(embeds), first.hidden_norm(features)], -1)[None]
        q, k, v = first.self_attn.project(read, rotary)
        k, v = (x.repeat_interleave(first.self_attn.heads // first.self_attn.kv_heads, 1) for x in (k, v))
        weights = (q @ k.transpose(-1, -2) * first.self_attn.dim**-0.5 + mask).softmax(-1)
        hidden = features[None] + first.self_attn.o_proj((weights @ v).transpose(1, 2).flatten(2))
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer in further:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
        normed = head.norm(hidden[0, -1:])
        features = torch.cat([features, normed if head.options.norm_output else hidden[0, -1:]])
    return head.lm_head(normed)[0]


@pytest.mark.parametrize("case", ["eagle3-layers", "eagle3-layers-warm"])
@torch.no_grad()
def test_further_layers_are_plain_ones(tiny_target: Target, case: str) -> None:
    head: Any = make_head(tiny_target, case)
    assert len(head.further) == head.options.layers - 1 > 0
    ids = some_ids(1, 9)
    features = tiny_target.features(ids, head.config.taps)
    rows = head.taught(ids, torch.ones_like(ids, dtype=torch.bool), 0)
    for i, depth in enumerate(head.predict(ids, rows, features, tiny_target)):
        for row, logits in zip(depth.rows.tolist(), depth.logits, strict=True):
            expected = drafted_from_scratch(head, ids[0], features.taps[0], tiny_target, row, i)
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_warm_layers_are_the_targets_last_ones_in_their_order() -> None:
    target = llama()
    options = Eagle3Options(layers=3, init_lm_head="random")
    head: Any = Eagle3Head.create(target, options, None, 3, torch.arange(40))
    for layer, own in zip((head.layer, *head.further), target.layers[-3:], strict=True):
        assert torch.equal(layer.mlp.up_proj.weight, own.mlp.up_proj.weight)  # type: ignore[union-attr]
    assert torch.equal(head.layer.self_attn.q_proj.weight[:, 32:], target.layers[-3].self_attn.q_proj.weight)  # type: ignore[union-attr]
    short: Any = Eagle3Head.create(llama(num_hidden_layers=6), Eagle3Options(layers=8), None, 3, torch.arange(40))
    assert torch.equal(short.layer.mlp.up_proj.weight, short.further[1].mlp.up_proj.weight)  # it has but six to copy


def test_a_head_of_one_layer_saved_before_there_were_more_is_one_of_one_layer() -> None:
    assert Eagle3Options.model_validate({"norm_output": True}).layers == 1
    assert {name.split(".")[0] for name in make(llama()).state_dict()} == {"target_ids", "fc", "layer", "norm", "lm_head"}


# -- engines -------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
REST = {
    "self_attn.o_proj": (32, 32), "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64),
    "post_attention_layernorm": (32,), "input_layernorm": (32,),
}  # fmt: skip
FIRST = REST | {
    "self_attn.q_proj": (32, 64), "self_attn.k_proj": (16, 64), "self_attn.v_proj": (16, 64), "hidden_norm": (32,),
}  # fmt: skip
SECOND = REST | {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32)}
AROUND = {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (40, 32), "d2t": (40,), "t2d": (128,)}


def named(prefix: str, layer: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}.weight": shape for name, shape in layer.items()}


SINGLE = AROUND | named("midlayer.", FIRST)
NUMBERED = AROUND | named("layers.0.", FIRST) | named("layers.1.", SECOND)
BOTH_NORMS = NUMBERED | {"layers.1.hidden_norm.weight": (32,)}


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> Target:
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES | changes, bos_token_id=1, eos_token_id=2))
    return Target(model.to(dtype), None, "tiny")


def make(target: Target, taps: list[int] | None = None, size: int = 40, **options: Any) -> Eagle3Head:
    """A head whose every weight is random."""
    torch.manual_seed(0)
    ids = torch.arange(0, 3 * size, 3) if size < 128 else torch.arange(128)
    settings = Eagle3Options(init_layer="random", init_lm_head="random", **options)
    head = Eagle3Head.create(target, settings, taps, 3, ids)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return head.eval()


def config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}


@pytest.mark.parametrize(
    ("engine", "one", "two"),
    [
        ("vllm", SINGLE, BOTH_NORMS),
        ("sglang", SINGLE, BOTH_NORMS),
        ("tensorrt-llm", SINGLE, BOTH_NORMS),
        ("speculators", AROUND | named("layers.0.", FIRST), NUMBERED),
        ("llamacpp", SINGLE, None),
    ],
)
def test_names_shapes_and_the_way_back(engine: str, one: dict, two: dict | None, tmp_path: Path) -> None:
    target = llama()
    for layers, names in ((1, one), (2, two)):
        head = make(target, layers=layers)
        if names is None:
            with pytest.raises(UserError, match="llama.cpp runs heads of one layer, and this one has 2"):
                export(head, target, engine, tmp_path / "two", draft_length=3)
            continue
        out = export(head, target, engine, tmp_path / str(layers), draft_length=3)
        assert shapes(out) == names
        again: Any = read(engine, "eagle3", out, target)
        assert again.config.taps == head.config.taps and again.options.layers == layers
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in head.state_dict().items())
        tensors = load_file(out / "model.safetensors")
        if "layers.1.hidden_norm.weight" in names:
            assert torch.equal(tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"])


def test_the_engines() -> None:
    assert {"vllm", "speculators", "sglang", "tensorrt-llm", "llamacpp"} <= set(exports("eagle3"))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llamacpp", "speculators"])
def test_other_taps_come_back_from_every_directory(engine: str, tmp_path: Path) -> None:
    target = llama()
    out = export(make(target, taps=[1, 3, 6]), target, engine, tmp_path / "out", draft_length=3)
    head: Any = read(engine, "eagle3", out, target)
    assert head.config.taps == [1, 3, 6]
    if engine == "speculators":
        return
    assert import_head(out, target).config.taps == [1, 3, 6]  # and its config tells how to read them
    found = config(out)
    assert found["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]  # inputs of layers
    assert found["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]  # outputs of layers
    assert found["draftsmith"].get("eagle3_layers_to_capture") == ([0, 2, 5] if engine == "tensorrt-llm" else None)
    assert found["draft_vocab_size"] == 40 and found["norm_before_residual"] is False


def test_the_default_taps_need_no_key(tmp_path: Path) -> None:
    target = llama()
    for engine in ("vllm", "sglang", "tensorrt-llm", "llamacpp"):
        found = config(export(make(target), target, engine, tmp_path / engine, draft_length=3))
        assert not {"eagle_aux_hidden_state_layer_ids", "eagle_config"} & found.keys()
    assert found["draftsmith"]["draft_length"] == 3


def test_norm_before_fc_stands_where_each_engine_looks(tmp_path: Path) -> None:
    target = llama()
    found = config(export(make(target, norm_before_fc=True), target, "vllm", tmp_path / "out", draft_length=3))
    assert found["norm_before_fc"] is True and found["eagle_config"] == {"norm_before_fc": True}


@pytest.mark.parametrize(
    ("engine", "options", "said"),
    [
        ("sglang", {"norm_before_residual": True}, "SGLang has no norm_before_residual"),
        ("tensorrt-llm", {"norm_before_residual": True}, "TensorRT-LLM has no norm_before_residual"),
        ("sglang", {"taps": [0, 3, 6]}, "SGLang cannot read tap 0, the embedding"),
        ("tensorrt-llm", {"taps": [0, 3, 6]}, "TensorRT-LLM cannot read tap 0"),
        ("sglang", {"taps": [2, 3, 8]}, "SGLang cannot read tap 8, the last layer's output"),
        ("llamacpp", {"taps": [2, 4]}, "exactly 3 taps, and this head has 2"),
        ("llamacpp", {"fc_norm": True}, "llama.cpp knows no fc_norm"),
        ("llamacpp", {"norm_output": True}, "llama.cpp knows no norm_output"),
    ],
)
def test_what_an_engine_lacks_is_refused_with_the_mend(engine: str, options: dict, said: str, tmp_path: Path) -> None:
    target = llama()
    with pytest.raises(UserError, match=said) as raised:
        export(make(target, **options), target, engine, tmp_path / "out", draft_length=3)
    assert "export" in str(raised.value) and not list(tmp_path.iterdir())


def test_targets_that_llamacpp_cannot_tap_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(1)
    target = Target(Qwen2ForCausalLM(Qwen2Config(**SIZES)).float(), None, "tinyq")
    with pytest.raises(UserError, match="no features of a Qwen2ForCausalLM"):
        export(make(target), target, "llamacpp", tmp_path / "out", draft_length=3)


def test_a_confidence_estimate_stays_at_home(tmp_path: Path) -> None:
    target = llama()
    options = Eagle3Options(init_layer="random")
    head = Eagle3Head.create(target, options, None, 3, torch.arange(0, 120, 3), confidence=True)
    assert shapes(export(head, target, "vllm", tmp_path / "out", draft_length=3)) == SINGLE


# -- published heads -----------------------------------------------------------------------------------------------

PAPERS: dict[str, Any] = {  # the keys of the paper's repository: no target_hidden_size, no flags, no RoPE
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 32,
    "initializer_range": 0.02, "intermediate_size": 64, "max_position_embeddings": 64, "model_type": "llama",
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.28.1", "use_cache": True,
    "vocab_size": 128, "draft_vocab_size": 40,
}  # fmt: skip
SPECFORGES: dict[str, Any] = PAPERS | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "rope_theta": 500000.0,
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "draft_vocab_size": 40,
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny"},
    },
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": {key: SPECFORGES[key] for key in SIZES} | {"num_hidden_layers": 2, "rope_theta": 500000.0},
}


def published(tmp_path: Path, target: Target, config: dict[str, Any], names: dict, change: Any = None) -> Path:
    generator = torch.Generator().manual_seed(4)
    tensors = {name: (0.2 * torch.randn(shape, generator=generator)).to(target.dtype) for name, shape in names.items()}
    ids = torch.arange(0, 120, 3)
    maps = {"d2t": ids - torch.arange(40), "t2d": torch.zeros(128, dtype=torch.bool).index_fill(0, ids, True)}
    tensors |= {name: tensor for name, tensor in maps.items() if name in names}
    if change:
        change(tensors, target)
    tmp_path.mkdir(exist_ok=True)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def with_embedding(tensors: dict[str, Tensor], target: Target) -> None:
    tensors["embed_tokens.weight"] = target.embed.get_parameter("weight").detach().clone()


@pytest.mark.parametrize(
    ("layout", "names", "engine", "taps", "theta", "residual", "length"),
    [
        (PAPERS, SINGLE, "vllm", [2, 4, 5], 10000.0, False, 5),
        (SPECFORGES, SINGLE, "sglang", [2, 4, 7], 500000.0, False, 5),
        (SPECULATORS, NUMBERED, "speculators", [2, 4, 5], 500000.0, True, 3),
    ],
    ids=["paper", "specforge", "speculators"],
)
def test_published_heads_are_read_and_written_again_byte_for_byte(
    layout: dict, names: dict, engine: str, taps: list[int], theta: float, residual: bool, length: int, tmp_path: Path
) -> None:
    target = llama(torch.bfloat16)
    source = published(tmp_path / "source", target, layout, names, with_embedding)
    head: Any = import_head(source, target)
    assert (head.kind, head.config.taps, head.config.depths) == ("eagle3", taps, length)
    assert head.config.layer["rope_parameters"]["rope_theta"] == theta
    assert head.options.norm_before_residual is residual and not head.options.norm_before_fc
    out = export(head, target, engine, tmp_path / "out", draft_length=3)
    theirs, ours = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert ours.keys() == theirs.keys() - {"embed_tokens.weight"}
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), (
            name
        )


def test_automodels_head_is_the_same_head_under_its_own_names(tmp_path: Path) -> None:
    """All but lm_head and maps under ``model.``, the layer as layers.0, and a config that counts the target's layers."""
    target = llama()
    plain: Any = import_head(published(tmp_path / "plain", target, SPECFORGES, SINGLE), target)

    def renamed(tensors: dict[str, Tensor], _: Target) -> None:
        for name in [name for name in tensors if name.split(".")[0] in ("midlayer", "fc", "norm")]:
            tensors["model." + name.replace("midlayer", "layers.0")] = tensors.pop(name)

    config = SPECFORGES | {"architectures": ["LlamaEagle3DraftModel"], "num_hidden_layers": 8}
    head: Any = import_head(published(tmp_path / "named", target, config, SINGLE, renamed), target)
    assert head.config == plain.config
    for name, tensor in plain.state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor), name


def test_a_published_head_may_leave_things_out(tmp_path: Path) -> None:
    """No t2d, no draft_vocab_size, head_dim or norm's epsilon, and maps and heads that a whole vocabulary does not need."""
    target = llama()
    silent = {
        key: value for key, value in SPECFORGES.items() if key not in ("draft_vocab_size", "rms_norm_eps", "eagle_config")
    }
    head: Any = import_head(published(tmp_path / "a", target, silent, SINGLE, lambda t, _: t.pop("t2d")), target)
    assert head.target_ids.tolist() == list(range(0, 120, 3)) and head.config.layer["head_dim"] == 8

    def whole(tensors: dict[str, Tensor], target: Target) -> None:
        del tensors["lm_head.weight"]
        tensors |= {"d2t": torch.zeros(128, dtype=torch.long), "t2d": torch.ones(128, dtype=torch.bool)}

    head = import_head(published(tmp_path / "b", target, silent, SINGLE, whole), target)
    assert torch.equal(head.lm_head.weight, target.output_head.weight) and len(head.target_ids) == 128


@pytest.mark.parametrize(("engine", "reads"), [("vllm", "input_layernorm"), ("sglang", "hidden_norm")])
def test_a_further_layers_norm_is_the_one_that_the_engine_reads(engine: str, reads: str, tmp_path: Path) -> None:
    target = llama()
    nested = SPECFORGES if engine == "sglang" else {key: value for key, value in SPECFORGES.items() if key != "eagle_config"}
    source = published(tmp_path, target, nested | {"num_hidden_layers": 2}, BOTH_NORMS)
    head: Any = import_head(source, target)
    theirs = load_file(source / "model.safetensors")
    assert torch.equal(head.further[0].input_layernorm.weight, theirs[f"layers.1.{reads}.weight"])


@pytest.mark.parametrize(
    ("change", "keys", "said"),
    [
        (lambda t, _: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}), {}, "q_norm"),
        (lambda t, _: t.pop("d2t"), {}, "no d2t tensor"),
        (lambda t, target: (with_embedding(t, target), t["embed_tokens.weight"].add_(1)), {}, "embed_tokens.weight is not"),
        (None, {"target_hidden_size": 64}, "target_hidden_size is 64"),
        (None, {"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4"),
        (None, {"vocab_size": 256}, "vocab_size is 256, and tiny has 128"),
        (None, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}}, "tap 10 is outside"),
        (None, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}, r"'fc\.weight' has shape \(32, 96\)"),
    ],
)
def test_what_is_odd_in_a_published_head_is_named(change: Any, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    target = llama()
    with pytest.raises(UserError, match=said):
        import_head(published(tmp_path, target, SPECFORGES | keys, SINGLE, change), target)


def test_every_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], target: Target) -> None:
        del tensors["norm.weight"]
        tensors |= {"stray.weight": torch.ones(2), "fc.weight": torch.ones(32, 64)}

    with pytest.raises(UserError) as raised:
        import_head(published(tmp_path, llama(), PAPERS, SINGLE, change), llama())
    for said in ("'norm.weight' has shape None", "'stray.weight' has shape (2,)", "'fc.weight' has shape (32, 64)"):
        assert said in str(raised.value)
