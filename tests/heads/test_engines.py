"""Exports: the names, shapes and fields of every layout, the way back, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from draftsmith.errors import UserError
from draftsmith.heads.base import Depth, DraftHead
from draftsmith.heads.eagle3 import Eagle3Head, Eagle3Options
from draftsmith.heads.engines.registry import ENGINES, export, exports, read
from draftsmith.heads.kinds import KINDS
from draftsmith.heads.medusa import MedusaHead, MedusaOptions
from draftsmith.target import Target

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
EAGLE3_NAMES = {
    "fc.weight": (32, 96),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.post_attention_layernorm.weight": (32,),
    "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.k_proj.weight": (16, 64),
    "midlayer.self_attn.v_proj.weight": (16, 64),
    "midlayer.self_attn.o_proj.weight": (32, 32),
    "midlayer.mlp.gate_proj.weight": (64, 32),
    "midlayer.mlp.up_proj.weight": (64, 32),
    "midlayer.mlp.down_proj.weight": (32, 64),
    "norm.weight": (32,),
    "lm_head.weight": (40, 32),
    "d2t": (40,),
    "t2d": (128,),
}
SPECULATORS_NAMES = {name.replace("midlayer.", "layers.0."): shape for name, shape in EAGLE3_NAMES.items()}


def llama(**changes: Any) -> Target:
    torch.manual_seed(1)
    return Target(LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).float(), None, "tiny")


def eagle3(target: Target, size: int = 40, taps: list[int] | None = None, **options: Any) -> Eagle3Head:
    """A head whose every tensor is random, norms too, so that a tensor that is lost or swapped shows."""
    ids = torch.arange(0, 3 * size, 3) if size < target.vocab_size else torch.arange(size)
    settings = Eagle3Options(init_layer="random", init_lm_head="random", **options)
    return randomize(Eagle3Head.create(target, settings, taps, 3, ids))


def medusa(target: Target, size: int = 128, depths: int = 3, **options: Any) -> MedusaHead:
    ids = torch.arange(0, 3 * size, 3) if size < target.vocab_size else torch.arange(size)
    return randomize(MedusaHead.create(target, MedusaOptions(**options), None, depths, ids))


def randomize(head: Any) -> Any:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return head.eval()


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}


def config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def predicted(head: DraftHead, ids: torch.Tensor, target: Target) -> list[Depth]:
    return head.predict(ids, head.taught(ids, ids.bool(), 0), target.features(ids, head.config.taps), target)


def same_everywhere(head: DraftHead, again: DraftHead, target: Target) -> None:
    """The same tensors and, in decoding as in training, the same logits."""
    assert {n: t.tolist() for n, t in head.state_dict().items()} == {n: t.tolist() for n, t in again.state_dict().items()}
    ids = torch.arange(5, 25)[None]
    features = target.features(ids, head.config.taps)
    ours, theirs = (predicted(one, ids, target) for one in (head, again))
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(ours, theirs, strict=True))
    row = features.rows(0)
    known = torch.cat([ids[0], ids[0, :1]])
    first, second = (one.begin(one.new_state(), row, known, target) for one in (head, again))
    assert torch.equal(first.logits, second.logits)


# -- names and fields ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "names"), [("vllm", EAGLE3_NAMES), ("speculators", SPECULATORS_NAMES)])
def test_eagle3_names_and_shapes(engine: str, names: dict, tmp_path: Path) -> None:
    target = llama()
    head = eagle3(target)
    out = export(head, target, engine, tmp_path / "out", draft_length=3)
    assert shapes(out) == names
    tensors = load_file(out / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["d2t"] + torch.arange(40), head.target_ids)  # offsets, not ids
    assert torch.equal(tensors["t2d"].nonzero().squeeze(1), head.target_ids)
    assert all(tensor.dtype == torch.float32 for name, tensor in tensors.items() if name not in ("d2t", "t2d"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]  # nothing left beside


@pytest.mark.parametrize(
    ("options", "added"),
    [
        ({"norm_before_fc": True}, {"input_norm.weight": (96,)}),
        ({"fc_norm": True}, {f"fc_norm.{k}.weight": (32,) for k in range(3)}),
    ],
)
def test_eagle3_norms_of_the_options(options: dict, added: dict, tmp_path: Path) -> None:
    target = llama()
    out = export(eagle3(target, **options), target, "vllm", tmp_path / "out", draft_length=3)
    assert shapes(out) == EAGLE3_NAMES | added


def test_eagle3_with_the_whole_vocabulary_has_no_map(tmp_path: Path) -> None:
    target = llama()
    out = export(eagle3(target, size=128), target, "vllm", tmp_path / "out", draft_length=3)
    assert not {"d2t", "t2d"} & set(shapes(out))
    assert config(out)["draft_vocab_size"] == 128


def test_eagle3_vllm_config(tmp_path: Path) -> None:
    target = llama(num_hidden_layers=8, bos_token_id=1, eos_token_id=2)
    found = config(export(eagle3(target, norm_output=True), target, "vllm", tmp_path / "out", draft_length=5))
    assert found == {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128,
        "draft_vocab_size": 40, "target_hidden_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_theta": 10000.0,
        "rope_scaling": None, "num_aux_hidden_states": 3, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32", "torch_dtype": "float32",
        "logit_scale": 1.0, "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": True,
        "draftsmith": {
            "format": 1, "kind": "eagle3", "draft_length": 5, "target": "tiny", "target_fingerprint": target.fingerprint,
        },
    }  # fmt: skip


def test_tap_ids_are_written_where_they_are_not_the_default(tmp_path: Path) -> None:
    target = llama(num_hidden_layers=8)
    found = config(export(eagle3(target, taps=[1, 4, 6, 8]), target, "vllm", tmp_path / "four", draft_length=3))
    assert found["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6, 8]  # inputs of layers
    assert found["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 3, 5, 7]}  # outputs of layers
    assert found["num_aux_hidden_states"] == 4
    found = config(export(eagle3(target, taps=[0, 4, 5]), target, "vllm", tmp_path / "embedding", draft_length=3))
    assert found["eagle_aux_hidden_state_layer_ids"] == [0, 4, 5] and "eagle_config" not in found
    found = config(export(eagle3(target), target, "speculators", tmp_path / "default", draft_length=3))
    assert found["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


def test_speculators_config(tmp_path: Path) -> None:
    target = llama()
    found = config(export(eagle3(target), target, "speculators", tmp_path / "out", draft_length=4))
    assert "model_type" not in found  # its presence would hide the format from vLLM
    assert found["speculators_model_type"] == found["speculators_config"]["algorithm"] == "eagle3"
    assert found["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert found["speculators_config"]["verifier"] == {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    assert found["transformer_layer_config"]["model_type"] == "llama"
    assert found["transformer_layer_config"]["num_aux_hidden_states"] == 3
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [found[flag] for flag in flags] == [False] * 4


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_rope_scaling_stands_in_both_forms(engine: str, tmp_path: Path) -> None:
    target = llama(rope_parameters=LLAMA3)
    out = export(eagle3(target), target, engine, tmp_path / "out", draft_length=3)
    found = config(out)["transformer_layer_config"] if engine == "speculators" else config(out)
    assert found["rope_theta"] == 5e5
    assert found["rope_scaling"] == {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    assert found["rope_parameters"] == LLAMA3
    again = AutoConfig.for_model(**found)  # as an engine's transformers reads it
    assert dict(again.rope_parameters) == LLAMA3
    head = read(engine, "eagle3", out, target)
    assert isinstance(head, Eagle3Head)
    assert torch.equal(head.rotary.inv_freq, target.decoder.rotary_emb.inv_freq)


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_medusa_names_and_config(lm_head: str, tmp_path: Path) -> None:
    target = llama()
    out = export(medusa(target, blocks=2, lm_head=lm_head), target, "vllm", tmp_path / "out", draft_length=3)
    blocks = {f"blocks.{i}.layers.{j}.weight": (32, 32) for i in range(3) for j in range(2)}
    biases = {f"blocks.{i}.layers.{j}.bias": (32,) for i in range(3) for j in range(2)}
    own = {f"lm_heads.{i}.weight": (128, 32) for i in range(3)}
    assert shapes(out) == blocks | biases | (own if lm_head == "own" else {"lm_head.weight": (128, 32)})
    found = config(out)
    assert (found["num_heads"], found["num_hidden_layers"]) == (3, 2)
    assert found["medusa_fc_bias"] is True and found["original_lm_head"] is (lm_head == "shared")
    assert found["vocab_size"] == found["truncated_vocab_size"] == 128
    assert [key for key in found if "num" in key and ("heads" in key or "layers" in key)] == ["num_heads", "num_hidden_layers"]


def test_medusa_reduced_vocabulary_drafts_the_same_tokens(tmp_path: Path) -> None:
    """vLLM takes the argmax over the whole vocabulary of what was spread over it."""
    target = llama()
    head = medusa(target, size=40)
    out = export(head, target, "vllm", tmp_path / "out", draft_length=3)
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors["token_map"], head.target_ids)
    last = torch.randn(500, 32)
    with torch.no_grad():
        ours = head.target_ids[head.guess(1, last, target).logits.argmax(-1)]
        theirs = (head.blocks[1](last) @ tensors["lm_heads.1.weight"].T).argmax(-1)
    assert torch.equal(ours, theirs)
    same_everywhere(head, read("vllm", "medusa", out, target), target)


# -- the way back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
@pytest.mark.parametrize("flag", [None, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_eagle3_round_trip(engine: str, flag: str | None, tmp_path: Path) -> None:
    target = llama()
    options: dict[str, Any] = {flag: True} if flag else {}
    head = eagle3(target, **options)
    again = read(engine, "eagle3", export(head, target, engine, tmp_path / "out", draft_length=3), target)
    same_everywhere(head, again, target)
    assert again.config.layer == head.config.layer and again.config.taps == head.config.taps
    if flag:  # a flag that is declared wrongly changes the logits, so a swapped one would be seen
        ids = torch.arange(5, 25)[None]
        other = eagle3(target)
        assert not torch.equal(
            predicted(head, ids, target)[1].logits,
            predicted(other, ids, target)[1].logits,
        )


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
@pytest.mark.parametrize("size", [40, 128])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_head_dim_is_the_target_s_own(engine: str, size: int, kv_heads: int, tmp_path: Path) -> None:
    """head_dim 16 where hidden / heads is 8, as Qwen3 has it."""
    torch.manual_seed(1)
    sizes = {**SIZES, "num_key_value_heads": kv_heads, "head_dim": 16}
    target = Target(Qwen3ForCausalLM(Qwen3Config(**sizes)).float(), None, "tinyq")
    head = eagle3(target, size=size)
    out = export(head, target, engine, tmp_path / "out", draft_length=3)
    names = {name.split(".")[-2]: shape for name, shape in shapes(out).items() if "_proj" in name}
    assert (
        names["q_proj"] == (64, 64)
        and names["k_proj"] == names["v_proj"] == (16 * kv_heads, 64)
        and names["o_proj"] == (32, 64)
    )
    same_everywhere(head, read(engine, "eagle3", out, target), target)


@pytest.mark.parametrize("options", [{"lm_head": "own"}, {"lm_head": "shared"}, {"lm_head": "own", "blocks": 2}])
def test_medusa_round_trip(options: dict, tmp_path: Path) -> None:
    target = llama(tie_word_embeddings=True)
    head = medusa(target, **options)
    same_everywhere(
        head, read("vllm", "medusa", export(head, target, "vllm", tmp_path / "out", draft_length=3), target), target
    )


def test_bfloat16_target_and_head_keep_their_dtypes(tmp_path: Path) -> None:
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    target = Target(model.to(torch.bfloat16), None, "tiny")
    head = eagle3(target)
    for parameter in head.parameters():  # not head.to(): it would round RoPE's frequencies
        parameter.data = parameter.data.to(torch.bfloat16)
    out = export(head, target, "vllm", tmp_path / "out", draft_length=3)
    assert load_file(out / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert config(out)["dtype"] == config(out)["torch_dtype"] == "bfloat16"


def test_scaled_embeddings_travel_with_the_head(tmp_path: Path) -> None:
    """Gemma scales what it looks up: an engine that shares the bare weight would feed the head something else."""
    torch.manual_seed(1)
    target = Target(GemmaForCausalLM(GemmaConfig(**{**SIZES, "head_dim": 8})).float(), None, "tinyg")
    looked_up = target.embed(torch.arange(128))
    out = export(eagle3(target), target, "vllm", tmp_path / "out", draft_length=3)
    scaled = not torch.equal(looked_up, target.embed.get_parameter("weight"))
    assert ("embed_tokens.weight" in shapes(out)) is scaled


# -- what vLLM's loaders ask ---------------------------------------------------------------------------------------


def vllm_eagle3_parameters(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What vLLM 0.32 builds from a config and has a place for, by its own rules (models/llama_eagle3.py)."""
    width, taps = config["hidden_size"], config["num_aux_hidden_states"]
    dim = config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer = {"self_attn.q_proj": (q, 2 * width), "self_attn.k_proj": (kv, 2 * width), "self_attn.v_proj": (kv, 2 * width)}
    layer |= {"self_attn.o_proj": (width, q), "mlp.down_proj": (width, config["intermediate_size"])}
    layer |= {f"mlp.{name}": (config["intermediate_size"], width) for name in ("gate_proj", "up_proj")}
    layer |= {name: (width,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    parameters = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    parameters |= {"model.fc.weight": (width, taps * config["target_hidden_size"]), "model.norm.weight": (width,)}
    parameters["lm_head.weight"] = (config["draft_vocab_size"], width)
    if config["norm_before_fc"]:
        parameters["model.input_norm.weight"] = (taps * config["target_hidden_size"],)
    if config["fc_norm"]:
        parameters |= {f"model.fc_norm.{k}.weight": (config["target_hidden_size"],) for k in range(taps)}
    if config["draft_vocab_size"] != config["vocab_size"]:
        parameters["draft_id_to_target_id"] = (config["draft_vocab_size"],)
    return parameters


def vllm_eagle3_name(name: str) -> str | None:
    """How vLLM 0.32 renames a tensor; None for what it skips."""
    if "t2d" in name:
        return None
    if "d2t" in name:
        return name.replace("d2t", "draft_id_to_target_id")
    return name if "lm_head" in name else "model." + name.replace("midlayer.", "layers.0.")


@pytest.mark.parametrize("size", [40, 128])
@pytest.mark.parametrize("options", [{}, {"norm_before_fc": True}, {"fc_norm": True, "norm_output": True}])
@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_vllm_has_a_place_for_every_tensor_and_a_tensor_for_every_place(
    engine: str, options: dict, size: int, tmp_path: Path
) -> None:
    target = llama()
    out = export(eagle3(target, size=size, taps=[0, 1, 3, 4], **options), target, engine, tmp_path / "out", draft_length=3)
    found = config(out)
    found = {**found.get("transformer_layer_config", {}), **found}
    served = {vllm_eagle3_name(name): shape for name, shape in shapes(out).items() if vllm_eagle3_name(name)}
    assert served == vllm_eagle3_parameters(found)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_the_docs_name_what_each_engine_loads() -> None:
    page = Path(__file__).parents[2] / "docs" / "exports.md"
    if not page.is_file():
        pytest.skip("the docs are not part of the wheel")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.read_text().splitlines()
        if line.startswith("| `")
    ]
    told = {name.split("`")[1]: (version, served, layout) for name, version, served, layout in rows[: len(ENGINES)]}
    for name, engine in ENGINES.items():
        of = {done: sorted(kind for kind, layout in engine.layouts.items() if layout.served == done) for done in (True, False)}
        assert told.pop(name) == (engine.version, ", ".join(of[True]), ", ".join(of[False])), name
    assert not told


def test_every_kind_exports_somewhere() -> None:
    assert all(exports(kind) for kind in KINDS)
    assert {kind for engine in ENGINES.values() for kind in engine.layouts} <= set(KINDS)


def test_an_existing_directory_is_refused_and_replaced_by_force(tmp_path: Path) -> None:
    target = llama()
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="exists: choose another output, or pass --force"):
        export(eagle3(target), target, "vllm", out, draft_length=3)
    assert (out / "mine.txt").exists()
    export(eagle3(target), target, "vllm", out, draft_length=3, force=True)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


