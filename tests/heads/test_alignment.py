"""One conformance table for all head kinds: which rows teach what, and training sees exactly what drafting sees."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, DEPTHS, make_head
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen3Config,
    StableLmConfig,
)

from draftsmith.data.chat import Encoded, encode
from draftsmith.data.conversations import Conversation
from draftsmith.data.features import FeatureBatch, OnlineFeatures
from draftsmith.errors import UserError
from draftsmith.eval.tree import chain, full
from draftsmith.heads.base import Depth, DraftHead, Shape, check_target, move_taps, supervised
from draftsmith.heads.drafting import draft
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.kinds import KINDS, load_head
from draftsmith.heads.layers import FeatureLayer, LlamaRotaryEmbedding, causal, unrolled_attention
from draftsmith.target import Features, Target
from draftsmith.train.metrics import DepthSums
from draftsmith.train.objectives import Objective
from draftsmith.train.step import judged

TAUGHT = ("lk", "ce")  # by the target's distribution, by the data's tokens: tests/train holds all losses against each other


@pytest.fixture(params=list(CASES))
def head(request: pytest.FixtureRequest, tiny_target: Target) -> DraftHead:
    return make_head(tiny_target, request.param)


def random_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 111, shape, generator=torch.Generator().manual_seed(seed))


def batch_of(target: Target, head: DraftHead, ids: Tensor, mask: Tensor) -> FeatureBatch:
    return FeatureBatch(ids, mask, target.features(ids, head.config.taps), None, ids.numel())


def predicted(head: DraftHead, ids: Tensor, mask: Tensor, target: Target) -> list[Depth]:
    """The depths of a training forward, side lessons left out."""
    found = head.predict(ids, head.taught(ids, mask, 0), target.features(ids, head.config.taps), target)
    return [depth for depth in found if depth.side is None]


def lesson(head: DraftHead, batch: FeatureBatch, target: Target, loss: str = "kl") -> tuple[Tensor, DepthSums]:
    """The loss summed over rows, with gradients, and the sums per depth."""
    rows = head.taught(batch.ids, batch.mask, 0)
    return judged(head, batch, target, Objective(loss, depth_decay=1.0), rows, torch.ones(len(rows)))


def losses(head: DraftHead, batch: FeatureBatch, target: Target, loss: str = "kl") -> Tensor:
    """The loss summed over rows; depths, side lessons and what rows cost besides in one number."""
    return lesson(head, batch, target, loss)[0]


def gradients(head: DraftHead, value: Tensor) -> dict[str, Tensor]:
    named = {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
    return dict(zip(named, torch.autograd.grad(value, list(named.values())), strict=True))


def reads_states(head: DraftHead, batch: FeatureBatch, target: Target) -> bool:
    """Whether its drafts depend on the target's states at all."""
    rows, states = head.taught(batch.ids, batch.mask, 0), batch.features
    other = Features(torch.randn_like(states.taps), torch.randn_like(states.last))
    ours, theirs = (head.predict(batch.ids, rows, each, target) for each in (states, other))
    return any(not torch.equal(a.logits, b.logits) for a, b in zip(ours, theirs, strict=True))


# -- which rows teach what -------------------------------------------------------------------------------------

REPLY = torch.tensor([[False] * 4 + [True] * 5 + [False]])  # case 02: a reply at 4..8, its end of turn at 8, a newline at 9


def test_case_02_supervised_rows() -> None:
    maps = supervised(REPLY, 5)
    assert [m[0].nonzero().flatten().tolist() for m in maps] == [list(range(3, 7 - k)) for k in range(5)]


def test_a_row_shorter_than_the_depths_is_supervised_where_it_can_be() -> None:
    for time in range(6):
        maps = supervised(torch.ones(2, time, dtype=torch.bool), 5)
        assert [m.shape for m in maps] == [(2, time)] * 5
        assert [int(m[0].sum()) for m in maps] == [max(0, time - 2 - k) for k in range(5)]


