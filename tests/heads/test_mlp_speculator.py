"""MLP speculator: the recurrence against a plain one, its constants and norm, tying, and the layouts of fms-extras and TGI."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.errors import UserError
from draftsmith.eval.tree import full
from draftsmith.eval.verifier import generate
from draftsmith.heads.drafting import draft
from draftsmith.heads.engines.published import import_head
from draftsmith.heads.engines.registry import export, read
from draftsmith.heads.mlp_speculator import MlpSpeculatorHead, MlpSpeculatorOptions, ScaleShift
from draftsmith.target import Target

IDS = torch.randint(3, 111, (2, 14), generator=torch.Generator().manual_seed(5))
ALL = torch.ones_like(IDS, dtype=torch.bool)
FLAGS = [{"tie_weights": tied, "scale_input": scaled} for tied in (False, True) for scaled in (False, True)]


def llama(**changes: Any) -> Target:
    sizes: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(1)
    return Target(LlamaForCausalLM(LlamaConfig(**sizes | changes)).float(), None, "tiny")


def speculator(target: Target, size: int = 128, depths: int = 4, inner_dim: int = 24, **options: Any) -> MlpSpeculatorHead:
    ids = torch.arange(5, 5 + 3 * size, 3) if size < target.vocab_size else torch.arange(size)
    settings = MlpSpeculatorOptions(inner_dim=inner_dim, **options)
    head = MlpSpeculatorHead.create(target, settings, None, depths, ids)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return head.eval()


# -- the recurrence ------------------------------------------------------------------------------------------------


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def plain(named: dict[str, Tensor], last: Tensor, tokens: list[int], n: int, scaled: bool) -> list[Tensor]:
    """The logits of all depths behind one state, from the paper's two weights: state * sw + embedding * ew."""
    inner = named["proj.0.weight"].shape[0]
    sw = 0.5 ** (0.5 / n)
    ew = math.sqrt((1 - sw**2) * inner / 2)
    state, found = last.double(), []
    if scaled:
        state = state / math.sqrt(float((state**2).mean()) + 1e-6) / math.sqrt(2)
    for i, token in enumerate(tokens):
        mixed = named[f"proj.{i}.weight"].double() @ state * sw + named[f"emb.{i}.weight"][token].double() * ew
        normed = mixed / math.sqrt(float((mixed**2).mean()) + 1e-6 * sw**2)
        shifted = named[f"ln.{i}.weight"].double() * normed + named[f"ln.{i}.bias"].double()
        state = torch.tensor([gelu(x) for x in shifted.tolist()], dtype=torch.float64)
        found.append(named[f"head.{i}.weight"].double() @ state)
    return found


@pytest.mark.parametrize("options", FLAGS, ids=str)
@torch.no_grad()
def test_every_depth_computes_the_plain_recurrence(options: dict[str, Any]) -> None:
    target = llama()
    head = speculator(target, **options)
    depths = head.predict(IDS, head.taught(IDS, ALL, 0), target.features(IDS, []), target)
    last, tokens = target.features(IDS, []).last.flatten(0, 1), IDS.flatten().tolist()
    for place, row in enumerate(depths[3].rows.tolist()):
        wanted = plain(dict(head.state_dict()), last[row], tokens[row + 1 : row + 5], 4, options["scale_input"])
        for depth, logits in zip(depths, wanted, strict=True):
            ours = depth.logits[depth.rows.tolist().index(row)] if depth is not depths[3] else depth.logits[place]
            torch.testing.assert_close(ours.double(), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("depths", [2, 3, 7])
def test_by_the_last_depth_half_of_the_states_power_is_the_targets(depths: int) -> None:
    """sw^(2n) = 1/2, and at every step an embedding of variance 1 / inner brings what the state has lost: its power is 1/2,
    that of a state of variance 1 behind a GELU."""
    head = speculator(llama(), depths=depths)
    kept = 0.5 ** (0.5 / depths)
    assert kept ** (2 * depths) == pytest.approx(0.5)
    assert (head.alpha * kept) ** 2 / 24 == pytest.approx((1 - kept**2) / 2)


@torch.no_grad()
def test_the_norm_centres_nothing_and_adds_its_shift() -> None:
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0)) + 2
    norm, library = ScaleShift(24), nn.LayerNorm(24)
    for each in (norm, library):
        each.weight.copy_(torch.linspace(0.5, 2, 24))
        each.bias.copy_(torch.linspace(-1, 1, 24))
    wanted = torch.stack([row / (row.pow(2).sum() / 24 + 1e-6).sqrt() for row in x]) * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), wanted)
    assert (library(x) - wanted).abs().max() > 0.5