def test_nan_leaves_no_folder(tmp_path: Path) -> None:
    target = llama()
    head = eagle3(target)
    with torch.no_grad():
        head.fc.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"'fc\.weight' holds NaN"):
        export(head, target, "vllm", tmp_path / "out", draft_length=3)
    assert not list(tmp_path.iterdir())


def test_an_export_that_reads_back_otherwise_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = llama()
    original = ENGINES["vllm"].layouts["eagle3"].config
    wrong = {"norm_before_residual": True}
    layout = ENGINES["vllm"].layouts["eagle3"]
    object.__setattr__(layout, "config", lambda *args: {**original(*args), **wrong})
    try:
        with pytest.raises(RuntimeError, match="does not read back"):
            export(eagle3(target), target, "vllm", tmp_path / "out", draft_length=3)
    finally:
        object.__setattr__(layout, "config", original)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "engine", "said"),
    [
        ("medusa", "speculators", "knows eagle3, peagle, dflash, dflash2 and dspark only.*export it to vllm"),
        ("eagle3", "nowhere", "no engine that draftsmith writes for: choose from vllm, speculators"),
    ],
)
def test_engines_without_a_layout_are_refused(kind: str, engine: str, said: str, tmp_path: Path) -> None:
    target = llama()
    head = medusa(target) if kind == "medusa" else eagle3(target)
    with pytest.raises(UserError, match=said):
        export(head, target, engine, tmp_path / "out", draft_length=3)
    assert not list(tmp_path.iterdir())


