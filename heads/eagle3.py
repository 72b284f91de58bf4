"""EAGLE-3 (Li et al., 2503.01840): one layer over fused low, middle and high features, trained on its own outputs.

The 3.1 options (2605.09992): ``fc_norm`` norms every tapped state by itself before they are fused, ``norm_output`` feeds
the normed state back. ``norm_before_fc`` norms the concatenation instead; ``norm_before_residual`` makes the normed
feature the residual stream.
"""

from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from ..target import Features, Target
from .base import Depth, DraftHead, Guess, HeadConfig, Shape, move_taps
from .layers import (
    FeatureLayer,
    LlamaConfig,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    causal,
    llama_layer_config,
    unrolled_attention,
)


class Eagle3Options(BaseModel):
    """The kind's own part of a recipe."""

    model_config = ConfigDict(extra="forbid")
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    init_layer: Literal["random", "target"] = "target"
    init_lm_head: Literal["random", "target"] = "target"

    @model_validator(mode="after")
    def one_norm_in_front(self) -> Self:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: keep one")
        return self


@dataclass
class Eagle3State:
    """Keys and values [1, kv_heads, rows, dim] of the committed rows, then of the nodes drafted in this round."""

    keys: Tensor | None = None
    values: Tensor | None = None
    committed: int = 0
    hidden: dict[int, Tensor] = field(default_factory=dict)  # node -> what is fed back below it [1, hidden]
    slots: list[int] = field(default_factory=list)  # the node of every drafted row


class Eagle3Head(DraftHead):
    """taps -> fc -> layer(+ embedding of the next token) -> norm -> lm_head over the draft vocabulary."""

    kind = "eagle3"
    Options = Eagle3Options

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        layer = LlamaConfig(**config.layer)
        width, taps = layer.hidden_size, len(config.taps)
        source = config.target.hidden_size
        if self.options.norm_before_fc:
            self.input_norm = LlamaRMSNorm(taps * source, layer.rms_norm_eps)
        if self.options.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(source, layer.rms_norm_eps) for _ in config.taps)
        self.fc = nn.Linear(taps * source, width, bias=False)
        self.layer = FeatureLayer(layer, self.options.norm_before_residual)
        self.norm = LlamaRMSNorm(width, layer.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(layer)

    @classmethod
    def default_taps(cls, target: Target) -> list[int]:
        """EAGLE-3's (2, L // 2, L - 3), moved apart where a short target makes them collide."""
        return move_taps((2, target.depth // 2, target.depth - 3), target.depth)

    @classmethod
    def layer_config(cls, target: Target, options: Eagle3Options) -> dict:
        return llama_layer_config(target)

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        """Warm starts: the layer from the target's last one with the last tap passed through, the lm_head from its rows."""
        if self.options.init_layer == "target":
            copy_layer(target, self.layer)
            self.fc.weight.zero_()
            self.fc.weight[:, -target.hidden_size :].copy_(torch.eye(target.hidden_size))
        if self.options.init_lm_head == "target":
            self.lm_head.weight.copy_(target.output_head.weight[self.target_ids.to(target.device)])
            if target.final_norm is not None and getattr(target.final_norm, "bias", None) is None:
                self.norm.weight.copy_(norm_scale(target.final_norm, target))

    def fuse(self, taps: Tensor) -> Tensor:
        """Tapped states [..., n_taps * target hidden] -> feature [..., hidden]."""
        taps = taps.to(self.fc.weight.dtype)
        if self.options.norm_before_fc:
            taps = self.input_norm(taps)
        if self.options.fc_norm:
            taps = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps.chunk(len(self.fc_norm), -1), strict=True)], -1)
        return self.fc(taps)

    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        """Training-time test: step i reads the layer's own output of step i-1 and the embedding of x_{t+1+i}."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        seen = causal(positions)
        hidden, after = self.fuse(features.taps), ids
        keys: list[Tensor] = []
        values: list[Tensor] = []
        depths = []
        for step, own in enumerate(rows):
            after = F.pad(after[:, 1:], (0, 1))  # x_{t+1+step} at index t
            entered, residual = self.layer.enter(target.embed(after).to(hidden.dtype), hidden)
            q, k, v = self.layer.self_attn.project(entered, self.rotary(entered, positions + step))
            keys.append(k)
            values.append(v)
            hidden = self.layer.leave(residual, unrolled_attention(q, keys, values, seen))
            normed = self.norm(hidden)
            flat = own.flatten().nonzero().squeeze(1)
            depths.append(Depth(flat, normed.flatten(0, 1)[flat], self.lm_head, ahead=1 + step))
            if self.options.norm_output:
                hidden = normed
        return depths

    # -- drafting ----------------------------------------------------------------------------------------------

    def new_state(self) -> Eagle3State:
        return Eagle3State()

    def begin(self, state: Eagle3State, features: Features, ids: Tensor, target: Target) -> Guess:
        if state.keys is not None and state.values is not None:  # forget the last round's drafted rows
            state.keys, state.values = state.keys[:, :, : state.committed], state.values[:, :, : state.committed]
        tokens, rows = ids[1:], len(ids) - 1
        seen = torch.ones(rows, state.committed + rows, dtype=torch.bool, device=ids.device).tril(state.committed)
        positions = torch.arange(state.committed, state.committed + rows, device=ids.device)
        fed_back, normed = self._run(state, self.fuse(features.taps), tokens, positions, seen, target, last_only=True)
        state.committed += rows
        state.hidden, state.slots = {0: fed_back}, []
        return Guess(self.lm_head(normed), normed)

    def deepen(self, state: Eagle3State, nodes: list[int], tokens: Tensor, shape: Shape, target: Target) -> Guess:
        ancestors = [ancestry(node, shape) for node in nodes]
        state.slots += nodes
        drafted = [[slot in family for slot in state.slots] for family in ancestors]
        seen = torch.ones(len(nodes), state.committed + len(state.slots), dtype=torch.bool, device=tokens.device)
        seen[:, state.committed :] = torch.tensor(drafted, device=tokens.device)
        positions = torch.tensor([state.committed - 1 + len(family) for family in ancestors], device=tokens.device)
        hidden = torch.cat([state.hidden[shape.parents[node - 1]] for node in nodes])
        fed_back, normed = self._run(state, hidden, tokens, positions, seen, target)
        state.hidden |= {node: fed_back[i : i + 1] for i, node in enumerate(nodes)}
        return Guess(self.lm_head(normed), normed)

    def _run(
        self,
        state: Eagle3State,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        seen: Tensor,
        target: Target,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """One forward of rows [n] behind the state's; returns what to feed back and what to read out, both [n, hidden]."""
        entered, residual = self.layer.enter(target.embed(tokens).to(hidden.dtype)[None], hidden[None])
        q, k, v = self.layer.self_attn.project(entered, self.rotary(entered, positions[None]))
        state.keys = k if state.keys is None else torch.cat([state.keys, k], dim=2)
        state.values = v if state.values is None else torch.cat([state.values, v], dim=2)
        if last_only:
            q, residual, seen = q[:, :, -1:], residual[:, -1:], seen[-1:]
        mixed = F.scaled_dot_product_attention(q, state.keys, state.values, attn_mask=seen[None, None], enable_gqa=True)
        out = self.layer.leave(residual, mixed)[0]
        normed = self.norm(out)
        return normed if self.options.norm_output else out, normed