@pytest.mark.parametrize("options", FLAGS[::2], ids=str)
@torch.no_grad()
def test_fresh_weights_have_the_references_sizes(options: dict[str, Any]) -> None:
    target = llama()
    torch.manual_seed(0)
    head = MlpSpeculatorHead.create(target, MlpSpeculatorOptions(inner_dim=64, **options), None, 3, torch.arange(128))
    for name, tensor in head.tensors().items():
        if name.endswith("bias") or name.startswith("ln."):
            assert torch.equal(tensor, torch.full_like(tensor, float(name.endswith("weight"))))
        elif name != "target_ids":
            assert tensor.std() == pytest.approx(1 / 8, rel=0.05), name


def test_tied_weights_are_one_set_but_for_the_first_projection() -> None:
    tied, untied = (speculator(llama(), tie_weights=flag) for flag in (True, False))
    own = ["emb.0.weight", "proj.0.weight", "proj.1.weight", "head.0.weight", "ln.0.weight", "ln.0.bias"]
    assert sorted(tied.tensors()) == sorted([*own, "target_ids"])
    assert sum(p.numel() for p in tied.parameters()) == 24 * (128 + 32 + 24 + 128 + 2)
    assert len(list(untied.parameters())) == 4 * 5


def test_one_depth_has_nothing_to_tie() -> None:
    with pytest.raises(UserError, match="head.depths to 2 or more"):
        speculator(llama(), depths=1, tie_weights=True)


def test_a_reduced_vocabulary_shortens_the_heads_alone() -> None:
    head = speculator(llama(), 40, tie_weights=True)
    assert head.head[0].weight.shape == (40, 24) and head.emb[0].weight.shape == (128, 24)


# -- layouts -------------------------------------------------------------------------------------------------------