def test_case_02_the_head_answers_for_these_rows_alone(tiny_target: Target, head: DraftHead) -> None:
    ids = torch.arange(10, 20)[None]
    depths = predicted(head, ids, REPLY, tiny_target)
    assert [depth.rows.tolist() for depth in depths] == [list(range(3, 7 - k)) for k in range(DEPTHS)]
    assert [len(depth.logits) for depth in depths] == [4, 3, 2, 1]


@pytest.mark.parametrize("loss", TAUGHT)
def test_case_02_gradient_probe(tiny_target: Target, head: DraftHead, loss: str) -> None:
    head.target_ids.copy_(torch.arange(len(head.target_ids)))  # the data's tokens must be in the draft vocabulary for ce
    batch = batch_of(tiny_target, head, torch.arange(10, 20)[None], REPLY)
    if not reads_states(head, batch, tiny_target):
        pytest.skip("it reads tokens alone")
    read = batch.features.taps if head.config.taps else batch.features.last
    read.requires_grad_()
    losses(head, batch, tiny_target, loss).backward()
    assert read.grad is not None
    seen = read.grad[0].abs().amax(-1) > 0
    assert seen[3:7].all() and not seen[7:].any()


@pytest.mark.parametrize("loss", TAUGHT)
def test_case_02_what_follows_the_turn_does_not_count(tiny_target: Target, head: DraftHead, loss: str) -> None:
    ids, other = torch.arange(10, 20)[None], torch.arange(10, 20)[None]
    other[0, 9] = 77
    changed = losses(head, batch_of(tiny_target, head, other, REPLY), tiny_target, loss)
    assert torch.equal(losses(head, batch_of(tiny_target, head, ids, REPLY), tiny_target, loss), changed)


def test_a_two_turn_chat_teaches_exactly_these_pairs(tiny_target: Target) -> None:
    turns = [("user", "ab"), ("assistant", "xyz"), ("user", "c"), ("assistant", "v")]
    messages = [{"role": role, "content": content} for role, content in turns]
    tokenizer = tiny_target.tokenizer
    example = encode(Conversation(messages, "chats.jsonl", 1), tokenizer, None)
    ids, mask = torch.as_tensor(example.ids), torch.as_tensor(example.mask)[None]

    def pairs(depth: int) -> list[tuple[str, str]]:
        """What a row has read behind its state, and what it predicts."""
        rows = supervised(mask, depth + 1)[depth][0].nonzero().flatten().tolist()
        return [(tokenizer.decode(ids[t + 1 : t + 2 + depth]), tokenizer.decode(ids[t + 2 + depth])) for t in rows]

    assert pairs(0) == [("x", "y"), ("y", "z"), ("z", "<|im_end|>"), ("v", "<|im_end|>")]
    assert pairs(1) == [("xy", "z"), ("yz", "<|im_end|>")]
    assert pairs(2) == [("xyz", "<|im_end|>")]


@pytest.mark.parametrize("loss", TAUGHT)
def test_case_03_a_batch_without_supervised_rows(tiny_target: Target, head: DraftHead, loss: str) -> None:
    ids = random_ids(2, 12)
    value = losses(head, batch_of(tiny_target, head, ids, torch.zeros(2, 12, dtype=torch.bool)), tiny_target, loss)
    assert value.item() == 0 and value.requires_grad
    for name, gradient in gradients(head, value).items():
        assert gradient.eq(0).all(), name


