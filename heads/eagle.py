"""EAGLE-1 (Li et al., 2401.15077): one layer that predicts the target's next last hidden state from this one and a token.

The head's output stands for the target's state behind its final norm, so the target's own output head reads the draft from
it and nothing of a vocabulary is trained. EAGLE-2 (2406.16858) is the same head with another tree. Deeper than one step the
layer reads its own predictions; trained so, it is HASS (2408.15766).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..target import Features, Target
from .base import HeadConfig
from .layers import LlamaConfig, LlamaRotaryEmbedding, PlainLayer, llama_layer_config
from .recurrent import RecurrentHead
from .warm import copy_layers, norm_scale

KEPT = 0.5  # of a feature in a fresh guess at the next one: less is further from it in size, more repeats this one's token


class EagleOptions(BaseModel):
    """The kind's own part of a recipe.

    ``feature_weight``: the weight of the feature's regression beside the objective of weight 1. ``feature_noise``: features are
    shifted by up to so much while training. ``detach``: no gradient runs from a step into the feature that it read.
    ``bias``: fc has one, as the paper's code has for most targets; vLLM drops it.
    """

    model_config = ConfigDict(extra="forbid")
    layers: int = Field(default=1, ge=1)
    bias: bool = False
    feature_weight: float = Field(default=10.0, ge=0)
    feature_noise: float = Field(default=0.1, ge=0)
    detach: bool = True
    init_layer: Literal["random", "target"] = "target"


class EagleHead(RecurrentHead):
    """concat(embedding, last hidden state) -> fc -> a Llama layer without input norm -> further layers -> the target's head."""

    kind = "eagle"
    Options = EagleOptions

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        layer = LlamaConfig(**config.layer)
        self.fc = nn.Linear(2 * layer.hidden_size, layer.hidden_size, bias=self.options.bias)
        self.layer = PlainLayer(layer, normed=False)
        self.further = nn.ModuleList(PlainLayer(layer) for _ in range(self.options.layers - 1))
        self.rotary = LlamaRotaryEmbedding(layer)

    @classmethod
    def layer_config(cls, target: Target, options: EagleOptions) -> dict:
        return llama_layer_config(target) | {"num_hidden_layers": options.layers}

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        """Warm start: the layers are the target's last ones, and fc passes half of the feature through to them.

        The target's layers expect its residual stream x, the head's stream is in the units of x / rms(x) * scale, scale
        being the final norm's. So what reads the stream is divided by that scale, what writes to it multiplied, and the
        size of x is measured; the input norm that the first layer lacks goes into its projections.
        """
        if self.options.init_layer == "random":
            return
        copy_layers(target, self.stack)
        scale, size = (measured.to(self.fc.weight.device) for measured in (stream_scale(target), stream_size(target)))
        typical = scale.square().mean().sqrt()
        for layer in self.stack:
            layer.post_attention_layernorm.weight.mul_(typical / scale)
            layer.self_attn.o_proj.weight.mul_(scale[:, None] / size)
            layer.mlp.down_proj.weight.mul_(scale[:, None] / size)
        for layer in self.further:
            layer.input_layernorm.weight.mul_(typical / scale)
        entry: Any = target.layers[-min(len(self.stack), target.depth)]
        entry_scale = target.weights_of(entry.input_layernorm)["weight"]
        for reads in (self.layer.self_attn.q_proj, self.layer.self_attn.k_proj, self.layer.self_attn.v_proj):
            reads.weight.mul_(entry_scale.to(scale.device) / scale)
        self.fc.weight[:, target.hidden_size :].copy_(KEPT * torch.eye(target.hidden_size))
        if self.options.bias:
            self.fc.bias.zero_()

    def feature(self, features: Features) -> Tensor:
        return self.noised(features.last.to(self.fc.weight.dtype))

    def noised(self, hidden: Tensor) -> Tensor:
        """The paper's uniform noise. Its code shrinks it with the sequence's length; here a text costs the same packed,
        padded or alone."""
        if not self.training or not self.options.feature_noise:
            return hidden
        return hidden + (2 * torch.rand_like(hidden) - 1) * self.options.feature_noise

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.enter(self.fc(torch.cat([embeds, hidden], dim=-1)))

    def leave(self, out: Tensor) -> tuple[Tensor, Tensor]:
        return out, out

    def fed_back(self, hidden: Tensor) -> Tensor:
        return hidden.detach() if self.options.detach else hidden

    def readout(self, target: Target) -> Callable[[Tensor], Tensor]:
        return partial(target.logits, ids=self.target_ids)

    def extra(self, states: Tensor, wanted: Tensor) -> Tensor | None:
        """Smooth L1 between the predicted and the target's own feature, averaged over the hidden size."""
        if not self.options.feature_weight:
            return None
        apart = F.smooth_l1_loss(states.float(), wanted.float(), reduction="none").mean(-1)
        return self.options.feature_weight * apart


def stream_scale(target: Target) -> Tensor:
    """The final norm's scale [hidden], kept away from zero and above it; ones where the target has no such norm."""
    if target.final_norm is None:
        return torch.ones(target.hidden_size, device=target.device)
    scale = norm_scale(target.final_norm, target).abs()
    return torch.maximum(scale, 0.1 * scale.square().mean().sqrt())


def stream_size(target: Target) -> Tensor:
    """The typical root mean square of the target's residual stream behind its last layer, on tokens from all over."""
    if target.device.type == "meta":  # a dry run's target has shapes alone
        return torch.ones((), device="meta")
    ids = torch.linspace(0, target.vocab_size - 1, min(64, target.max_positions), device=target.device).long()
    stream = target.features(ids[None], [target.depth]).taps.float()
    return stream.square().mean(-1).sqrt().median()