def published(tied: bool, dtype: torch.dtype, once: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A directory as published: the untied one with a config from before the two flags, the tied one with its tensors once,
    or under the names of all depths."""
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for i in range(4):
        shapes = {
            "emb.#.weight": (128, 24),
            "proj.#.weight": (24, 24 if i else 32),
            "head.#.weight": (128, 24),
            "ln.#.weight": (24,),
            "ln.#.bias": (24,),
        }
        for name, shape in shapes.items():
            own = "speculator." + name.replace("#", str(i))
            first = "speculator." + name.replace("#", "1" if name.startswith("proj") else "0")
            if not tied or i < 1 or own == first:
                tensors[own] = (torch.randn(shape, generator=generator) * 0.3).to(dtype)
            elif not once:
                tensors[own] = tensors[first].clone()
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "base_model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct",
        "emb_dim": 32, "inner_dim": 24, "model_type": "mlp_speculator", "n_candidates": 5, "n_predict": 4,
        "top_k_tokens_per_head": [4, 3, 2, 2], "torch_dtype": "float16", "transformers_version": "4.38.2", "vocab_size": 128,
    }  # fmt: skip
    return config | ({"tie_weights": True, "scale_input": True} if tied else {}), tensors


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    for shard in range(shards):
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, directory / f"model-{shard + 1:05}-of-{shards:05}.safetensors")
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_published_head_comes_in_drafts_and_goes_out_as_it_was(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    target = llama()
    config, tensors = published(tied, dtype)
    head = import_head(write(tmp_path / "in", config, tensors, shards=2), target)
    assert isinstance(head, MlpSpeculatorHead) and (head.options.tie_weights, head.options.scale_input) == (tied, tied)
    text = generate(target, None, [5, 6, 7], full([1]), 12).tokens
    assert generate(target, head.float(), [5, 6, 7], full([3, 2, 1, 1]), 12).tokens == text
    out = export(head.to(dtype), target, "fms", tmp_path / "out", draft_length=4)
    again = load_file(out / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) and again[name].dtype == dtype for name, tensor in tensors.items())


def test_tied_tensors_may_stand_there_under_all_names(tmp_path: Path) -> None:
    target = llama()
    once, all_names = (published(True, torch.float32, once) for once in (True, False))
    heads = [import_head(write(tmp_path / str(i), *each), target) for i, each in enumerate((once, all_names))]
    assert len(all_names[1]) == 4 * 5 and len(once[1]) == 6
    assert all(torch.equal(tensor, heads[1].tensors()[name]) for name, tensor in heads[0].tensors().items())
    all_names[1]["speculator.head.2.weight"] += 1
    with pytest.raises(UserError, match="head.2.weight is not its head.0.weight"):
        import_head(write(tmp_path / "2", *all_names), target)


@pytest.mark.parametrize("tied", [False, True])
def test_an_exports_fields(tied: bool, tmp_path: Path) -> None:
    target = llama()
    head = speculator(target, 40, depths=5, tie_weights=tied, scale_input=not tied)
    out = export(head, target, "fms", tmp_path / "out", draft_length=3)
    found = json.loads((out / "config.json").read_text())
    assert found.pop("draftsmith")["draft_length"] == 3
    assert found == {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "base_model_name_or_path": "tiny",
        "vocab_size": 128, "emb_dim": 32, "inner_dim": 24, "n_predict": 5, "top_k_tokens_per_head": [5, 4, 3, 2, 2],
        "n_candidates": 5, "tie_weights": tied, "scale_input": not tied, "dtype": "float32", "torch_dtype": "float32",
    }  # fmt: skip
    again = read("fms", "mlp_speculator", out, target)
    assert again.options == head.options and torch.equal(again.target_ids, head.target_ids)


@torch.no_grad()
def test_a_reduced_vocabulary_is_spread_and_nothing_else_is_drafted(tmp_path: Path) -> None:
    target = llama()
    head = speculator(target, 40)
    tensors = load_file(export(head, target, "fms", tmp_path / "out", draft_length=4) / "model.safetensors")
    states = F.gelu(torch.randn(500, 24, generator=torch.Generator().manual_seed(0)))
    for i in range(4):
        logits = states @ tensors[f"speculator.head.{i}.weight"].T
        assert torch.equal(logits.topk(5).indices, head.target_ids[head.head[i](states).topk(5).indices])


@torch.no_grad()
def served_by_tgi(directory: Path, last: Tensor, token: int, speculate: int) -> list[int]:
    """A draft by TGI's published loader rules: five tensors read, the constants from the length it is told to draft, the
    embedding scaled once."""
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    assert config["tie_weights"] and speculate <= config["n_predict"]
    emb, first, proj, head = (tensors[f"speculator.{name}.weight"] for name in ("emb.0", "proj.0", "proj.1", "head.0"))
    scale, shift = tensors["speculator.ln.0.weight"], tensors["speculator.ln.0.bias"]
    sw = 0.5 ** (0.5 / speculate)
    emb = emb * (math.sqrt(1 - sw**2) * math.sqrt(config["inner_dim"] / 2))
    state, drafted = last, []
    if config["scale_input"]:
        state = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6) * 2**-0.5
    for i in range(speculate):
        state = (proj if i else first) @ state * sw + emb[token]
        state = F.gelu(scale * (state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6)) + shift)
        token = int((head @ state).argmax())
        drafted.append(token)
    return drafted


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("size", [40, 128])
def test_tgis_rules_draft_what_the_head_drafts(scaled: bool, size: int, tmp_path: Path) -> None:
    target = llama()
    head = speculator(target, size, tie_weights=True, scale_input=scaled)
    out = export(head, target, "tgi", tmp_path / "out", draft_length=4)
    features, spoilt = target.features(IDS, []), 0
    for t in range(13):
        rows, known = features.rows((0, slice(0, t + 1))), IDS[0, : t + 2]
        ours = draft(head, head.new_state(), rows, known, full([1, 1, 1, 1]), target).tokens
        assert served_by_tgi(out, features.last[0, t], int(IDS[0, t + 1]), 4) == ours
        spoilt += served_by_tgi(out, features.last[0, t], int(IDS[0, t + 1]), 2) != ours[:2]
    assert spoilt  # told to draft fewer, it computes with other constants


@pytest.mark.parametrize(
    ("options", "length", "message"),
    [({"tie_weights": False}, 4, "tie_weights true"), ({"tie_weights": True}, 3, "--draft-length 4")],
)
def test_what_tgi_would_not_load_or_would_spoil_is_refused(options: dict, length: int, message: str, tmp_path: Path) -> None:
    target = llama()
    with pytest.raises(UserError, match=message):
        export(speculator(target, **options), target, "tgi", tmp_path / "out", draft_length=length)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"emb_dim": 64}, "emb_dim 64, and tiny has 32"),
        ({"vocab_size": 130}, "vocab_size 130, and tiny has 128"),
        ({"inner_dim": 0}, "emb.0.weight"),  # 0 is the target's 32, and the tensors have 24
        ({"n_predict": 5}, "emb.4.weight"),
        ({"n_predict": 3}, "emb.3.weight"),
    ],
)
def test_a_published_config_that_does_not_fit_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config, tensors = published(False, torch.float32)
    with pytest.raises(UserError, match=message):
        import_head(write(tmp_path, config | change, tensors), llama())


@pytest.mark.parametrize("name", ["speculator.ln.2.bias", "speculator.proj.1.weight", "speculator.emb.3.weight"])
def test_a_missing_or_misshapen_tensor_is_named(name: str, tmp_path: Path) -> None:
    config, tensors = published(False, torch.float32)
    with pytest.raises(UserError, match=name.removeprefix("speculator.")):
        import_head(write(tmp_path / "shape", config, tensors | {name: torch.zeros(3)}), llama())
    tensors.pop(name)
    with pytest.raises(UserError, match=name.removeprefix("speculator.")):
        import_head(write(tmp_path / "missing", config, tensors), llama())
