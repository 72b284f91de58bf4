"""MTP: its arithmetic beside other implementations, modules that targets ship, and their way back into the checkpoint."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_head
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from draftsmith import weights
from draftsmith.errors import UserError
from draftsmith.eval.tree import chain
from draftsmith.heads.base import DraftHead, supervised
from draftsmith.heads.drafting import draft
from draftsmith.heads.engines.published import import_head
from draftsmith.heads.engines.registry import export, read
from draftsmith.heads.mtp import MtpHead, MtpOptions
from draftsmith.target import Target

SIZES: dict[str, Any] = dict(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")
MLP = {"mlp.gate_proj.weight": (64, 32), "mlp.up_proj.weight": (64, 32), "mlp.down_proj.weight": (32, 64)}
HYBRID: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, head_dim=16,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip
MIMO = {
    **{
        f"model.mtp_layers.0.{name}.weight": (32,)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm", *NORMS)
    },
    "model.mtp_layers.0.input_proj.weight": (32, 64),
    **{f"model.mtp_layers.0.self_attn.{name}_proj.weight": (n, 32) for name, n in (("q", 32), ("k", 16), ("v", 16), ("o", 32))},
    **{f"model.mtp_layers.0.self_attn.{name}_proj.bias": (n,) for name, n in (("q", 32), ("k", 16), ("v", 16))},
    **{f"model.mtp_layers.0.{name}": shape for name, shape in MLP.items()},
}


def flat(layer: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """A module in Qwen3-Next's names."""
    own = {f"mtp.{name}.weight": (32,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    norms = {f"mtp.layers.0.{name}.weight": (32,) for name in NORMS}
    return own | {"mtp.fc.weight": (32, 64)} | norms | {f"mtp.layers.0.{name}": shape for name, shape in layer.items()}


def attention(q: int, kv: int, o: int) -> dict[str, tuple[int, ...]]:
    shapes = {"q_proj": (q, 32), "k_proj": (kv, 32), "v_proj": (kv, 32), "o_proj": (32, o), "q_norm": (16,), "k_norm": (16,)}
    return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def experts(count: int, prefix: str = "mlp.experts") -> dict[str, tuple[int, ...]]:
    each = {"gate_proj": (16, 32), "up_proj": (16, 32), "down_proj": (32, 16)}
    return {f"{prefix}.{e}.{name}.weight": shape for e in range(count) for name, shape in each.items()}


def moe_mla() -> dict[str, tuple[int, ...]]:
    """A module in DeepSeek-V3's names, behind three layers."""
    shapes = {
        "q_a_proj": (16, 32), "q_a_layernorm": (16,), "q_b_proj": (64, 16), "kv_a_proj_with_mqa": (24, 32),
        "kv_a_layernorm": (16,), "kv_b_proj": (64, 16), "o_proj": (32, 32),
    }  # fmt: skip
    inner = {f"self_attn.{name}.weight": shape for name, shape in shapes.items()} | experts(4)
    inner |= {"mlp.gate.weight": (4, 32), "mlp.gate.e_score_correction_bias": (4,)}
    inner |= {
        f"mlp.shared_experts.{name}_proj.weight": s for name, s in (("gate", (16, 32)), ("up", (16, 32)), ("down", (32, 16)))
    }
    inner |= {f"{name}.weight": (32,) for name in ("enorm", "hnorm", "shared_head.norm", *NORMS)} | {"eh_proj.weight": (32, 64)}
    inner |= {"embed_tokens.weight": (128, 32), "shared_head.head.weight": (128, 32)}  # copies of the target's own
    return {f"model.layers.3.{name}": shape for name, shape in inner.items()}


FAMILIES: dict[str, tuple[str, Any, dict[str, tuple[int, ...]]]] = {
    "mimo": ("mimo", Qwen2Config(**SIZES), MIMO),
    "mellum": (
        "qwen",
        AutoConfig.for_model(
            "mellum", **SIZES, head_dim=16, mlp_layer_types=["dense"] * 3, num_mtp_layers=1, mtp_layer_types=["full_attention"],
            mtp_mlp_layer_types=["dense"],
        ),
        flat(attention(64, 32, 64) | MLP),
    ),
    "qwen3.5": (
        "qwen", AutoConfig.for_model("qwen3_5_text", **SIZES, **HYBRID), flat(attention(128, 32, 64) | MLP)
    ),
    "qwen3-next": (
        "qwen",
        AutoConfig.for_model(
            "qwen3_next", **SIZES, **HYBRID, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        flat(
            attention(128, 32, 64) | experts(4) | {"mlp.gate.weight": (4, 32), "mlp.shared_expert_gate.weight": (1, 32)}
            | {f"mlp.shared_expert.{n}_proj.weight": s for n, s in (("gate", (16, 32)), ("up", (16, 32)), ("down", (32, 16)))}
        ),
    ),
    "deepseek": (
        "deepseek",
        AutoConfig.for_model(
            "deepseek_v3", **SIZES | {"num_key_value_heads": 4}, n_routed_experts=4, n_group=2, topk_group=1,
            num_experts_per_tok=2, moe_intermediate_size=16, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1, n_shared_experts=1, num_nextn_predict_layers=1,
        ),
        moe_mla(),
    ),
}  # fmt: skip
ARCHITECTURES = {"mimo": "MiMoForCausalLM"}


def module(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: (0.5 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}


def saved(family: str, directory: Path, tensors: dict[str, Tensor], shards: bool = False, dtype: Any = torch.float32) -> Target:
    """A random target of a family in ``directory``, with a module's tensors in its only file, or in its last one and one
    before."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family][1])).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(directory, max_shard_size="20KB" if shards else "1GB")
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = [ARCHITECTURES.get(family, *config["architectures"])]
    if tensors:
        config.setdefault("mtp_num_hidden_layers" if family == "qwen3.5" else "num_nextn_predict_layers", 1)
        add(directory, tensors, sorted(directory.glob("*.safetensors"))[-2:])
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text('{"a": 1}')
    return Target(loaded(directory, dtype), None, str(directory))


def loaded(directory: Path, dtype: Any = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def add(directory: Path, tensors: dict[str, Tensor], files: list[Path]) -> None:
    names = list(tensors)
    parts = {file: names[i :: len(files)] for i, file in enumerate(files)}
    for file, own in parts.items():
        save_file(load_file(file) | {name: tensors[name] for name in own}, file, metadata={"format": "pt", "who": "them"})
    if (directory / weights.INDEX).exists():
        index = json.loads((directory / weights.INDEX).read_text())
        index["weight_map"] |= {name: file.name for file, own in parts.items() for name in own}
        (directory / weights.INDEX).write_text(json.dumps(index))


def of_module(target: Target, form: str, **options: Any) -> DraftHead:
    settings = MtpOptions(form=form, init="module", **options)  # type: ignore[arg-type]
    return MtpHead.create(target, settings, None, 3, torch.arange(128)).eval()


def everything(directory: Path) -> dict[str, tuple[str, Tensor]]:
    """Every tensor of a checkpoint with its file."""
    return {name: (file.name, tensor) for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: dict[str, tuple[str, Tensor]], other: dict[str, tuple[str, Tensor]]) -> bool:
    """The same tensors of the same bytes in the same files."""
    return one.keys() == other.keys() and all(
        one[name][0] == file and one[name][1].dtype == tensor.dtype and torch.equal(one[name][1], tensor)
        for name, (file, tensor) in other.items()
    )


# -- the arithmetic --------------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x: Tensor, position: int) -> Tensor:
    """RoPE on [heads, 8] in the layout of halves."""
    angle = position * 10000.0 ** (-torch.arange(4) / 4)
    first, second = x[:, :4], x[:, 4:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


class PlainMimo:
    """MiMo's module from its tensors, a row at a time: hidden first, no token behind a text's first row, Qwen2's layer."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.w = {name.removeprefix("model.mtp_layers.0.").removesuffix(".weight"): t for name, t in tensors.items()}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def row(self, embedding: Tensor, hidden: Tensor, position: int) -> Tensor:
        w = self.w
        embedding = torch.zeros(32) if position == 0 else embedding
        x = w["input_proj"] @ torch.cat([rms(hidden, w["hidden_layernorm"]), rms(embedding, w["token_layernorm"])])
        normed = rms(x, w["input_layernorm"])
        q, k, v = ((w[f"self_attn.{n}_proj"] @ normed + w[f"self_attn.{n}_proj.bias"]).view(-1, 8) for n in ("q", "k", "v"))
        self.keys.append(turned(k, position))
        self.values.append(v)
        q, keys, values = turned(q, position), torch.stack(self.keys), torch.stack(self.values)  # [rows, kv, 8]
        mixed = [
            (keys[:, head // 2] @ q[head] / 8**0.5).softmax(0) @ values[:, head // 2] for head in range(4)
        ]  # two heads share a key
        x = x + w["self_attn.o_proj"] @ torch.cat(mixed)
        normed = rms(x, w["post_attention_layernorm"])
        gate = w["mlp.gate_proj"] @ normed
        x = x + w["mlp.down_proj"] @ (gate * gate.sigmoid() * (w["mlp.up_proj"] @ normed))
        return rms(x, w["final_layernorm"])


@torch.no_grad()
@pytest.mark.parametrize("hidden", ["pre_norm", "post_norm"])
def test_mimo_is_a_plain_one_row_by_row(hidden: str, tmp_path: Path) -> None:
    """Training's unrolled rows and a drafted chain both equal a module that reads the rows up to t, then its own drafts."""
    tensors = module(MIMO)
    target = saved("mimo", tmp_path, tensors)
    head = of_module(target, "mimo", hidden=hidden)
    assert head.config.taps == ([3] if hidden == "pre_norm" else [])
    ids = torch.randint(3, 111, (1, 12), generator=torch.Generator().manual_seed(4))
    features = target.features(ids, head.config.taps)
    read_states = (target.features(ids, [3]).taps if hidden == "pre_norm" else features.last)[0]
    trained = head.predict(ids, supervised(torch.ones_like(ids).bool(), 3), features, target)
    embeddings = target.embed.get_parameter("weight")
    for t in (0, 4, 7):
        plain = PlainMimo(tensors)
        for row in range(t + 1):
            state = plain.row(embeddings[ids[0, row + 1]], read_states[row], row)
        for depth in range(3):
            row = trained[depth].rows.tolist().index(t)
            torch.testing.assert_close(trained[depth].logits[row], target.logits(state), rtol=1e-3, atol=1e-3)
            state = plain.row(embeddings[ids[0, t + 2 + depth]], state, t + 1 + depth)
    plain = PlainMimo(tensors)
    for row in range(8):
        state = plain.row(embeddings[ids[0, row + 1]], read_states[row], row)
    begun = features.rows((0, slice(0, 8)))
    drafted = draft(head, head.new_state(), begun, ids[0, :9], chain(4), target).tokens
    for depth, token in enumerate(drafted):
        assert token == target.logits(state).argmax()
        state = plain.row(embeddings[token], state, 8 + depth)


@torch.no_grad()
def test_a_shipped_module_says_what_transformers_makes_it_say(tmp_path: Path) -> None:
    """transformers' MtpModel reads the same checkpoint and drafts the same token from the same states."""
    target = saved("mellum", tmp_path, module(FAMILIES["mellum"][2]))
    head = of_module(target, "qwen")
    theirs = MtpModel.from_pretrained(target.model).eval()
    ids = torch.randint(3, 111, (1, 12), generator=torch.Generator().manual_seed(4))
    features = target.features(ids, [])
    states = theirs.forward_layer(
        0, features.last[:, :11], torch.arange(1, 12)[None], MtpCache(config=target.config.get_mtp_config()), ids[:, 1:]
    )
    (depth, *_) = head.predict(ids, supervised(torch.ones_like(ids).bool(), 3), features, target)
    torch.testing.assert_close(depth.logits, target.logits(states[0, depth.rows]), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_transformers_generates_with_an_exported_module(tmp_path: Path) -> None:
    target = saved("mellum", tmp_path / "target", module(FAMILIES["mellum"][2]))
    head = moved(of_module(target, "qwen"))
    out = export(head, target, "transformers", tmp_path / "out", draft_length=1)
    model = loaded(out)
    prompt = torch.tensor([[5, 6, 7, 8]])
    plain = model.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False, use_mtp=True), plain)
    served = MtpModel.from_pretrained(model).get_parameter("layers.0.eh_proj.weight")
    assert torch.equal(served, head.get_parameter("input_proj.weight"))


@torch.no_grad()
def test_a_sliding_layer_slides_in_training_as_in_drafting() -> None:
    torch.manual_seed(3)
    config = MistralConfig(**SIZES, sliding_window=5, head_dim=8)
    target = Target(AutoModelForCausalLM.from_config(config).float(), None, "tinym")
    head = make_head(target, "mtp")
    ids = torch.randint(3, 111, (1, 20), generator=torch.Generator().manual_seed(4))
    features = target.features(ids, [])
    trained = head.predict(ids, supervised(torch.ones_like(ids).bool(), 4), features, target)
    state, shape = head.new_state(), chain(4)
    guess = head.begin(state, features.rows((0, slice(0, 14))), ids[0, :15], target)
    for depth in range(4):
        row = trained[depth].rows.tolist().index(13)
        torch.testing.assert_close(guess.logits[0], trained[depth].logits[row], rtol=1e-4, atol=1e-4)
        guess = head.deepen(state, [depth + 1], ids[0, 15 + depth : 16 + depth], shape, target)
    other = ids.clone()
    other[0, 1:8] = 3  # further back than two windows, with whose ends the target's own states have nothing to do
    frozen = target.features(ids, [])
    again = head.predict(other, supervised(torch.ones_like(ids).bool(), 4), frozen, target)
    rows = {t: i for i, t in enumerate(again[0].rows.tolist())}
    assert torch.equal(again[0].logits[rows[13]], trained[0].logits[rows[13]])
    assert not torch.equal(again[0].logits[rows[9]], trained[0].logits[rows[9]])


def test_a_warm_start_is_the_targets_last_layer(tiny_target: Target) -> None:
    head = MtpHead.create(tiny_target, MtpOptions(), None, 3, torch.arange(128))
    last = tiny_target.layers[-1].state_dict()
    assert all(torch.equal(head.state_dict()[f"decoder.layers.0.{name}"], tensor) for name, tensor in last.items())
    passed = head.get_parameter("input_proj.weight").detach()[:, 32:]
    states = tiny_target.features(torch.randint(128, (1, 64)), [3]).taps
    assert torch.equal(passed, passed[0, 0] * torch.eye(32))
    assert float(passed[0, 0]) == pytest.approx(float(states.pow(2).mean().sqrt()), rel=0.2)


def test_a_dry_run_needs_no_checkpoint(tiny_target: Target) -> None:
    with torch.device("meta"):
        head = MtpHead.create(tiny_target, MtpOptions(init="module"), None, 3, torch.arange(128))
    assert sum(p.numel() for p in head.parameters()) == 32 * 64 + 5 * 32 + 3 * 32 * 64 + 2 * 32 * 32 + 2 * 16 * 32


# -- the module's way out of the checkpoint and back -----------------------------------------------------------


def moved(head: DraftHead) -> DraftHead:
    """As after training."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return head


def engine_of(family: str) -> str:
    return "transformers" if family == "mellum" else "vllm"


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_comes_back_byte_by_byte(family: str, shards: bool, tmp_path: Path) -> None:
    """Names, shapes, dtypes and files of everything; mixtures of experts and hybrid targets too, though the latter draft
    nothing here."""
    form, _, shapes = FAMILIES[family]
    tensors = module(shapes, torch.bfloat16)
    target = saved(family, tmp_path / "target", tensors, shards)
    head = of_module(target, form)
    assert all(parameter.dtype == torch.float32 for parameter in head.parameters())
    out = export(head, target, engine_of(family), tmp_path / "out", draft_length=3)
    assert same(everything(out), everything(tmp_path / "target"))
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "target"))
    assert ours == theirs
    assert (out / "tokenizer_config.json").read_text() == '{"a": 1}'
    assert json.loads((out / "draftsmith.json").read_text())["kind"] == "mtp"
    file = everything(out)[next(iter(shapes))][0]
    with safe_open(out / file, framework="pt") as opened:
        assert opened.metadata()["who"] == "them"


@pytest.mark.parametrize("family", ["mimo", "deepseek"])
def test_a_trained_module_takes_the_old_ones_place(family: str, tmp_path: Path) -> None:
    form, _, shapes = FAMILIES[family]
    target = saved(family, tmp_path / "target", module(shapes, torch.bfloat16), shards=True)
    head = moved(of_module(target, form))
    out = export(head, target, "vllm", tmp_path / "out", draft_length=3)
    before, after = everything(tmp_path / "target"), everything(out)
    changed = {name for name in before if not torch.equal(before[name][1], after[name][1])}
    copies = {name for name in shapes if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    buffers = {name for name in shapes if "e_score" in name}  # not trained by gradients
    assert changed == set(shapes) - copies - buffers
    assert all(after[name][0] == file and after[name][1].dtype == t.dtype for name, (file, t) in before.items())
    again = read("vllm", "mtp", out, target)
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.to(torch.bfloat16).to(tensor.dtype)), name
    served = Target(loaded(out), None, str(out))
    assert served.fingerprint == target.fingerprint
    assert torch.equal(of_module(served, form).state_dict()["input_proj.weight"], again.state_dict()["input_proj.weight"])


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_qwen2_target_gets_a_module_and_becomes_a_mimo(engine: str, shards: bool, tmp_path: Path) -> None:
    target = saved("mimo", tmp_path / "target", {}, shards, torch.bfloat16)
    hidden = {"vllm": "pre_norm", "sglang": "post_norm"}[engine]  # the engines differ in what they feed it
    options = MtpOptions(form="mimo", hidden=hidden)  # type: ignore[arg-type]
    head = moved(MtpHead.create(target, options, None, 3, torch.arange(128)))
    out = export(head, target, engine, tmp_path / "out", draft_length=3)
    before, after = everything(tmp_path / "target"), everything(out)
    assert {name: tuple(after[name][1].shape) for name in after.keys() - before.keys()} == MIMO
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in after.values())
    assert same({name: after[name] for name in before}, before)
    assert {after[name][0] for name in MIMO} == {"model-mtp.safetensors" if shards else "model.safetensors"}
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["MiMoForCausalLM"] and config["num_nextn_predict_layers"] == 1
    if shards:
        index = json.loads((out / weights.INDEX).read_text())
        assert index["weight_map"] == {name: file for name, (file, _) in after.items()}
        held = json.loads((tmp_path / "target" / weights.INDEX).read_text())["metadata"]["total_size"]
        assert index["metadata"]["total_size"] == held + 2 * sum(torch.Size(shape).numel() for shape in MIMO.values())
    again = read(engine, "mtp", out, target)
    assert again.options.pre_norm is (hidden == "pre_norm")
    model = loaded(out, torch.bfloat16)  # the target itself is what it was
    assert isinstance(model, Qwen2ForCausalLM)
    assert torch.equal(model.model.norm.weight, target.model.model.norm.weight)


def test_a_target_that_ships_a_module_imports_as_a_head(tmp_path: Path) -> None:
    target = saved("mimo", tmp_path, module(MIMO, torch.bfloat16), shards=True)
    head = import_head(tmp_path, target)
    assert head.kind == "mtp" and head.config.depths == 3 and head.config.taps == [3]
    norm = module(MIMO, torch.bfloat16)["model.mtp_layers.0.final_layernorm.weight"]
    assert torch.equal(head.state_dict()["decoder.norm.weight"], norm.float())


# -- the speculators format ------------------------------------------------------------------------------------

SPECULATORS = {
    name.replace("model.mtp_layers.", "mtp_layers."): shape for name, shape in MIMO.items() if not name.endswith(".bias")
}


def test_speculators_names_and_round_trip(tiny_target: Target, tmp_path: Path) -> None:
    head = make_head(tiny_target, "mtp")
    out = export(head, tiny_target, "speculators", tmp_path / "out", draft_length=4)
    found = {name: tuple(tensor.shape) for name, tensor in load_file(out / "model.safetensors").items()}
    assert found == SPECULATORS
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_model_type"] == "mtp" and "model_type" not in config
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["transformer_layer_config"]["num_hidden_layers"] == 4
    again = import_head(out, tiny_target)
    assert again.config.depths == 4
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {n: t.tolist() for n, t in head.state_dict().items()}
    del config["draftsmith"]  # as published
    (out / "config.json").write_text(json.dumps(config))
    second = export(import_head(out, tiny_target), tiny_target, "speculators", tmp_path / "again", draft_length=4)
    assert (out / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "form", "said"),
    [
        (lambda t: t.clear(), "mimo", "carries no module: set head.options.init to target"),
        (lambda t: None, "qwen", "carries a mimo module: set head.options.form to mimo"),
        (lambda t: t.update({"model.mtp_layers.1.input_proj.weight": torch.ones(2)}), "mimo", "a layer for each depth"),
        (lambda t: t.pop("model.mtp_layers.0.mlp.up_proj.weight"), "mimo", r"lacks the tensor 'mlp\.up_proj\.weight'"),
        (lambda t: t.update({"model.mtp_layers.0.stray.weight": torch.ones(2)}), "mimo", r"against .* 'stray\.weight'"),
        (
            lambda t: t.update({"model.mtp_layers.0.input_proj.weight": torch.ones(32, 64).to(torch.float8_e4m3fn)}),
            "mimo",
            "float8_e4m3fn: name the target's unquantized checkpoint",
        ),
        (lambda t: t.update({"model.mtp_layers.0.mlp.up_proj.weight": torch.ones(8, 32)}), "mimo", "does not fit|mlp.up_proj"),
        (lambda t: t.update({"model.mtp_layers.0.input_proj.weight": torch.ones(32, 32)}), "mimo", "input_proj.weight"),
    ],
)
def test_modules_that_cannot_be_read(change: Any, form: str, said: str, tmp_path: Path) -> None:
    tensors = module(MIMO)
    change(tensors)
    target = saved("mimo", tmp_path, tensors)
    with pytest.raises(UserError, match=said):
        of_module(target, form)


def test_targets_without_files_to_write_into(tiny_target: Target, tmp_path: Path) -> None:
    model = tiny_target.model
    with pytest.raises(UserError, match="GGUF file"):
        of_module(Target(model, None, str(tmp_path / "it.gguf")), "qwen")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="neither model.safetensors nor"):
        of_module(Target(model, None, str(tmp_path)), "qwen")
    with pytest.raises(UserError, match="cannot be found"):
        of_module(Target(model, None, "nobody/nothing-of-this-name"), "qwen")


def test_what_no_engine_serves_is_not_written(tmp_path: Path) -> None:
    target = saved("mimo", tmp_path / "target", {})
    out = tmp_path / "out"

    def fresh(**options: Any) -> DraftHead:
        return MtpHead.create(target, MtpOptions(**options), None, 3, torch.arange(128))

    with pytest.raises(UserError, match="vLLM loads no module of form qwen for a qwen2 target"):
        export(fresh(), target, "vllm", out, draft_length=3)
    with pytest.raises(UserError, match="transformers loads no module of form mimo"):
        export(fresh(form="mimo"), target, "transformers", out, draft_length=1)
    with pytest.raises(UserError, match="SGLang feeds a mimo module the post_norm state, and this head reads pre_norm"):
        export(fresh(form="mimo"), target, "sglang", out, draft_length=3)
    with pytest.raises(UserError, match="form mimo: train one of form qwen"):
        export(fresh(form="mimo"), target, "speculators", out, draft_length=3)
    with pytest.raises(UserError, match="holds NaN"):
        head = fresh(form="mimo")
        with torch.no_grad():
            head.get_parameter("input_proj.weight")[0, 0] = float("nan")
        export(head, target, "vllm", out, draft_length=3)
    assert not out.exists() and sorted(path.name for path in tmp_path.iterdir()) == ["target"]


def test_wrong_sizes_taps_and_families(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="set head.draft_vocab to null"):
        MtpHead.create(tiny_target, MtpOptions(), None, 3, torch.arange(48))
    with pytest.raises(UserError, match=r"reads taps \[4\], as its options say, not \[1, 2\]"):
        MtpHead.create(tiny_target, MtpOptions(hidden="pre_norm"), [1, 2], 3, torch.arange(128))
    gpt2 = AutoConfig.for_model("gpt2", vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    with pytest.raises(UserError, match="gpt2 model has no layers and norm"):
        MtpHead.create(
            Target(AutoModelForCausalLM.from_config(gpt2).float(), None, "g"), MtpOptions(), None, 3, torch.arange(128)
        )
