"""P-EAGLE: one pass over packed chains, dropped chains that change nothing for the others, and its directories."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_head
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.errors import UserError
from draftsmith.heads.base import supervised
from draftsmith.heads.engines.published import import_head
from draftsmith.heads.engines.registry import export, read
from draftsmith.heads.peagle import PEagleHead, PEagleOptions
from draftsmith.target import Target

MASK = 127


def everything(ids: Tensor) -> Tensor:
    return torch.ones_like(ids, dtype=torch.bool)


def some_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 111, shape, generator=torch.Generator().manual_seed(seed))


# -- the training forward ------------------------------------------------------------------------------------------


def packed(head: Any, ids: Tensor, taps: Tensor, target: Target, elements: list[tuple[int, int]]) -> Tensor:
    """P-EAGLE as published, plainly: all elements (row, depth) in one sequence under one mask; logits of each."""
    embeds, features = [], []
    for row, depth in elements:
        known = depth == 0
        embeds.append(target.embed(ids[row + 1]) if known else head.masks()[0])
        features.append(head.fuse(taps[row]) if known else head.masks()[1])
    x, hidden = torch.stack(embeds), torch.stack(features)
    seen = torch.tensor([[(d == 0 and a <= row) or (a == row and d <= depth) for a, d in elements] for row, depth in elements])
    cos, sin = head.rotary(x[None], torch.tensor([[row + depth for row, depth in elements]]))
    for layer in (head.layer, *head.further):
        if layer is head.layer:
            read, residual = torch.cat([layer.input_layernorm(x), layer.hidden_norm(hidden)], -1), hidden
        else:
            read, residual = layer.input_layernorm(hidden), hidden
        attention = layer.self_attn
        q, k, v = (proj(read).view(len(x), -1, attention.dim).transpose(0, 1) for proj in projections(attention))
        q, k = (y * cos + torch.cat([-y[..., attention.dim // 2 :], y[..., : attention.dim // 2]], -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(attention.heads // attention.kv_heads, 0) for y in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1).flatten(1)
        hidden = residual + attention.o_proj(mixed)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return head.lm_head(head.norm(hidden))


def projections(attention: Any) -> tuple[Any, ...]:
    return attention.q_proj, attention.k_proj, attention.v_proj


@torch.no_grad()
def test_it_is_the_published_pass_over_packed_chains(tiny_target: Target) -> None:
    head: Any = make_head(tiny_target, "peagle")
    ids = some_ids(1, 12)
    features = tiny_target.features(ids, head.config.taps)
    depths = head.predict(ids, head.taught(ids, everything(ids), 0), features, tiny_target)
    elements = [(row, 0) for row in range(11)] + [(row, d) for d in (1, 2, 3) for row in depths[d].rows.tolist()]
    expected = packed(head, ids[0], features.taps[0], tiny_target, elements)
    for d, depth in enumerate(depths):
        mine = [i for i, (row, own) in enumerate(elements) if own == d and row in depth.rows.tolist()]
        torch.testing.assert_close(depth.logits, expected[mine], atol=1e-4, rtol=1e-4)


def sampled(target: Target, **options: Any) -> PEagleHead:
    torch.manual_seed(0)
    settings = PEagleOptions(layers=2, mask_token=MASK, init_layer="random", **options)
    head = PEagleHead.create(target, settings, None, 6, torch.arange(40))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return head


def test_chains_are_dropped_whole_and_as_often_as_said(tiny_target: Target) -> None:
    head = sampled(tiny_target, ratio=0.7, ratio_min=0.3)
    ids = some_ids(64, 60)
    mask = everything(ids)
    maps, whole = head.taught(ids, mask, 3), supervised(mask, 6)
    assert torch.equal(maps[0], whole[0])  # every row teaches depth 0
    for shallow, deep in pairwise(maps):
        assert not (deep & ~shallow).any()
    for d, (own, all_rows) in enumerate(zip(maps, whole, strict=True)):
        assert float(own.sum() / all_rows.sum()) == pytest.approx(max(0.7**d, 0.3), abs=0.03)
    assert all(torch.equal(a, b) for a, b in zip(head.taught(ids, mask, 3), maps, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(head.taught(ids, mask, 4), maps, strict=True))


@torch.no_grad()
def test_a_dropped_chain_changes_no_other(tiny_target: Target) -> None:
    """Lines of one batch keep different numbers of chains, one of them none: each kept row's logits are as with all of them."""
    head, ids, mask = sampled(tiny_target), some_ids(3, 20), everything(some_ids(3, 20))
    mask[1, 6:] = False
    mask[2] = False
    features = tiny_target.features(ids, head.config.taps)
    few, all_rows = (
        head.predict(ids, rows, features, tiny_target) for rows in (head.taught(ids, mask, 0), supervised(mask, 6))
    )
    assert len(few[5].rows) < len(all_rows[5].rows)
    for some, whole in zip(few, all_rows, strict=True):
        kept = torch.isin(whole.rows, some.rows)
        assert torch.equal(whole.rows[kept], some.rows)
        torch.testing.assert_close(some.logits, whole.logits[kept], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("embedding", ["target", "own"])
def test_what_stands_for_the_unknown_learns_from_the_deeper_depths_alone(tiny_target: Target, embedding: str) -> None:
    head: Any = sampled(tiny_target, embedding=embedding, ratio=1.0)
    ids = some_ids(1, 16)
    features = tiny_target.features(ids, head.config.taps)
    vector = head.embed_tokens.weight if embedding == "own" else head.mask_embedding
    for d, depth in enumerate(head.predict(ids, head.taught(ids, everything(ids), 0), features, tiny_target)):
        read = (vector, head.mask_hidden)
        slope, hidden = torch.autograd.grad(depth.logits.sum(), read, retain_graph=True, allow_unused=True)
        row = slope[MASK] if embedding == "own" else slope
        assert (row is None or not row.any()) is (d == 0)
        assert (hidden is None) is (d == 0)


@torch.no_grad()
def test_a_draft_leaves_no_mask_in_the_cache(tiny_target: Target) -> None:
    head, ids = sampled(tiny_target), some_ids(1, 20)
    features = tiny_target.features(ids, head.config.taps)
    state = head.new_state()
    for rows in (slice(0, 7), slice(7, 8), slice(8, 12)):
        head.begin(state, features.rows((0, rows)), ids[0, rows.start : rows.stop + 1], tiny_target)
        assert {keys.shape[2] for keys in (*state.cache.keys, *state.cache.values)} == {rows.stop} == {state.cache.committed}


# -- the mask token ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [0, 1, 2])  # the padding, the beginning and the end
def test_a_mask_token_that_texts_use_is_refused(tiny_target: Target, token: int) -> None:
    with pytest.raises(UserError, match=rf"mask_token {token} is a token that the texts"):
        sampled(tiny_target).create(tiny_target, PEagleOptions(mask_token=token), None, 3, torch.arange(128))


def test_a_mask_token_is_found_behind_the_tokenizers_last(tiny_target: Target) -> None:
    head = PEagleHead.create(tiny_target, PEagleOptions(layers=1), None, 3, torch.arange(128))
    assert head.mask_token == 111


# -- its directories -----------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LAYER = {
    "self_attn.o_proj": (32, 32), "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64),
    "post_attention_layernorm": (32,), "input_layernorm": (32,),
}  # fmt: skip
NAMES = {f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER.items()}
NAMES |= {f"layers.0.self_attn.{x}_proj.weight": (rows, 64) for x, rows in (("q", 32), ("k", 16), ("v", 16))}
NAMES |= {f"layers.1.self_attn.{x}_proj.weight": (rows, 32) for x, rows in (("q", 32), ("k", 16), ("v", 16))}
NAMES |= {
    "layers.0.hidden_norm.weight": (32,), "fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (40, 32),
    "d2t": (40,), "t2d": (128,), "embed_tokens.weight": (128, 32), "mask_hidden": (1, 1, 96),
}  # fmt: skip
PLAIN_NAMES = NAMES | {"layers.1.hidden_norm.weight": (32,)}  # as SGLang would read it