def ancestry(node: int, shape: Shape) -> set[int]:
    """A node and its ancestors, the root left out."""
    family = set()
    while node:
        family.add(node)
        node = shape.parents[node - 1]
    return family


def copy_layer(target: Target, layer: FeatureLayer) -> None:
    """Copy the target's last layer into the head's, tensor by tensor of the same name.

    Attention inputs are twice as wide here: the feature's half gets the target's weights, the embedding's half stays at
    a tenth of its random size, so that at first the layer reads features as the target's own layer does.
    """
    source = dict(target.layers[-1].named_parameters()) if has_llama_layers(target) else {}
    for name, parameter in layer.named_parameters():
        own = source.get("input_layernorm.weight" if name == "hidden_norm.weight" else name)
        if name == "input_layernorm.weight":
            continue  # norms the embedding: the target's layer has no such norm
        if own is None or own.shape[0] != parameter.shape[0]:
            raise UserError(
                f"init_layer: target needs a target with Llama-style layers, and {target.name!r} has no fitting {name}: "
                "set head.options.init_layer to random."
            )
        if parameter.ndim == 2 and parameter.shape[1] == 2 * own.shape[1]:
            parameter[:, : own.shape[1]].mul_(0.1)
            parameter[:, own.shape[1] :].copy_(own)
        else:
            parameter.copy_(own)


def has_llama_layers(target: Target) -> bool:
    """Whether the target's layers compute what Llama's do, so that their weights mean the same in the head's layer."""
    config = target.config
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    rotated = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    parts = {name for name, _ in target.layers[-1].named_children()}
    llama = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    return parts == llama and activation == "silu" and rotated == 1.0


def norm_scale(norm: nn.Module, target: Target) -> Tensor:
    """The scale [hidden] that a final norm applies, measured: offsets such as Gemma's 1 + weight are included."""
    signs = torch.ones(1, 1, target.hidden_size, dtype=target.dtype, device=target.device)
    signs[..., ::2] = -1  # of mean 0 and mean square 1: root-mean-square and layer norms alike leave it as it is
    return (norm(signs) * signs).flatten().float()