def test_case_03_an_unsupervised_row_changes_nothing(tiny_target: Target, head: DraftHead) -> None:
    ids, mask = random_ids(2, 12), torch.zeros(2, 12, dtype=torch.bool)
    mask[1, 5:11] = True
    together = losses(head, batch_of(tiny_target, head, ids, mask), tiny_target)
    alone = losses(head, batch_of(tiny_target, head, ids[1:], mask[1:]), tiny_target)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_case_18_a_batch_is_the_sum_of_its_rows(tiny_target: Target, head: DraftHead) -> None:
    lengths, ids = (5, 9, 14), random_ids(3, 14)
    mask = torch.rand(3, 14, generator=torch.Generator().manual_seed(3)) < 0.85
    for row, length in enumerate(lengths):
        ids[row, length:], mask[row, length:] = 0, False
    together = losses(head, batch_of(tiny_target, head, ids, mask), tiny_target)
    rows = [batch_of(tiny_target, head, ids[r : r + 1, :n], mask[r : r + 1, :n]) for r, n in enumerate(lengths)]
    alone = torch.stack([losses(head, row, tiny_target) for row in rows]).sum()
    assert together > 0
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    summed = gradients(head, alone)
    for name, gradient in gradients(head, together).items():
        torch.testing.assert_close(gradient, summed[name], atol=1e-5 * max(1, float(gradient.abs().max())), rtol=0)


# -- training sees what drafting sees --------------------------------------------------------------------------


def fed_tokens(shape: Shape, level: int, own: list[int], data: Tensor) -> tuple[list[int], Tensor]:
    """The nodes of a level that are read on, and their tokens: the data's own on the path ``own``, noise beside it."""
    nodes = [node for node in shape.level(level) if shape.children(node)]
    noise = random_ids(len(nodes), seed=level + 50)
    noise[nodes.index(own[level])] = data
    return nodes, noise


def drafted_logits(
    head: DraftHead, state: Any, features: Any, ids: Tensor, rows: range, shape: Shape, target: Target
) -> list[Tensor]:
    """One round: commit ``rows``, then draft along the data behind the last. The logits of every depth on the data's path."""
    t = rows[-1]
    begun = head.begin(state, features.rows((0, slice(rows.start, rows.stop))), ids[rows.start : t + 2], target)
    found = [begun.logits[0]]
    own = [0]
    for level in range(1, max(shape.depths)):
        own.append(shape.children(own[-1])[-1])  # the worst sibling is the data's, so that the others come before it
        nodes, tokens = fed_tokens(shape, level, own, ids[t + 1 + level])
        logits = head.deepen(state, nodes, tokens, shape, target).logits
        found.append(logits[nodes.index(own[-1])])
    return found


@pytest.mark.parametrize("shape", [chain(DEPTHS), full([2, 2, 2, 1])], ids=lambda s: s.name)
@torch.no_grad()
def test_the_training_forward_is_the_draft(tiny_target: Target, head: DraftHead, shape: Shape) -> None:
    """Row t at depth i of the training forward = the cached draft behind row t on the data's tokens, in every round."""
    ids = random_ids(1, 24)
    trained = predicted(head, ids, torch.ones(1, 24, dtype=torch.bool), tiny_target)
    with head.adapted(tiny_target):
        features = tiny_target.features(ids, head.config.taps)
    state = head.new_state()
    for rows in (range(0, 7), range(7, 8), range(8, 11), range(11, 13), range(13, 18)):
        drafted = drafted_logits(head, state, features, ids[0], rows, shape, tiny_target)
        assert len(drafted) == DEPTHS
        for depth, logits in zip(trained, drafted, strict=True):
            row = depth.rows.tolist().index(rows[-1])
            torch.testing.assert_close(logits, depth.logits[row], atol=1e-5 * float(logits.abs().max()), rtol=0)


def test_the_drafts_depths_differ(tiny_target: Target, head: DraftHead) -> None:
    """The parity above means something: no two depths of a random head agree."""
    ids = random_ids(1, 24)
    depths = predicted(head, ids, torch.ones(1, 24, dtype=torch.bool), tiny_target)
    for one, other in pairwise(depths):
        assert (one.logits[: len(other.logits)] - other.logits).abs().max() > 0.1