def llama(dtype: torch.dtype = torch.float32) -> Target:
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=1, eos_token_id=2))
    return Target(model.to(dtype), None, "tiny")


def same(one: PEagleHead, other: Any, target: Target) -> None:
    ids = some_ids(1, 20)
    features = target.features(ids, one.config.taps)
    row, known = features.rows(0), torch.cat([ids[0], ids[0, :1]])
    states: Any = [head.new_state() for head in (one, other)]
    begun = [head.begin(state, row, known, target) for head, state in zip((one, other), states, strict=True)]
    assert torch.equal(begun[0].logits, begun[1].logits)
    assert torch.equal(states[0].said.logits, states[1].said.logits)


@pytest.mark.parametrize("embedding", ["target", "own"])
@pytest.mark.parametrize(("engine", "names"), [("vllm", PLAIN_NAMES), ("speculators", NAMES)])
def test_names_shapes_and_the_way_back(engine: str, names: dict[str, Any], embedding: str, tmp_path: Path) -> None:
    target = llama()
    head = sampled(target, embedding=embedding, ratio=0.5).eval()
    out = export(head, target, engine, tmp_path / "out", draft_length=4)
    tensors = load_file(out / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == names
    rows = torch.arange(128) != MASK
    vector = head.embed_tokens.weight[MASK] if embedding == "own" else head.mask_embedding
    assert torch.equal(tensors["embed_tokens.weight"][MASK], vector)
    frozen = torch.equal(tensors["embed_tokens.weight"][rows], target.embed.get_parameter("weight")[rows])
    assert frozen is (embedding == "target")
    again: Any = read(engine, "peagle", out, target)
    assert again.options.embedding == embedding and again.options.ratio == 0.5
    again.config.depths = head.config.depths  # the export's are as many as it drafts
    same(head, again, target)


def test_configs_say_what_vllm_asks(tmp_path: Path) -> None:
    target = llama()
    head = sampled(target, fc_norm=True)
    plain = json.loads((export(head, target, "vllm", tmp_path / "plain", 4) / "config.json").read_text())
    assert plain["architectures"] == ["LlamaForCausalLMEagle3"] and plain["pard_token"] == MASK
    assert plain["num_hidden_layers"] == 2 and plain["fc_norm"] is True and plain["norm_output"] is False
    found = json.loads((export(head, target, "speculators", tmp_path / "format", 4) / "config.json").read_text())
    assert found["speculators_model_type"] == found["speculators_config"]["algorithm"] == "peagle"
    assert found["mask_token_id"] == MASK and "model_type" not in found
    assert found["transformer_layer_config"]["fc_norm"] is True  # which vLLM does not pass on from the top level
    assert found["norm_before_residual"] is False and found["embed_requires_grad"] is True


@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_a_bfloat16_targets_embedding_is_kept_exactly(head_dtype: torch.dtype, tmp_path: Path) -> None:
    target = llama(torch.bfloat16)
    head = sampled(target)
    for parameter in head.parameters():
        parameter.data = parameter.data.to(head_dtype)
    tensors = load_file(export(head, target, "vllm", tmp_path / "out", 4) / "model.safetensors")
    assert tensors["embed_tokens.weight"].dtype == head_dtype
    assert torch.equal(tensors["embed_tokens.weight"][:MASK], target.embed.get_parameter("weight")[:MASK].to(head_dtype))


PUBLISHED: dict[str, Any] = {  # as speculators writes it
    "architectures": ["PEagleDraftModel"],
    "draft_vocab_size": 40,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "embed_requires_grad": True,
    "fc_norm": False,
    "mask_token_id": MASK,
    "norm_before_fc": False,
    "norm_before_residual": True,
    "norm_output": False,
    "speculators_config": {
        "algorithm": "peagle",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny"},
    },
    "speculators_model_type": "peagle",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    },
}  # fmt: skip


