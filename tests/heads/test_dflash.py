"""DFlash heads: against a plain re-implementation and transformers' own, their anchors and mask, and how they are stored."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import BLOCK, CASES, DEPTHS, make_head
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModel,
    CohereConfig,
    CohereForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from draftsmith.console import stderr
from draftsmith.data.features import FeatureBatch
from draftsmith.errors import UserError
from draftsmith.eval.tree import chain
from draftsmith.eval.verifier import generate
from draftsmith.heads import block_layers
from draftsmith.heads.base import supervised
from draftsmith.heads.dflash import DFlashHead, DFlashOptions, published_taps
from draftsmith.heads.engines.published import import_head
from draftsmith.heads.engines.registry import export, read
from draftsmith.heads.in_block import Selector
from draftsmith.heads.mask_token import mask_token
from draftsmith.target import Features, Target
from draftsmith.train.objectives import Objective
from draftsmith.train.step import judged

DFLASH = [case for case, (kind, _) in CASES.items() if kind == "dflash"]


def random_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 111, shape, generator=torch.Generator().manual_seed(seed))


# -- against a plain re-implementation -------------------------------------------------------------------------


class Plain:
    """One block at a time, position by position and head by head, from the head's tensors and the published description."""

    def __init__(self, head: DFlashHead, target: Target) -> None:
        self.w = {name: tensor.detach() for name, tensor in head.named_parameters()}
        self.options, self.depths, self.target = head.options, head.config.depths, target
        self.layer, self.ids = head.config.layer, head.target_ids
        self.block = self.depths + (0 if self.options.anchor_predicts else 1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).sqrt() * self.w[f"{name}.weight"]

    def turn(self, x: Tensor, position: int) -> Tensor:
        """RoPE of one head's vector [dim]."""
        half = len(x) // 2
        angles = position / self.layer["rope_parameters"]["rope_theta"] ** (torch.arange(half) / half)
        a, b = x[:half], x[half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    def convolve(self, x: Tensor, kernels: Tensor, name: str, side: int) -> Tensor:
        """y_j = k_j0 x_j + k_j1 x_{j-1}, with kernels [block, 2 * 2 * groups] that the sublayer's input asks for."""
        base, group, out = self.w[f"{name}.base_kernel"][side], self.options.group, torch.zeros_like(x)
        asked = kernels.view(len(x), 2, 2, -1)[:, side]
        for j in range(len(x)):
            for tap in (0, 1)[: j + 1]:
                for channel in range(x.shape[1]):
                    weight = base[tap, channel] + asked[j, tap, channel // group]
                    out[j, channel] += weight * x[j - tap, channel]
        return out

    def wrapped(self, x: Tensor, name: str, sublayer: Any) -> Tensor:
        if self.options.in_block != "conv":
            return sublayer(x)
        kernels = x @ self.w[f"{name}.kernel_projection.weight"].T
        return self.convolve(sublayer(self.convolve(x, kernels, name, 0)), kernels, name, 1)

    def attention(self, x: Tensor, context: Tensor, name: str) -> Tensor:
        """x [block, hidden] behind context [t + 1, hidden]."""
        heads, kv_heads, dim = (self.layer[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        behind, mixed = len(context), torch.zeros(len(x), heads * dim)
        for j, head in ((j, h) for j in range(len(x)) for h in range(heads)):
            shared = slice(head // (heads // kv_heads) * dim, (head // (heads // kv_heads) + 1) * dim)
            q = x[j] @ self.w[f"{name}.q_proj.weight"][head * dim : (head + 1) * dim].T
            q = self.turn(self.norm(q, f"{name}.q_norm"), behind + j)
            seen = [
                (c, context[c]) for c in range(behind) if self.options.window is None or behind + j - c < self.options.window
            ]
            seen += [(behind + o, x[o]) for o in range(len(x)) if not self.options.causal or o <= j]
            keys = [
                self.turn(self.norm(row @ self.w[f"{name}.k_proj.weight"][shared].T, f"{name}.k_norm"), place)
                for place, row in seen
            ]
            values = torch.stack([row @ self.w[f"{name}.v_proj.weight"][shared].T for _, row in seen])
            weights = (torch.stack(keys) @ q / dim**0.5).softmax(0)
            mixed[j, head * dim : (head + 1) * dim] = weights @ values
        return mixed @ self.w[f"{name}.o_proj.weight"].T

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up, down = (self.w[f"{name}.{part}_proj.weight"].T for part in ("gate", "up", "down"))
        return (F.silu(x @ gate) * (x @ up)) @ down

    def hidden(self, taps: Tensor, anchor: int) -> Tensor:
        """What is read out at the depths [depths, hidden], behind tapped states [t + 1, n * hidden]."""
        embedding = self.target.embed.get_parameter("weight").detach()
        mask = self.w.get("mask_embedding", embedding[self.options.mask_token])
        x = torch.stack([embedding[anchor], *[mask] * (self.block - 1)])
        context = self.norm(taps @ self.w["fc.weight"].T, "hidden_norm")
        for i in range(self.options.layers):
            normed = self.norm(x, f"layers.{i}.input_layernorm")
            x = x + self.wrapped(
                normed, f"layers.{i}.attention_conv", lambda y, i=i: self.attention(y, context, f"layers.{i}.self_attn")
            )
            normed = self.norm(x, f"layers.{i}.post_attention_layernorm")
            x = x + self.wrapped(normed, f"layers.{i}.mlp_conv", lambda y, i=i: self.mlp(y, f"layers.{i}.mlp"))
        return self.norm(x[self.block - self.depths :], "norm")

    def logits(self, taps: Tensor, path: Tensor) -> list[Tensor]:
        """The logits of every depth where ``path`` [depths] are the anchor and the tokens behind it."""
        found, memory = [], torch.zeros(self.options.memory)
        whole = self.target.output_head.weight.detach()
        for depth, hidden in enumerate(self.hidden(taps, int(path[0]))):
            previous = path[depth]
            rows: Any = self.w.get("lm_head.weight", whole)
            base = rows @ hidden
            if self.options.in_block == "markov":
                low = self.w["in_block.markov_w1.weight"][previous]
                if self.options.gated:
                    asked = self.w["in_block.gate_proj.weight"] @ torch.cat([hidden, low]) + self.w["in_block.gate_proj.bias"]
                    low = low * asked.sigmoid()
                base = base + self.w["in_block.markov_w2.weight"] @ low
            if self.options.in_block == "gru":
                memory = self.gru(self.target.embed.get_parameter("weight")[previous], memory)
                low = F.silu(self.w["in_block.embed_proj.0.weight"] @ torch.cat([hidden, memory]))
                base = base + self.w["in_block.embed_proj.2.weight"] @ low * (depth > 0)
            if self.options.in_block == "conv":
                base = self.selected(base, hidden, int(previous))
            found.append(base)
        return found

    def gru(self, x: Tensor, memory: Tensor) -> Tensor:
        reset, update, new = (self.w["in_block.prefix_gru.weight_ih_l0"] @ x).chunk(3)
        of_reset, of_update, of_new = (self.w["in_block.prefix_gru.weight_hh_l0"] @ memory).chunk(3)
        keep = (update + of_update).sigmoid()
        return (1 - keep) * (new + (reset + of_reset).sigmoid() * of_new).tanh() + keep * memory

    def selected(self, base: Tensor, hidden: Tensor, previous: int) -> Tensor:
        order, count = base.argsort(descending=True), self.options.candidates
        gate = self.w["in_block.predecessor_codebook"][previous] * (self.w["in_block.hidden_projection.weight"] @ hidden)
        scores = {int(b): float(base[b] + gate @ self.w["in_block.successor_codebook"][b]) for b in order[:count]}
        lowered = min(0.0, max(scores.values()) - float(base[order[count - 1]]))
        return torch.tensor([scores.get(b, float(base[b]) + lowered) for b in range(len(base))])


@pytest.mark.parametrize("case", DFLASH)
def test_every_anchor_answers_as_the_plain_implementation_does(tiny_target: Target, case: str) -> None:
    head: Any = make_head(tiny_target, case)
    ids = random_ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    features = tiny_target.features(ids, head.config.taps)
    depths = head.predict(ids, head.taught(ids, mask, 0), features, tiny_target)
    plain, compared = Plain(head, tiny_target), 0
    with torch.no_grad():
        for row in depths[0].rows.tolist():
            line, t = divmod(row, 9)
            path = F.pad(ids[line], (0, DEPTHS))[t + 1 : t + 1 + DEPTHS]
            wanted = plain.logits(features.taps[line, : t + 1], path)
            for i, depth in enumerate(depths[:DEPTHS]):
                if row in depth.rows.tolist():
                    ours = depth.logits[depth.rows.tolist().index(row)]
                    torch.testing.assert_close(ours, wanted[i], atol=2e-4, rtol=1e-4)
                    compared += 1
    assert compared == sum(int(m.sum()) for m in supervised(mask, DEPTHS)) > 30


@pytest.mark.parametrize("case", ["dflash", "dflash-whole", "dflash-causal"])
@pytest.mark.parametrize("rows", [1, 40])
def test_the_size_of_a_piece_does_not_matter(
    tiny_target: Target, case: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(tiny_target, case)
    ids, mask = random_ids(3, 20), torch.ones(3, 20, dtype=torch.bool)
    features, taught = tiny_target.features(ids, head.config.taps), head.taught(ids, mask, 0)
    whole = head.predict(ids, taught, features, tiny_target)
    monkeypatch.setattr(block_layers, "ROWS", rows)
    for one, other in zip(whole, head.predict(ids, taught, features, tiny_target), strict=True):
        torch.testing.assert_close(one.logits, other.logits, atol=1e-5, rtol=1e-5)


def test_the_anchors_own_state_and_what_follows_stay_unseen(tiny_target: Target) -> None:
    """A block behind row t reads states up to t: the one of the anchor, x_{t+1}, is not known yet at drafting."""
    head = make_head(tiny_target, "dflash")
    ids, mask = random_ids(1, 12), torch.zeros(1, 12, dtype=torch.bool)
    mask[0, 5:10] = True
    features = tiny_target.features(ids, head.config.taps)
    only = [own & (torch.arange(12) == 4) for own in head.taught(ids, mask, 0)]
    logits = head.predict(ids, only, features, tiny_target)[0].logits
    for row, changes in ((4, True), (5, False), (11, False)):
        changed = Features(features.taps.clone(), features.last)
        changed.taps[0, row] += 1
        assert torch.equal(head.predict(ids, only, changed, tiny_target)[0].logits, logits) != changes


def test_only_a_causal_block_is_the_same_when_it_is_cut_short(tiny_target: Target) -> None:
    for case, same in (("dflash", False), ("dflash-causal", True)):
        long, short = make_head(tiny_target, case), make_head(tiny_target, case, depths=2)
        short.load_state_dict(long.state_dict())
        ids, mask = random_ids(1, 12), torch.ones(1, 12, dtype=torch.bool)
        features = tiny_target.features(ids, long.config.taps)
        a, b = (head.predict(ids, head.taught(ids, mask, 0), features, tiny_target)[0].logits for head in (long, short))
        assert torch.allclose(a, b, atol=1e-5) == same


@pytest.mark.parametrize("case", DFLASH)
def test_states_are_as_wide_as_a_confidence_expects(tiny_target: Target, case: str) -> None:
    head: Any = make_head(tiny_target, case)
    ids, mask = random_ids(1, 12), torch.ones(1, 12, dtype=torch.bool)
    features = tiny_target.features(ids, head.config.taps)
    depths = head.predict(ids, head.taught(ids, mask, 0), features, tiny_target)
    begun = head.begin(head.new_state(), features.rows((0, slice(0, 5))), ids[0, :6], tiny_target)
    width = 32 + {"markov": 8, "gru": 12, "conv": 8}.get(head.options.in_block, 0)
    assert head.width(head.config) == width == begun.states.shape[1]
    assert {depth.states.shape[1] for depth in depths if depth.side is None} == {width}


# -- the selector ----------------------------------------------------------------------------------------------


def test_the_selector_chooses_as_the_walk_over_candidates_does() -> None:
    """Whatever the correction, the best token is the best candidate, and other tokens keep their order."""
    torch.manual_seed(0)
    selector = Selector(8, 50, 4, 6)
    with torch.no_grad():
        for parameter in selector.parameters():
            parameter.normal_(std=1.5)
    base, hidden, previous = torch.randn(200, 50), torch.randn(200, 8), torch.randint(50, (200,))
    states, _ = selector.follow(hidden, previous, None, torch.nn.Embedding(50, 8))
    logits = selector.correct(base, states, 0)
    values, candidates = base.topk(6)
    gate = selector.predecessor_codebook[previous] * selector.hidden_projection(hidden)
    scores = values + (gate[:, None] * selector.successor_codebook[candidates]).sum(-1)
    assert torch.equal(logits.argmax(-1), candidates.gather(1, scores.argmax(1, keepdim=True)).squeeze(1))
    torch.testing.assert_close(logits.gather(1, candidates), scores)
    others = torch.ones_like(base, dtype=torch.bool).scatter(1, candidates, False)
    shift = (logits - base)[others].view(200, -1)
    assert (shift <= 0).all() and torch.allclose(shift, shift[:, :1], atol=1e-5) and (shift < 0).any()


def test_a_fresh_head_drafts_as_its_backbone_does(tiny_target: Target) -> None:
    """Every correction is zero at first, every convolution the identity."""
    options = [{"in_block": "none"}, {"in_block": "markov"}, {"in_block": "gru", "memory": 8}, {"in_block": "conv"}]
    found = []
    for each in options:
        torch.manual_seed(0)
        head = DFlashHead.create(tiny_target, DFlashOptions(**BLOCK, **each), None, 3, torch.arange(128)).eval()
        backbone = {name: t for name, t in head.state_dict().items() if "conv" not in name and not name.startswith("in_block")}
        head.load_state_dict(found[0][1] if found else backbone, strict=False)
        ids, mask = random_ids(1, 12), torch.ones(1, 12, dtype=torch.bool)
        rows, features = head.taught(ids, mask, 0), tiny_target.features(ids, head.config.taps)
        found.append((head.predict(ids, rows, features, tiny_target)[2].logits, backbone))
    for logits, _ in found[1:]:
        torch.testing.assert_close(logits, found[0][0], atol=1e-6, rtol=1e-5)


# -- anchors ---------------------------------------------------------------------------------------------------


def test_anchors_are_drawn_anew_and_keep_all_their_depths(tiny_target: Target) -> None:
    head = DFlashHead.create(tiny_target, DFlashOptions(**BLOCK, anchors=5), None, DEPTHS, torch.arange(128))
    ids, mask = random_ids(3, 30), torch.ones(3, 30, dtype=torch.bool)
    mask[0, :12], mask[2, 4:] = False, False
    every = supervised(mask, DEPTHS)
    first, again, other = (head.taught(ids, mask, seed) for seed in (7, 7, 8))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert first[0].sum(1).tolist() == [5, 5, 2] == other[0].sum(1).tolist()  # the last line has no more rows
    for own, may in zip(first, every, strict=True):
        assert torch.equal(own, first[0] & may)
    alone = head.taught(ids[1:2, :], mask[1:2], 7)
    assert torch.equal(alone[0][0], first[0][1])


def test_anchors_are_drawn_evenly(tiny_target: Target) -> None:
    head = DFlashHead.create(tiny_target, DFlashOptions(**BLOCK, anchors=4), None, 2, torch.arange(128))
    ids, mask = random_ids(1, 20), torch.ones(1, 20, dtype=torch.bool)
    drawn = torch.stack([head.taught(ids, mask, seed)[0][0] for seed in range(400)]).float().mean(0)
    assert drawn[18:].eq(0).all()
    assert (drawn[:18] - 4 / 18).abs().max() < 0.08


# -- the mask token, the taps ----------------------------------------------------------------------------------


def test_an_unused_token_is_found(tiny_target: Target, tiny_tokenizer_factory: Any) -> None:
    assert mask_token(tiny_target, None) == 111  # the first row behind the tokenizer
    tokenizer = tiny_tokenizer_factory()
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(17)], special_tokens=True)
    full = Target(tiny_target.model, tokenizer, "full")
    assert mask_token(full, None) == 127
    tokenizer.chat_template = tokenizer.chat_template + "<extra_16>"
    assert mask_token(full, None) == 126


@pytest.mark.parametrize(("wished", "says"), [(2, "texts"), (0, "texts"), (1, "texts"), (128, "outside")])
def test_a_token_in_use_is_no_mask(tiny_target: Target, wished: int, says: str) -> None:
    with pytest.raises(UserError, match=f"mask_token {wished} is .*{says}"):
        DFlashHead.create(tiny_target, DFlashOptions(mask_token=wished), None, 2, torch.arange(128))


def test_a_target_without_a_tokenizer_needs_the_mask_named(lively_target: Target) -> None:
    with pytest.raises(UserError, match="set head.options.mask_token"):
        DFlashHead.create(lively_target, DFlashOptions(), None, 2, torch.arange(128))


def test_a_faint_mask_is_told(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(stderr, "print", lambda text, **_: told.append(text))
    weight: Any = tiny_target.embed.get_parameter("weight")
    row = weight[120].clone()
    try:
        with torch.no_grad():
            weight[120] = 1e-6
        for own in (False, True):
            DFlashHead.create(tiny_target, DFlashOptions(mask_token=120, mask_embedding=own), None, 2, torch.arange(128))
        DFlashHead.create(tiny_target, DFlashOptions(mask_token=121), None, 2, torch.arange(128))
    finally:
        with torch.no_grad():
            weight[120] = row
    assert len(told) == 1 and "mask_token 120" in told[0] and "mask_embedding" in told[0]


@pytest.mark.parametrize(
    ("depth", "count", "taps"),
    [
        (36, 5, [2, 10, 18, 26, 34]),  # published for Qwen3-8B as outputs 1, 9, 17, 25, 33
        (30, 2, [2, 28]),
        (36, 1, [19]),
        (4, 2, [2, 3]),
        (4, 5, [1, 2, 3]),
        (2, 3, [1]),
    ],
)
def test_taps_are_the_published_ones_and_never_the_last(depth: int, count: int, taps: list[int]) -> None:
    assert published_taps(depth, count) == taps


@pytest.mark.parametrize(
    ("options", "vocab", "says"),
    [
        ({"in_block": "conv"}, 48, "draft_vocab to null"),
        ({"in_block": "conv", "group": 5}, 128, "divisor"),
    ],
)
def test_what_cannot_be_built_is_refused(tiny_target: Target, options: dict[str, Any], vocab: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        DFlashHead.create(tiny_target, DFlashOptions(**BLOCK, **options), None, 2, torch.arange(vocab))


def test_the_anchor_predicts_only_where_engines_know_it() -> None:
    with pytest.raises(ValueError, match="markov and gru"):
        DFlashOptions(anchor_predicts=True)


# -- transformers' own DFlash ----------------------------------------------------------------------------------


def half_learned(target: Target, text: list[int], prompt: list[int]) -> DFlashHead:
    """A head that has some of its drafts accepted on the text, and some not."""
    torch.manual_seed(0)
    head = DFlashHead.create(target, DFlashOptions(**BLOCK), None, DEPTHS, torch.arange(128))
    ids = torch.tensor([prompt + text])
    mask = (torch.arange(ids.shape[1]) >= len(prompt))[None]
    batch = FeatureBatch(ids, mask, target.features(ids, head.config.taps), None, ids.numel())
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(60):
        loss, _ = judged(head, batch, target, Objective("ce"), head.taught(ids, mask, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval()


def test_transformers_drafts_and_accepts_the_same(
    lively_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """generate(speculation_type="dflash") of the exported directory: the same text, the same count in every pass."""
    target, prompt, new = lively_target, [5, 6, 7, 8, 9], 30
    plain = generate(target, None, prompt, chain(1), new).tokens
    head = half_learned(target, plain, prompt)
    assistant = AutoModel.from_pretrained(export(head, target, "transformers", tmp_path / "out", DEPTHS)).float().eval()
    counts: list[int] = []
    monkeypatch.setattr(
        DFlashTokenCandidateGenerator,
        "update_candidate_strategy",
        lambda self, ids, scores, matches: counts.append(int(matches)),
        raising=False,
    )
    ids = torch.tensor([prompt])
    settings: dict[str, Any] = {"speculation_type": "dflash", "max_new_tokens": new, "do_sample": False}
    theirs = target.model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, **settings)
    ours = generate(target, head, prompt, chain(DEPTHS), new)
    assert theirs[0, len(prompt) :].tolist() == ours.tokens == plain
    common = min(len(counts) - 1, len(ours.accepted)) - 1  # the first of theirs is the prefill; the last may be cut short
    assert counts[1 : 1 + common] == ours.accepted[:common]
    assert 0 < sum(ours.accepted) < DEPTHS * len(ours.accepted)


# -- how heads are stored --------------------------------------------------------------------------------------

LAYER_SHAPES = {
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,),
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
}
BACKBONE = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)} | {
    f"layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER_SHAPES.items()
}
VOCABULARY = {"lm_head.weight": (48, 32), "d2t": (48,), "t2d": (128,)}
MARKOV = {"markov_head.markov_w1.weight": (128, 8), "markov_head.markov_w2.weight": (128, 8)}
GATE = {"markov_head.gate_proj.weight": (8, 40), "markov_head.gate_proj.bias": (8,)}
CONFIDENCE = {"confidence_head.proj.weight": (1, 40), "confidence_head.proj.bias": (1,)}
DOMINO = {
    "prefix_gru.weight_ih_l0": (36, 32),
    "prefix_gru.weight_hh_l0": (36, 12),
    "embed_proj.0.weight": (8, 44),
    "embed_proj.2.weight": (128, 8),
}
SELECTOR = {
    "candidate_selector.predecessor_codebook": (128, 8),
    "candidate_selector.successor_codebook": (128, 8),
    "candidate_selector.hidden_projection.weight": (8, 32),
} | {
    f"layers.{i}.{place}_conv.{name}": shape
    for i in range(2)
    for place in ("attention", "mlp")
    for name, shape in {"base_kernel": (2, 2, 32), "kernel_projection.weight": (16, 32)}.items()
}
ASSISTANT = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
CHOICES: dict[str, dict[str, Any]] = {
    "none": {},
    "markov": {"in_block": "markov", "rank": 8, "anchor_predicts": True},
    "gated": {"in_block": "markov", "rank": 8, "anchor_predicts": True, "gated": True},
    "gru": {"in_block": "gru", "rank": 8, "memory": 12},
    "conv": {"in_block": "conv", "rank": 8, "group": 8, "candidates": 5},
}
EXTRA = {"none": {}, "markov": MARKOV, "gated": MARKOV | GATE, "gru": DOMINO, "conv": SELECTOR}
LOADS = {
    "vllm": ("none", "markov", "conv"),
    "speculators": ("none", "markov", "gated", "conv"),
    "sglang": ("none", "markov", "gated", "gru", "conv"),
    "tensorrt-llm": ("none", "markov"),
    "llamacpp": ("none", "markov", "conv"),
    "transformers": ("none",),
}


def a_head(target: Target, choice: str = "none", size: int = 128, confidence: bool = False, **options: Any) -> DFlashHead:
    """A head whose every tensor is random, so that a tensor that is lost or swapped shows."""
    torch.manual_seed(0)
    ids = torch.randperm(128)[:size].sort().values
    settings = DFlashOptions(**(BLOCK | CHOICES[choice] | options))
    head = DFlashHead.create(target, settings, None, 4, ids, confidence)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head.eval()


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("engine", LOADS)
def test_an_engine_gets_the_names_it_loads_or_a_reason(tiny_target: Target, tmp_path: Path, engine: str, choice: str) -> None:
    head, out = a_head(tiny_target, choice), tmp_path / "out"
    if choice not in LOADS[engine]:
        with pytest.raises(UserError, match=f"{engine} cannot draft from a dflash head with .*(in_block|gated)"):
            export(head, tiny_target, engine, out, 4)
        assert not out.exists()
        return
    export(head, tiny_target, engine, out, 4)
    names = BACKBONE | EXTRA[choice]
    if engine == "transformers":
        names = {ASSISTANT.get(name, name): shape for name, shape in names.items()}
    assert shapes(out) == names
    again: Any = read(engine, "dflash", out, tiny_target)
    assert again.config.taps == [2, 3] and again.config.depths == 4 and again.options == head.options
    assert import_head(out, tiny_target).options == head.options


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
@pytest.mark.parametrize("choice", ["none", "markov"])
def test_a_reduced_vocabulary_has_rows_of_its_own(tiny_target: Target, tmp_path: Path, engine: str, choice: str) -> None:
    out = export(a_head(tiny_target, choice, 48), tiny_target, engine, tmp_path / "out", 4)
    wider = {"markov_head.markov_w2.weight": (48, 8)} if choice == "markov" else {}
    assert shapes(out) == BACKBONE | EXTRA[choice] | VOCABULARY | wider
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 48


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "vocabulary": ("sglang", {"size": 48}, "vocabulary"),
    "converter's vocabulary": ("llamacpp", {"size": 48}, "vocabulary"),
    "mask": ("llamacpp", {"mask_embedding": True}, "mask's own"),
    "markov's mask": ("vllm", {"choice": "markov", "mask_embedding": True}, "mask's own"),
    "causal": ("tensorrt-llm", {"causal": True}, "causal"),
    "causal assistant": ("transformers", {"causal": True}, "causal"),
    "anchor": ("sglang", {"choice": "markov", "anchor_predicts": False}, "anchor_predicts: false"),
    "taps": ("vllm", {"taps": [0, 3]}, r"taps \[0, 3\]"),
    "last tap": ("vllm", {"taps": [1, 4]}, r"taps \[1, 4\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_engine_would_draft_wrongly_from_is_refused(tiny_target: Target, tmp_path: Path, case: str) -> None:
    engine, options, says = REFUSED[case]
    options = dict(options)
    taps = options.pop("taps", None)
    head = a_head(tiny_target, **options)
    if taps:
        head.config.taps = taps
    with pytest.raises(UserError, match=says):
        export(head, tiny_target, engine, tmp_path / "out", 4)


def scaled(config: Any, model: Any) -> Target:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    sizes = sizes if config is GemmaConfig else {k: v for k, v in sizes.items() if k != "head_dim"} | {"logit_scale": 0.5}
    return Target(model(config(**sizes)).float(), None, "scaled")


def test_a_target_that_scales_is_not_drafted_for_wrongly(tmp_path: Path) -> None:
    """Scaled embeddings are written out where an engine takes them; scaled logits cannot be corrected by an engine."""
    gemma = scaled(GemmaConfig, GemmaForCausalLM)
    names = shapes(export(a_head(gemma), gemma, "vllm", tmp_path / "gemma", 4))
    assert names == BACKBONE | {"embed_tokens.weight": (128, 32)}
    with pytest.raises(UserError, match="scales its embeddings"):
        export(a_head(gemma), gemma, "sglang", tmp_path / "out", 4)
    cohere = scaled(CohereConfig, CohereForCausalLM)
    export(a_head(cohere), cohere, "vllm", tmp_path / "cohere", 4)
    with pytest.raises(UserError, match="scales or caps its logits"):
        export(a_head(cohere, "markov"), cohere, "vllm", tmp_path / "out", 4)


def test_a_scaled_rope_is_refused_where_it_would_be_ignored(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    sizes: dict[str, Any] = dict(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, rope_parameters=rope,
    )  # fmt: skip
    target = Target(LlamaForCausalLM(LlamaConfig(**sizes)).float(), None, "stretched")
    config = json.loads((export(a_head(target), target, "vllm", tmp_path / "out", 4) / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0} and config["rope_theta"] == 1e4
    assert config["rope_parameters"] == rope
    with pytest.raises(UserError, match="RoPE that is scaled"):
        export(a_head(target), target, "tensorrt-llm", tmp_path / "b", 4)


def test_the_plain_config_says_everything(tiny_target: Target, tmp_path: Path) -> None:
    def written(choice: str, **options: Any) -> dict[str, Any]:
        out = export(a_head(tiny_target, choice, **options), tiny_target, "vllm", tmp_path / f"{choice}-{len(options)}", 4)
        return json.loads((out / "config.json").read_text())

    config = written("none")
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["block_size"] == 5 and config["mask_token_id"] == 127 and config["is_causal"] is False
    assert config["layer_types"] == ["full_attention"] * 2 and config["sliding_window"] is None
    assert (config["num_hidden_layers"], config["intermediate_size"], config["head_dim"]) == (2, 64, 8)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e4 and config["rope_scaling"] is None
    nested = config["dflash_config"]
    assert nested["target_layer_ids"] == [1, 2] and nested["mask_token_id"] == 127 and nested["block_size"] == 5
    assert nested["causal"] is False and nested["use_swa"] is False and nested["sample_from_anchor"] is False
    config = written("none", causal=True, window=9)
    assert config["is_causal"] is config["dflash_config"]["causal"] is True
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert config["sliding_window"] == config["dflash_config"]["swa_window_size"] == 9
    config = written("conv")
    assert config["architectures"] == ["DFlash2DraftModel"]
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    assert [config["dflash_config"][key] for key in keys] == [2, 8, 8, 5]
    config = written("markov")
    assert config["architectures"] == ["Qwen3DSparkModel"] and "dflash_config" not in config
    assert config["sample_from_anchor"] is True and config["dspark_bonus_anchor"] is False and config["block_size"] == 4
    assert config["target_layer_ids"] == [1, 2] and config["markov_rank"] == 8 and config["markov_head_type"] == "vanilla"
    assert config["enable_confidence_head"] is False and config["confidence_head_with_markov"] is True
    out = export(a_head(tiny_target, "gru"), tiny_target, "sglang", tmp_path / "gru", 4)
    nested = json.loads((out / "config.json").read_text())["dflash_config"]
    assert nested["projector_type"] == "domino" and nested["shift_label"] is False and nested["pure_draft_prefix_len"] == 1
    assert (nested["gru_hidden_dim"], nested["emb_dim"], nested["block_size"]) == (12, 8, 5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_speculators_config_says_everything(tiny_target: Target, tmp_path: Path, causal: bool) -> None:
    """vLLM takes sliding_window_non_causal for all layers, speculators for sliding ones alone: both must read the same."""
    for choice, kind in (("none", "dflash"), ("conv", "dflash2"), ("markov", "dspark")):
        out = export(a_head(tiny_target, choice, causal=causal), tiny_target, "speculators", tmp_path / choice, 3)
        config = json.loads((out / "config.json").read_text())
        assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == kind
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
        assert "model_type" not in config and config["transformer_layer_config"]["model_type"] == "qwen3"
        assert config["aux_hidden_state_layer_ids"] == [2, 3] and config["mask_token_id"] == 127
        assert config["sliding_window_non_causal"] is not causal
        layer = config["transformer_layer_config"]
        assert layer["is_causal"] is causal
        assert layer["layer_types"] == ["sliding_attention" if causal else "full_attention"] * 2
        assert layer["sliding_window"] == (64 if causal else None)
        assert config["sample_from_anchor"] is (choice == "markov") and config["block_size"] == (4 if choice == "markov" else 5)
        assert read("speculators", "dflash", out, tiny_target).options.window is None


@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators"])
def test_a_trained_mask_lies_beside(tiny_target: Target, tmp_path: Path, engine: str) -> None:
    head = a_head(tiny_target, mask_embedding=True)
    out = export(head, tiny_target, engine, tmp_path / "out", 4)
    stored = torch.load(out / "mask_embedding.pt", weights_only=True)
    assert stored["mask_token_id"] == 127 and torch.equal(stored["embedding"], head.get_parameter("mask_embedding"))
    assert "mask_embedding" not in shapes(out)
    again = import_head(out, tiny_target)
    assert torch.equal(again.get_parameter("mask_embedding"), head.get_parameter("mask_embedding"))


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_a_confidence_goes_with_a_markov_head(tiny_target: Target, tmp_path: Path, engine: str) -> None:
    head: Any = a_head(tiny_target, "markov", confidence=True)
    head.confidence.temperature.copy_(torch.tensor([1.0, 1.5, 2.0, 0.5]))
    out = export(head, tiny_target, engine, tmp_path / "out", 4)
    assert shapes(out) == BACKBONE | MARKOV | CONFIDENCE
    assert json.loads((out / "config.json").read_text())["enable_confidence_head"] is True
    again: Any = read(engine, "dflash", out, tiny_target)
    assert torch.equal(again.confidence.temperature, head.confidence.temperature)
    states = torch.randn(3, 40)
    assert torch.equal(again.confidence(states), head.confidence(states))
    plain: Any = read(
        engine, "dflash", export(a_head(tiny_target, confidence=True), tiny_target, engine, tmp_path / "b", 4), tiny_target
    )
    assert plain.confidence is None and shapes(tmp_path / "b") == BACKBONE


# -- published directories -------------------------------------------------------------------------------------

QWEN3 = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}  # fmt: skip
ROPE4 = {"rope_theta": 1000000, "rope_scaling": None}
ROPE5 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
VERIFIER = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}
PROPOSAL = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}], "default_proposal_method": "greedy"}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "use_sliding_window": True}
DEEPSPEC = {"target_layer_ids": [0, 2], "mask_token_id": 120, "block_size": 7, "markov_rank": 8}


def of_speculators(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, **PROPOSAL, "verifier": VERIFIER},
        "draft_vocab_size": 128,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 120,
        **more,
    }


# what the publisher's config.json holds, its tensors, the engine that the head is written for again, and what it means
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    "z-lab": (
        {**QWEN3, **ROPE4, "architectures": ["DFlashDraftModel"], "block_size": 16, "num_target_layers": 4}
        | {"dflash_config": {"mask_token_id": 120, "target_layer_ids": [0, 2]}},
        BACKBONE,
        "vllm",
        {"in_block": "none", "causal": False, "depths": 15},
    ),
    "z-lab without ids": (
        {**QWEN3, **ROPE4, "architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 120}},
        BACKBONE,
        "sglang",
        {"in_block": "none", "depths": 15, "taps": [2, 3]},
    ),
    "z-lab 2": (
        {**QWEN3, **ROPE5, **SLIDING, "architectures": ["DFlash2DraftModel"], "is_causal": False, "num_target_layers": 4}
        | {"dflash_config": {"block_size": 16, "mask_token_id": 120, "target_layer_ids": [0, 2], "conv_kernel_size": 2}
           | {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 16}},
        BACKBONE | SELECTOR,
        "vllm",
        {"in_block": "conv", "causal": False, "window": 16, "candidates": 16, "group": 8, "rank": 8, "depths": 15},
    ),
    "DeepSpec": (
        {**QWEN3, **ROPE4, **DEEPSPEC, "architectures": ["Qwen3DSparkModel"], "markov_head_type": "vanilla"}
        | {"enable_confidence_head": True, "confidence_head_with_markov": True},
        BACKBONE | MARKOV | CONFIDENCE,
        "vllm",
        {"in_block": "markov", "anchor_predicts": True, "depths": 7, "rank": 8},
    ),
    "DeepSpec, gated": (
        {**QWEN3, **ROPE4, **DEEPSPEC, "architectures": ["Qwen3DSparkModel"], "markov_head_type": "gated"},
        BACKBONE | MARKOV | GATE,
        "sglang",
        {"in_block": "markov", "anchor_predicts": True, "gated": True},
    ),
    "Domino": (
        {**QWEN3, **ROPE4, "architectures": ["DominoDraftModel"], "block_size": 16, "num_target_layers": 4, "emb_dim": 8}
        | {"dflash_config": {"mask_token_id": 120, "target_layer_ids": [0, 2], "projector_type": "domino", "emb_dim": 8}
           | {"pure_draft_prefix_len": 1, "gru_hidden_dim": 12, "shift_label": True}},
        BACKBONE | DOMINO,
        "sglang",
        {"in_block": "gru", "anchor_predicts": True, "memory": 12, "rank": 8, "depths": 16},
    ),
    "speculators dflash": (
        of_speculators("dflash", block_size=8, sliding_window_non_causal=False, sample_from_anchor=False)
        | {"transformer_layer_config": QWEN3 | ROPE5 | SLIDING},
        BACKBONE,
        "speculators",
        {"in_block": "none", "causal": True, "window": 16, "depths": 7},
    ),
    "speculators dflash, full attention, reduced": (
        of_speculators("dflash", block_size=8) | {"draft_vocab_size": 48, "transformer_layer_config": QWEN3 | ROPE5},
        BACKBONE | VOCABULARY,
        "speculators",
        {"in_block": "none", "causal": False, "window": None, "depths": 7},
    ),
    "speculators dflash2": (
        of_speculators("dflash2", block_size=8, conv_kernel_size=2, conv_group_size=8, selector_rank=8, selector_top_k=16)
        | {"transformer_layer_config": QWEN3 | ROPE5 | SLIDING},
        BACKBONE | SELECTOR,
        "speculators",
        {"in_block": "conv", "causal": False, "window": 16, "depths": 7},
    ),
    "speculators dspark": (
        of_speculators("dspark", block_size=8, markov_rank=8, enable_confidence_head=True, confidence_head_with_markov=True)
        | {"transformer_layer_config": QWEN3 | ROPE5},
        BACKBONE | MARKOV | CONFIDENCE,
        "speculators",
        {"in_block": "markov", "anchor_predicts": True, "depths": 8},
    ),
    "Muse Glimmer's": (
        {k: v for k, v in QWEN3.items() if k != "vocab_size"} | ROPE5 | {"sliding_window": 16, "mask_token_id": 120}
        | {"model_type": "muse_glimmer_assistant", "architectures": ["MuseGlimmerAssistantModel"], "block_size": 16}
        | {"target_layer_ids": [0, 2]},
        {ASSISTANT.get(name, name): shape for name, shape in BACKBONE.items()},
        "transformers",
        {"in_block": "none", "causal": False, "window": 16, "depths": 15},
    ),
}  # fmt: skip


def publish(directory: Path, name: str, drop: str | None = None) -> dict[str, Tensor]:
    """Write a directory as its publisher does, in bfloat16 with random weights."""
    config, names, _, _ = PUBLISHED[name]
    torch.manual_seed(0)
    tensors = {n: torch.randn(shape).to(torch.bfloat16) for n, shape in names.items() if n not in ("d2t", "t2d")}
    if "d2t" in names:
        ids = torch.randperm(128)[:48].sort().values
        tensors |= {"d2t": ids - torch.arange(48), "t2d": torch.zeros(128, dtype=torch.bool).index_fill(0, ids, True)}
    tensors = {n: tensor for n, tensor in tensors.items() if n != drop}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_directory_comes_back_byte_by_byte(tiny_target: Target, tmp_path: Path, name: str) -> None:
    stored = publish(tmp_path / "in", name)
    _, _, engine, meant = PUBLISHED[name]
    head: Any = import_head(tmp_path / "in", tiny_target)
    found = {"depths": head.config.depths, "taps": head.config.taps} | head.options.model_dump()
    assert found | {"taps": [1, 3], "mask_token": 120} | meant == found | {"taps": meant.get("taps", [1, 3])}
    out = export(head, tiny_target, engine, tmp_path / "out", head.config.depths)
    written = load_file(out / "model.safetensors")
    assert {n: (t.dtype, tuple(t.shape)) for n, t in written.items()} == {
        n: (t.dtype, tuple(t.shape)) for n, t in stored.items()
    }
    assert all(torch.equal(written[n], tensor) for n, tensor in stored.items())
    again: Any = read(engine, "dflash", out, tiny_target)
    assert again.options == head.options and again.config.layer == head.config.layer


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_head_drafts_without_loss(lively_target: Target, tmp_path: Path, name: str) -> None:
    publish(tmp_path / "in", name)
    head = import_head(tmp_path / "in", lively_target)
    plain = generate(lively_target, None, [5, 6, 7], chain(1), 12).tokens
    assert generate(lively_target, head, [5, 6, 7], chain(4), 12).tokens == plain


def test_rope_keeps_its_numbers_where_weights_are_bfloat16(tiny_target: Target, tmp_path: Path) -> None:
    """A cast of the whole head rounds the frequencies, too, and far positions lose their place."""
    publish(tmp_path / "in", "z-lab")
    head: Any = import_head(tmp_path / "in", tiny_target)
    assert head.fc.weight.dtype == torch.bfloat16 and head.rotary.inv_freq.dtype == torch.float32
    torch.testing.assert_close(head.rotary.inv_freq, 1 / 1e6 ** (torch.arange(0, 8, 2) / 8), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_missing_tensor_is_named(tiny_target: Target, tmp_path: Path, name: str) -> None:
    lost = list(PUBLISHED[name][1])[3]
    publish(tmp_path / "in", name, drop=lost)
    with pytest.raises(UserError, match=lost.replace(".", r"\.")):
        import_head(tmp_path / "in", tiny_target)


def test_copies_of_the_targets_tensors_are_let_go(tiny_target: Target, tmp_path: Path) -> None:
    """DeepSpec stores the target's embedding and output head again."""
    stored = publish(tmp_path / "in", "DeepSpec")
    theirs = {
        "embed_tokens.weight": tiny_target.embed.get_parameter("weight"),
        "lm_head.weight": tiny_target.output_head.weight,
    }
    copies = {name: tensor.detach().to(torch.bfloat16).clone() for name, tensor in theirs.items()}
    save_file({**stored, **copies}, tmp_path / "in" / "model.safetensors")
    import_head(tmp_path / "in", tiny_target)
    copies["lm_head.weight"][3] += 1
    save_file({**stored, **copies}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight is not the target's own"):
        import_head(tmp_path / "in", tiny_target)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("z-lab", {"hidden_size": 64}, "hidden_size: 64"),
        ("z-lab", {"vocab_size": 130}, "vocab_size: 130"),
        ("z-lab", {"num_target_layers": 36}, "num_target_layers: 36"),
        ("z-lab", {"attention_bias": True}, "attention_bias: True"),
        (
            "z-lab",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
            "kinds full_attention, sliding",
        ),
        ("z-lab 2", {"output_multiplier": 0.2}, "output_multiplier: 0.2"),
        ("z-lab 2", {"conv_kernel_size": 3}, "conv_kernel_size"),
        ("DeepSpec", {"markov_head_type": "rnn"}, "markov_head_type: rnn"),
        ("DeepSpec", {"num_hidden_layers": None}, "layers: Input should be"),
    ],
)
def test_a_mismatch_is_named(tiny_target: Target, tmp_path: Path, name: str, change: dict[str, Any], says: str) -> None:
    publish(tmp_path / "in", name)
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text())
    if "conv_kernel_size" in change:
        config["dflash_config"] |= change
    path.write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=says):
        import_head(tmp_path / "in", tiny_target)