@pytest.mark.parametrize("normed", [False, True])
def test_the_embedding_comes_first_and_the_residual_is_the_feature(tiny_target: Target, normed: bool) -> None:
    layer: Any = make_head(tiny_target, "eagle3-norm-before-residual" if normed else "eagle3").get_submodule("layer")
    embeds, feature = torch.randn(2, 1, 5, 32, generator=torch.Generator().manual_seed(0))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + layer.hidden_norm.variance_epsilon).sqrt() * weight

    hidden = norm(feature, layer.hidden_norm.weight)
    entered, residual = layer.enter(embeds, feature)
    torch.testing.assert_close(entered, torch.cat([norm(embeds, layer.input_layernorm.weight), hidden], -1))
    torch.testing.assert_close(residual, hidden if normed else feature)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_unrolled_attention_equals_a_dense_one(steps: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    batch, heads, time, dim = 2, 4, 6, 3

    def draw(count: int) -> Tensor:
        return torch.randn(batch, count, time, dim, generator=generator, dtype=torch.float64)

    q, keys, values = draw(heads), [draw(kv_heads) for _ in range(steps)], [draw(kv_heads) for _ in range(steps)]
    mixed = unrolled_attention(q, keys, values, causal(torch.arange(time).expand(batch, time)))
    for b, h, t in [(b, h, t) for b in range(batch) for h in range(heads) for t in range(time)]:
        g = h // (heads // kv_heads)
        seen_keys = torch.stack([*keys[0][b, g, : t + 1], *(key[b, g, t] for key in keys[1:])])
        seen_values = torch.stack([*values[0][b, g, : t + 1], *(value[b, g, t] for value in values[1:])])
        weights = (seen_keys @ q[b, h, t] / dim**0.5).softmax(0)
        torch.testing.assert_close(mixed[b, h, t], weights @ seen_values, atol=1e-6, rtol=0)


# -- packing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", TAUGHT)
def test_packed_sequences_cost_what_they_cost_alone(tiny_target: Target, head: DraftHead, loss: str) -> None:
    """Sums, gradients and metrics of five sequences in two lines equal those of the same five in a line each."""
    head.target_ids.copy_(torch.arange(len(head.target_ids)))
    examples = [Encoded(random_ids(n, seed=n).numpy().astype(np.int32), np.arange(n) % 7 > 1) for n in (14, 9, 20, 12, 8)]
    seen = []
    for width in (None, 40):
        source = OnlineFeatures(tiny_target, examples, head.config.taps, width=width)
        batch = source.batch([0, 1, 2, 3, 4])
        assert (batch.ids.shape, batch.tokens) == ((5, 20) if width is None else (2, 34), 63)
        value, sums = lesson(head, batch, tiny_target, loss)
        seen.append((value, sums, gradients(head, value)))
    (apart, sums, slopes), (packed, packed_sums, packed_slopes) = seen
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-5)
    for name in ("right", "prefix", "rows"):
        assert torch.equal(getattr(packed_sums, name), getattr(sums, name)), name
    assert sums.rows.min() > 5
    for name, slope in slopes.items():
        torch.testing.assert_close(
            packed_slopes[name], slope, rtol=1e-3, atol=1e-4 * max(1, float(slope.abs().max())), msg=name
        )


# -- its directory ---------------------------------------------------------------------------------------------


def test_a_saved_head_is_the_same_head(tiny_target: Target, head: DraftHead, tmp_path: Path) -> None:
    head.save(tmp_path)
    loaded = load_head(tmp_path)
    assert loaded.config == head.config and not loaded.training
    ids = random_ids(1, 20)
    features = tiny_target.features(ids, head.config.taps)
    mask = torch.ones(1, 20, dtype=torch.bool)
    for ours, theirs in zip(*(predicted(h, ids, mask, tiny_target) for h in (head, loaded)), strict=True):
        assert torch.equal(ours.logits, theirs.logits)
    shape = full([2, 1, 1])
    begun = features.rows((0, slice(0, 9)))
    drafts = [draft(h, h.new_state(), begun, ids[0, :10], shape, tiny_target).tokens for h in (head, loaded)]
    assert drafts[0] == drafts[1]


