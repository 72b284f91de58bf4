"""Hydra: the formula against a plain one, what it starts as, what it learns besides, and its repository's layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from draftsmith.data.features import FeatureBatch
from draftsmith.errors import UserError
from draftsmith.eval.tree import full
from draftsmith.eval.verifier import generate
from draftsmith.heads.base import Depth, supervised
from draftsmith.heads.drafting import draft
from draftsmith.heads.engines.published import import_head
from draftsmith.heads.engines.registry import export, read
from draftsmith.heads.hydra import HydraHead, HydraOptions, taught_lengths
from draftsmith.target import Target
from draftsmith.train.objectives import Objective
from draftsmith.train.step import judged

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
DEPTHS = 3
IDS = torch.randint(3, 111, (2, 14), generator=torch.Generator().manual_seed(5))
ALL = torch.ones_like(IDS, dtype=torch.bool)
UNREAD = ("input_embed_fn.weight", "embed_tokens.weight", "inv_freq")  # what published files hold besides the head's own


def llama(**changes: Any) -> Target:
    torch.manual_seed(1)
    return Target(LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).float(), None, "tiny")


def hydra(target: Target, size: int = 128, random: bool = True, **options: Any) -> HydraHead:
    ids = torch.arange(5, 5 + 3 * size, 3) if size < target.vocab_size else torch.arange(size)
    head = HydraHead.create(target, HydraOptions(**options), None, DEPTHS, ids)
    generator = torch.Generator().manual_seed(2)
    if random:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return head.eval()


def predicted(head: HydraHead, target: Target) -> list[Depth]:
    return head.predict(IDS, head.taught(IDS, ALL, 0), target.features(IDS, []), target)


# -- the formula ---------------------------------------------------------------------------------------------------


def plain_prefix(tensors: dict[str, Tensor], last: Tensor, eps: float) -> Tensor:
    """One Llama layer and a norm over states [time, 32]: four heads of eight, two key heads, RoPE of base 10000."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * tensors[name]

    def turn(x: Tensor) -> Tensor:  # [time, heads, 8]
        angles = torch.arange(len(x))[:, None] / 10000 ** (torch.arange(4) / 4)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([x[..., :4] * cos - x[..., 4:] * sin, x[..., 4:] * cos + x[..., :4] * sin], -1)

    def weight(name: str) -> Tensor:
        return tensors[f"prefix.layer.{name}.weight"].T

    x = norm(last, "prefix.layer.input_layernorm.weight")
    q, k, v = ((x @ weight(f"self_attn.{part}_proj")).unflatten(-1, (-1, 8)) for part in "qkv")
    q, k = turn(q), turn(k)
    mixed = torch.zeros_like(last)
    for t in range(len(last)):
        for h in range(4):
            seen = (k[: t + 1, h // 2] @ q[t, h] / 8**0.5).softmax(0)
            mixed[t, 8 * h : 8 * h + 8] = seen @ v[: t + 1, h // 2]
    out = last + mixed @ weight("self_attn.o_proj")
    x = norm(out, "prefix.layer.post_attention_layernorm.weight")
    out = out + (F.silu(x @ weight("mlp.gate_proj")) * (x @ weight("mlp.up_proj"))) @ weight("mlp.down_proj")
    return norm(out, "prefix.norm.weight")


@pytest.mark.parametrize("options", [{"blocks": 1}, {"blocks": 3}, {"prefix": True}, {"lm_head": "shared"}], ids=str)
@torch.no_grad()
def test_every_head_computes_the_plain_formula(options: dict[str, Any]) -> None:
    target = llama()
    head = hydra(target, **options)
    tensors = head.state_dict()
    depths = predicted(head, target)
    for line in range(len(IDS)):
        states = target.features(IDS[line : line + 1], []).last[0]
        if head.prefix:
            states = plain_prefix(tensors, states, target.config.rms_norm_eps)
        for i, depth in enumerate(depths):
            for row, logits in zip(depth.rows.tolist(), depth.logits, strict=True):
                if row // 14 != line:
                    continue
                t = row % 14
                x = torch.cat([states[t], *(target.embed(IDS[line, t + 1 + k]) for k in range(i + 1))])
                own = {name.removeprefix(f"blocks.{i}."): p for name, p in tensors.items()}
                branch = F.silu(own["0.linear.weight"] @ x + own["0.linear.bias"])
                x = own["0.residual.weight"] @ x + own["0.residual.bias"] + branch
                for j in range(1, head.options.blocks):
                    x = x + F.silu(own[f"{j}.linear.weight"] @ x + own[f"{j}.linear.bias"])
                if head.options.lm_head == "shared":
                    wanted = target.output_head.weight @ x
                else:
                    wanted = tensors[f"lm_heads.{i}.weight"] @ x + tensors[f"lm_heads.{i}.bias"]
                torch.testing.assert_close(logits, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)


def test_further_blocks_are_blocks_of_their_own() -> None:
    """The reference repeats one instance, so that four layers have the weights of two."""
    blocks = hydra(llama(), blocks=4).blocks[0]
    assert len({block.linear.weight.data_ptr() for block in blocks}) == 4


@pytest.mark.parametrize("options", [{}, {"prefix": True, "blocks": 4}, {"lm_head": "shared"}, {"size": 40}], ids=str)
@torch.no_grad()
def test_a_fresh_head_says_what_the_target_says_one_token_earlier(options: dict[str, Any]) -> None:
    target = llama()
    head = hydra(target, random=False, **options)
    said = target.logits(target.features(IDS, []).last.flatten(0, 1))[:, head.target_ids]
    for depth in predicted(head, target):
        assert torch.equal(depth.logits.argmax(-1), said[depth.rows].argmax(-1))
        if not options.get("prefix"):
            torch.testing.assert_close(depth.logits, said[depth.rows], atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_fresh_prefix_layer_gives_states_of_the_targets_size() -> None:
    target = llama()
    target.model.model.norm.weight.mul_(3)
    head = hydra(target, random=False, prefix=True)
    last = target.features(IDS, []).last
    states = torch.cat([depth.states for depth in predicted(head, target)])
    assert states.pow(2).mean().sqrt() == pytest.approx(float(last.pow(2).mean().sqrt()), rel=0.05)


def test_a_head_over_the_target_with_a_biased_output_head_starts_with_its_bias() -> None:
    target = llama()
    target.output_head.bias = torch.nn.Parameter(torch.randn(128), requires_grad=False)
    head = hydra(target, 40, random=False)
    for lm_head in head.lm_heads:
        assert torch.equal(lm_head.bias, target.output_head.bias[head.target_ids])


def test_a_shared_lm_head_has_the_targets_vocabulary() -> None:
    with pytest.raises(UserError, match="draft_vocab to null or options.lm_head to own"):
        hydra(llama(), 40, lm_head="shared")


# -- what training adds --------------------------------------------------------------------------------------------


def test_feature_regression_is_smooth_l1_against_the_states_to_come() -> None:
    target = llama()
    head = hydra(target, feature_weight=0.7)
    features = target.features(IDS, [])
    features.last.requires_grad_()
    depths = head.predict(IDS, head.taught(IDS, ALL, 0), features, target)
    for i, depth in enumerate(depths):
        away = (depth.states - features.last.flatten(0, 1)[depth.rows + 1 + i]).abs()
        wanted = 0.7 * torch.where(away < 1, away**2 / 2, away - 0.5).mean(-1)
        assert depth.extra is not None
        torch.testing.assert_close(depth.extra, wanted)
    last = depths[0].extra
    assert last is not None
    (slope,) = torch.autograd.grad(last[-1], features.last)  # the last row that is taught: 11 of line 1
    assert slope[1, 11].any() and not slope[1, 12].any()  # what is to come is a label


def test_feature_regression_is_part_of_the_loss_at_the_depths_own_share() -> None:
    target = llama()
    batch = FeatureBatch(IDS, ALL, target.features(IDS, []), None, IDS.numel())
    losses = []
    for weight in (0.0, 0.7):
        head = hydra(target, feature_weight=weight)
        rows = head.taught(IDS, ALL, 0)
        losses.append(judged(head, batch, target, Objective("kl", depth_decay=0.5), rows)[0])
    shares = torch.tensor([4, 2, 1]) / 7
    extras = [depth.extra for depth in predicted(head, target)]
    wanted = sum(share * extra.mean() for share, extra in zip(shares, extras, strict=True) if extra is not None)
    torch.testing.assert_close(losses[1] - losses[0], wanted)


@pytest.mark.parametrize("prefix", [False, True])
@torch.no_grad()
def test_noise_is_neftunes_and_for_training_alone(prefix: bool) -> None:
    """Uniform within alpha / sqrt(length * width), on embeddings and, without a prefix layer, on hidden states."""
    target = llama()
    head = hydra(target, noise=8.0, prefix=prefix, random=False)
    first = head.blocks[0][0].residual.weight.zero_()  # hand on half of the state and half of the embedding, apart
    first[:16, :16], first[16:, 32:48] = torch.eye(16), torch.eye(16)
    mask = torch.zeros_like(ALL)
    mask[:, 2:9] = True  # 9 tokens up to the last that is taught

    def states() -> Tensor:
        return head.predict(IDS, head.taught(IDS, mask, 0), target.features(IDS, []), target)[0].states

    quiet = states()
    head.train()
    noisy = torch.stack([states() for _ in range(200)])
    head.eval()
    assert torch.equal(states(), quiet)
    away, most = (noisy - quiet).abs(), 8 / (9 * 32) ** 0.5
    assert most * 0.95 < away[..., 16:].max() <= most * 1.001
    assert away[..., 16:].mean() == pytest.approx(most / 2, rel=0.05)
    if prefix:
        assert not away[..., :16].any()
    else:
        assert most * 0.95 < away[..., :16].max() <= most * 1.001


@pytest.mark.parametrize("prefix", [False, True])
def test_noise_leaves_a_head_in_bfloat16_in_it(prefix: bool) -> None:
    target = llama()
    head = hydra(target, noise=8.0, prefix=prefix).to(torch.bfloat16).train()
    first = head.predict(IDS, head.taught(IDS, ALL, 0), target.features(IDS, []), target)[0]
    assert first.states.dtype == torch.bfloat16 and first.logits.isfinite().all()


def test_the_length_that_noise_goes_by_is_each_sequences_own() -> None:
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[0, 3:7] = mask[0, 10:15] = mask[1, 4:9] = True
    positions = torch.tensor([[*range(8), *range(8)], list(range(16))])
    lengths = taught_lengths(supervised(mask, 1)[0], positions)
    assert lengths.tolist() == [[7] * 8 + [7] * 8, [9] * 16]


@torch.no_grad()
def test_dropout_is_in_front_of_every_block_and_of_the_lm_head_in_training_alone() -> None:
    target = llama()
    head = hydra(target, dropout=0.5, blocks=2)
    quiet = [depth.states for depth in predicted(head, target)]
    seen: list[float] = []
    for block in head.blocks[0]:
        block.register_forward_pre_hook(lambda _, args: seen.append(float(args[0].eq(0).float().mean())))
    loud = predicted(head.train(), target)[0].states
    assert all(0.4 < share < 0.6 for share in [*seen, float(loud.eq(0).float().mean())]) and len(seen) == 2
    for again, before in zip(predicted(head.eval(), target), quiet, strict=True):
        assert torch.equal(again.states, before)


@torch.no_grad()
def test_the_prefix_layer_remembers_committed_rows_alone() -> None:
    target = llama()
    head = hydra(target, prefix=True)
    features, state = target.features(IDS[:1], []), head.new_state()
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        draft(head, state, features.rows((0, slice(start, stop))), IDS[0, start : stop + 1], full([2, 2, 1]), target)
        assert state.cache.get_seq_length() == stop


# -- Hydra's own layout --------------------------------------------------------------------------------------------


def published(arch: str, layers: int, dtype: torch.dtype, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the reference saves: state_dict() of its head module, with the target's embedding, the prefix model's unused one
    and, for every further block, the same tensors again."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.2).to(dtype)

    stride = 2 if arch == "prefix-mlp" else 1
    tensors = {"input_embed_fn.weight": target.embed.get_parameter("weight").detach().to(dtype)}
    for i in range(DEPTHS):
        first = f"hydra_mlp.{i}.{stride - 1}"
        for part in ("linear", "res_connection"):
            tensors |= {f"{first}.{part}.weight": draw(32, 32 * (i + 2)), f"{first}.{part}.bias": draw(32)}
        weight, bias = draw(32, 32), draw(32)
        for j in range(1, layers):
            own = f"hydra_mlp.{i}.{stride * j + stride - 1}.linear"
            tensors |= {f"{own}.weight": weight, f"{own}.bias": bias}
        lm_head = f"hydra_lm_head.{i}" + (".1" if arch == "prefix-mlp" else "")
        tensors |= {f"{lm_head}.weight": draw(128, 32), f"{lm_head}.bias": draw(128)}
    if arch == "prefix-mlp":
        layer = "prefix_embeding_layer.layers.0."
        tensors |= {f"{layer}self_attn.{part}_proj.weight": draw(16 if part in "kv" else 32, 32) for part in "qkvo"}
        tensors |= {f"{layer}mlp.{part}_proj.weight": draw(64, 32) for part in ("gate", "up")}
        tensors |= {f"{layer}mlp.down_proj.weight": draw(32, 64), "prefix_embeding_layer.norm.weight": draw(32)}
        tensors |= {f"{layer}{part}_layernorm.weight": draw(32) for part in ("input", "post_attention")}
        tensors |= {
            f"{layer}self_attn.rotary_emb.inv_freq": draw(4),
            "prefix_embeding_layer.embed_tokens.weight": draw(128, 32),
        }
    config = {
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "grounded_heads": True, "hidden_state_offset": 0,
        "hydra_head_arch": arch, "hydra_num_heads": DEPTHS, "hydra_num_layers": layers, "transformers_version": "4.36.2",
    }  # fmt: skip
    return config, tensors


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    torch.save(tensors, directory / "hydra_lm_head.pt")
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("arch", "layers"), [("mlp", 1), ("mlp", 2), ("prefix-mlp", 4)])
def test_a_published_head_comes_in_drafts_and_goes_out_as_it_was(
    arch: str, layers: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    target = llama()
    config, tensors = published(arch, layers, dtype, target)
    head = import_head(write(tmp_path / "in", config, tensors), target)
    assert isinstance(head, HydraHead) and head.options.prefix == (arch == "prefix-mlp")
    plain = generate(target, None, [5, 6, 7], full([1]), 12).tokens
    assert generate(target, head.float(), [5, 6, 7], full([3, 2, 1]), 12).tokens == plain
    out = export(import_head(tmp_path / "in", target), target, "hydra", tmp_path / "out", draft_length=DEPTHS)
    again = torch.load(out / "hydra_lm_head.pt", weights_only=True)
    assert again.keys() == {name for name in tensors if not name.endswith(UNREAD)}  # all that is the head's own
    assert all(torch.equal(tensor, tensors[name]) and tensor.dtype == dtype for name, tensor in again.items())


@torch.no_grad()
def test_a_published_head_computes_what_the_reference_computes(tmp_path: Path) -> None:
    """Behind the prefix layer, four layers: the first block, then three times the one further block."""
    target = llama()
    config, tensors = published("prefix-mlp", 4, torch.float32, target)
    head: Any = import_head(write(tmp_path / "in", config, tensors), target)
    state = head.prefix(target.features(IDS, []).last, torch.arange(14)[None], torch.ones(14, 14).tril().bool()[None, None])
    for i, depth in enumerate(predicted(head, target)):
        place = depth.rows
        tokens = IDS.flatten()
        x = torch.cat([state.flatten(0, 1)[place], *(target.embed(tokens[place + 1 + k]) for k in range(i + 1))], -1)
        own = {name.removeprefix(f"hydra_mlp.{i}."): tensor for name, tensor in tensors.items()}
        x = F.linear(x, own["1.res_connection.weight"], own["1.res_connection.bias"]) + F.silu(
            F.linear(x, own["1.linear.weight"], own["1.linear.bias"])
        )
        for _ in range(3):
            x = x + F.silu(F.linear(x, own["3.linear.weight"], own["3.linear.bias"]))
        wanted = F.linear(x, tensors[f"hydra_lm_head.{i}.1.weight"], tensors[f"hydra_lm_head.{i}.1.bias"])
        torch.testing.assert_close(depth.logits, wanted, atol=1e-5, rtol=1e-5)


def test_an_exports_names_and_fields(tmp_path: Path) -> None:
    target = llama()
    out = export(hydra(target, prefix=True, blocks=2), target, "hydra", tmp_path / "out", draft_length=2)
    config, tensors = published("prefix-mlp", 2, torch.float32, target)
    shapes = {name: tuple(t.shape) for name, t in torch.load(out / "hydra_lm_head.pt", weights_only=True).items()}
    assert shapes == {name: tuple(t.shape) for name, t in tensors.items() if not name.endswith(UNREAD)}
    written = json.loads((out / "config.json").read_text())
    assert written.pop("draftsmith")["draft_length"] == 2
    config.pop("transformers_version")
    assert written == config | {"base_model_name_or_path": "tiny"}


@torch.no_grad()
def test_a_reduced_vocabulary_is_spread_and_nothing_else_is_ever_drafted(tmp_path: Path) -> None:
    target = llama()
    head = hydra(target, 40)
    out = export(head, target, "hydra", tmp_path / "out", draft_length=3)
    tensors = torch.load(out / "hydra_lm_head.pt", weights_only=True)
    states = torch.randn(200, 32, generator=torch.Generator().manual_seed(0)) * 5
    logits = F.linear(states, tensors["hydra_lm_head.1.weight"], tensors["hydra_lm_head.1.bias"])
    ours = head.target_ids[head.lm_heads[1](states).topk(10).indices]
    assert torch.equal(logits.topk(10).indices, ours)
    assert torch.equal(read("hydra", "hydra", out, target).target_ids, head.target_ids)


def test_different_further_blocks_are_refused_where_one_would_stand_for_all(tmp_path: Path) -> None:
    target = llama()
    with pytest.raises(UserError, match="one block in place of all"):
        export(hydra(target, blocks=3), target, "hydra", tmp_path / "out", draft_length=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (lambda: llama(), {"lm_head": "shared"}, "lm_head of its own"),
        (lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), {}, "base 10000 alone"),
        (lambda: Target(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)).float(), None, "q"), {}, "a Qwen3ForCausalLM"),
        (lambda: llama(head_dim=16), {"prefix": True}, "hidden size / heads"),
    ],
)
def test_what_the_repository_cannot_run_is_refused(target: Any, options: dict, message: str, tmp_path: Path) -> None:
    built = target()
    with pytest.raises(UserError, match=message):
        export(hydra(built, **options), built, "hydra", tmp_path / "out", draft_length=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grounded_heads": False}, "grounded_heads False"),
        ({"hydra_head_arch": "eagle-attn"}, "'eagle-attn'"),
        ({"hidden_state_offset": 1}, "hidden_state_offset 1"),
        ({"hydra_num_heads": 4}, "blocks.3.0"),
        ({"hydra_num_layers": 2}, "blocks.0.1"),
    ],
)
def test_a_published_config_of_another_head_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = llama()
    config, tensors = published("mlp", 1, torch.float32, target)
    with pytest.raises(UserError, match=message):
        import_head(write(tmp_path, config | change, tensors), target)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("input_embed_fn.weight", torch.zeros(128, 32), "another target's"),
        ("hydra_lm_head.1.weight", torch.zeros(120, 32), "lm_heads.1.weight"),
        ("hydra_mlp.2.0.linear.weight", torch.zeros(32, 96), "blocks.2.0.linear.weight"),
        ("self_attn.q_proj.weight", torch.zeros(32, 32), "no part that draftsmith knows"),
    ],
)
def test_a_published_tensor_that_does_not_fit_is_named(name: str, tensor: Tensor, message: str, tmp_path: Path) -> None:
    target = llama()
    config, tensors = published("mlp", 1, torch.float32, target)
    with pytest.raises(UserError, match=message):
        import_head(write(tmp_path, config, tensors | {name: tensor}), target)