def test_lengths_paths_and_targets_that_cannot_be_served(tmp_path: Path) -> None:
    target = llama()
    with pytest.raises(UserError, match="at most 3, the depths this medusa head has"):
        export(medusa(target), target, "vllm", tmp_path / "out", draft_length=4)
    with pytest.raises(UserError, match="give at least 1"):
        export(eagle3(target), target, "vllm", tmp_path / "out", draft_length=0)
    with pytest.raises(UserError, match="'eagle3' in its path"):
        export(medusa(target), target, "vllm", tmp_path / "not-eagle3", draft_length=3)
    with pytest.raises(UserError, match="fingerprint"):
        export(eagle3(target), llama(rms_norm_eps=1e-3), "vllm", tmp_path / "out", draft_length=3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda t: t.pop("fc.weight"), r"'fc\.weight' has shape None"),
        (lambda t: t.update({"stray.weight": torch.zeros(2)}), r"'stray\.weight' has shape \(2,\)"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:, :64].contiguous()}), r"\(32, 64\)"),
        (lambda t: t.pop("d2t"), "no d2t tensor"),
        (lambda t: t.update({"d2t": t["d2t"] + 1}), "do not name the same"),
    ],
)
def test_the_reader_is_strict(damage: Any, said: str, tmp_path: Path) -> None:
    target = llama()
    out = export(eagle3(target), target, "vllm", tmp_path / "out", draft_length=3)
    tensors = load_file(out / "model.safetensors")
    damage(tensors)
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(UserError, match=said):
        read("vllm", "eagle3", out, target)


def test_the_reader_names_what_is_missing(tmp_path: Path) -> None:
    target = llama()
    out = export(eagle3(target), target, "vllm", tmp_path / "out", draft_length=3)
    found = config(out)
    del found["norm_output"]
    (out / "config.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match="norm_output"):
        read("vllm", "eagle3", out, target)
    (out / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        read("vllm", "eagle3", out, target)


def test_a_confidence_that_an_engine_does_not_read_is_told_of(tiny_target: Target, tmp_path: Path, capfd: Any) -> None:
    ids = torch.arange(128)
    for confidence in (False, True):
        head = MedusaHead.create(tiny_target, MedusaOptions(), None, 3, ids, confidence).eval()
        export(head, tiny_target, "vllm", tmp_path / f"{confidence}", 3)
        assert ("left out: the confidence estimate" in capfd.readouterr().err) == confidence