def published(tmp_path: Path, config: dict[str, Any], **changes: Tensor | None) -> Path:
    generator = torch.Generator().manual_seed(4)
    tensors: dict[str, Any] = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in NAMES.items()}
    ids = torch.arange(0, 120, 3)
    tensors |= {"d2t": ids - torch.arange(40), "t2d": torch.zeros(128, dtype=torch.bool).index_fill(0, ids, True)} | changes
    tmp_path.mkdir(exist_ok=True)
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_published_head_is_read_and_written_again_byte_for_byte(tmp_path: Path) -> None:
    target = llama(torch.bfloat16)
    source = published(tmp_path / "source", PUBLISHED)
    head: Any = import_head(source, target)
    assert (head.kind, head.config.depths, head.mask_token, head.options.embedding) == ("peagle", 6, MASK, "own")
    assert head.options.norm_before_residual and head.options.layers == 2
    assert head.config.layer["rope_parameters"]["rope_theta"] == 500000.0
    out = export(head, target, "speculators", tmp_path / "out", draft_length=6)
    theirs, ours = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_published_head_without_an_embedding_reads_the_targets(tmp_path: Path) -> None:
    target = llama()
    head: Any = import_head(published(tmp_path, PUBLISHED, **{"embed_tokens.weight": None}), target)
    assert head.options.embedding == "target"
    assert torch.equal(head.mask_embedding.float(), target.embed.get_parameter("weight")[MASK].bfloat16().float())


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"mask_token_id": None}, {}, "none of the keys mask_token_id"),
        ({"mask_token_id": 2}, {}, "mask_token 2 is a token"),
        ({"mask_token_id": 128}, {}, "outside the vocabulary"),
        ({}, {"mask_hidden": None}, "no tensor mask_hidden"),
        ({}, {"mask_hidden": torch.zeros(1, 1, 64)}, r"'mask_hidden' has shape \(64,\)"),
        ({}, {"embed_tokens.weight": torch.zeros(100, 32)}, r"\[100, 32\], and that of tiny \[128, 32\]"),
        ({}, {"layers.0.self_attn.q_norm.weight": torch.ones(8)}, "q_norm"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, {}, r"'fc\.weight' has shape \(32, 96\)"),
    ],
)
def test_what_is_odd_in_a_published_head_is_named(config: dict, tensors: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        import_head(published(tmp_path, PUBLISHED | config, **tensors), llama())