def test_the_targets_tensors_stay_out_of_the_head(tiny_target: Target, head: DraftHead) -> None:
    frozen = {parameter.data_ptr() for parameter in tiny_target.model.parameters()}
    assert not frozen & {tensor.data_ptr() for tensor in head.state_dict().values()}
    assert all(parameter.dtype == torch.float32 for parameter in head.parameters())
    lora = head.config.options.get("lora")  # then the head's own weights rest, and only the adapters are trained
    assert all(parameter.requires_grad or lora for parameter in head.parameters())


def break_weights(path: Path, change: Callable[[dict[str, Tensor], str], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors, next(name for name, tensor in tensors.items() if tensor.is_floating_point()))
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(name), "disagree about"),
        (lambda tensors, name: tensors.update(stranger=torch.ones(1)), "'stranger'"),
        (lambda tensors, name: tensors[name].view(-1)[0].fill_(float("nan")), "NaN"),
        (lambda tensors, name: tensors[name].view(-1)[0].fill_(float("inf")), "infinity"),
        (lambda tensors, name: tensors.update({name: tensors[name][:-1].clone()}), "shape"),
        (lambda tensors, name: tensors["target_ids"].fill_(128), "target_ids"),
        (lambda tensors, name: tensors["target_ids"].fill_(3), "target_ids"),
    ],
    ids=["missing", "extra", "nan", "infinity", "shape", "ids outside", "ids doubled"],
)
def test_broken_weights_are_refused(tiny_target: Target, head: DraftHead, tmp_path: Path, change: Any, message: str) -> None:
    head.save(tmp_path)
    break_weights(tmp_path, change)
    with pytest.raises(UserError, match=message):
        load_head(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.5, None])
def test_a_cut_or_missing_file_is_refused(tiny_target: Target, tmp_path: Path, file: str, share: float | None) -> None:
    make_head(tiny_target, "eagle3").save(tmp_path)
    whole = (tmp_path / file).read_bytes()
    if share is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=str(tmp_path)):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "unheard-of"}, "eagle, eagle3"),
        ({"format": 99}, "upgrade"),
        ({"options": {"norm_befor_fc": True}}, "norm_befor_fc"),
        ({"surprise": 1}, "not a draftsmith head"),
    ],
)
def test_a_wrong_config_is_refused(tiny_target: Target, tmp_path: Path, change: dict, message: str) -> None:
    make_head(tiny_target, "eagle3").save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message):
        load_head(tmp_path)


def tiny(config: Any, tokenizer: Any = None) -> Target:
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config).float(), tokenizer, "another")


SIZES: dict[str, Any] = dict(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64
)


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"vocab_size": 130}, {"num_hidden_layers": 5}])
def test_a_target_of_another_size_is_refused(tiny_target: Target, change: dict[str, Any]) -> None:
    head = make_head(tiny_target, "medusa-own")
    check_target(head.config, tiny_target)
    (key,) = change
    for force in (False, True):
        with pytest.raises(UserError, match=key.replace("num_hidden_layers", "depth")):
            check_target(head.config, tiny(LlamaConfig(**(SIZES | change))), force)


def test_another_target_of_the_same_sizes_needs_force(tiny_target: Target, tiny_tokenizer_factory: Callable[..., Any]) -> None:
    head = make_head(tiny_target, "medusa-own")
    other = Target(tiny_target.model, tiny_tokenizer_factory("generation"), "another")
    with pytest.raises(UserError, match="fingerprint"):
        check_target(head.config, other)
    check_target(head.config, other, force=True)


# -- any target's sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 2, 4, None])
def test_case_13_the_heads_layer_has_the_targets_head_dim(kv_heads: int | None) -> None:
    sizes: dict[str, Any] = SIZES if kv_heads is None else SIZES | {"num_key_value_heads": kv_heads}
    config = LlamaConfig(**sizes) if kv_heads is None else Qwen3Config(**sizes, head_dim=16)
    target = tiny(config)
    head = make_head(target, "eagle3-warm")
    layer: Any = head.get_submodule("layer")
    dim = 8 if kv_heads is None else 16
    assert isinstance(layer, FeatureLayer)
    assert layer.self_attn.q_proj.weight.shape == (4 * dim, 64) and layer.self_attn.o_proj.weight.shape == (32, 4 * dim)
    assert layer.self_attn.k_proj.weight.shape == ((kv_heads or 4) * dim, 64)
    ids = random_ids(1, 12)
    value = losses(head, batch_of(target, head, ids, torch.ones(1, 12, dtype=torch.bool)), target)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients(head, value).values())


LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ROPES: dict[str, Any] = {
    "plain": LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama3-flat": LlamaConfig.from_dict(
        SIZES | {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    ),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, layer_types=["sliding_attention", "full_attention"] * 2),
}


@pytest.mark.parametrize("name", ROPES)
def test_case_14_the_rotary_embedding_is_the_targets(name: str) -> None:
    target = tiny(ROPES[name])
    head = make_head(target, "eagle3")
    rotary = head.get_submodule("rotary")
    assert isinstance(rotary, LlamaRotaryEmbedding)
    x, positions = torch.zeros(1, 64, 32), torch.arange(64)[None]
    kind = {"layer_type": "full_attention"} if name == "gemma3" else {}
    for ours, theirs in zip(rotary(x, positions), target.decoder.rotary_emb(x, positions, **kind), strict=True):
        torch.testing.assert_close(ours, theirs)
    base = 1e6 if name == "gemma3" else 5e5
    assert head.config.layer["rope_parameters"]["rope_theta"] == base


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(vocab_size=128, n_embd=32, n_layer=4, n_head=4, n_positions=64), "Llama-style"),
        (GPTNeoXConfig(**SIZES), "Llama-style"),
        (Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=16), "Llama-style"),
        (StableLmConfig(**SIZES, num_key_value_heads=4), "Llama-style"),
    ],
    ids=["gpt2", "gpt-neox", "gemma3", "stablelm"],
)
def test_a_target_with_other_layers_cannot_warm_them_up_but_can_train(config: Any, reason: str) -> None:
    target = tiny(config)
    with pytest.raises(UserError, match=reason):
        make_head(target, "eagle3-warm")
    head = make_head(target, "eagle3")
    ids = random_ids(1, 12)
    assert losses(head, batch_of(target, head, ids, torch.ones(1, 12, dtype=torch.bool)), target).isfinite().all()


@pytest.mark.parametrize("name", ["rms", "offset", "layer"])
def test_the_warm_norm_has_the_targets_scale(name: str) -> None:
    sizes: dict[str, Any] = SIZES | {"num_key_value_heads": 4}
    configs = {"rms": LlamaConfig(**sizes), "offset": Gemma3TextConfig(**sizes, head_dim=8), "layer": CohereConfig(**sizes)}
    target = tiny(configs[name])
    weight: Any = target.final_norm.weight  # type: ignore[union-attr]
    with torch.no_grad():
        weight.add_(torch.randn(32))
    head = KINDS["eagle3"].create(
        target, Eagle3Options(init_layer="random", init_lm_head="target"), None, DEPTHS, torch.arange(128)
    )
    expected = weight + 1 if name == "offset" else weight
    torch.testing.assert_close(head.get_parameter("norm.weight"), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(head.get_parameter("lm_head.weight"), target.output_head.weight)


@pytest.mark.parametrize(
    ("wished", "depth", "taps"),
    [
        ((2, 2, 1), 4, [2, 3, 4]),
        ((2, 15, 27), 30, [2, 15, 27]),
        ((2, 1, 0), 2, [0, 1, 2]),
        ((2, 3, 3), 6, [2, 3, 4]),
        ((9, 9, 9), 4, [2, 3, 4]),
    ],
)
def test_taps_are_moved_apart(wished: tuple[int, ...], depth: int, taps: list[int]) -> None:
    assert move_taps(wished, depth) == taps


def test_wrong_taps_are_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="tap 9"):
        make_head(tiny_target, "eagle3", taps=[1, 2, 9])
