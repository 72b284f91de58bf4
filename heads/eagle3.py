"""EAGLE-3 (Li et al., 2503.01840): layers over fused low, middle and high features, trained on their own outputs.

The 3.1 options (2605.09992): ``fc_norm`` norms every tapped state by itself before they are fused, ``norm_output`` feeds
the normed state back. ``norm_before_fc`` norms the concatenation instead; ``norm_before_residual`` makes the normed
feature the residual stream.
"""

from collections.abc import Callable
from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from ..target import Features, Target
from .base import DraftHead, HeadConfig, move_taps
from .layers import FeatureLayer, LlamaConfig, LlamaRMSNorm, LlamaRotaryEmbedding, PlainLayer, llama_layer_config
from .recurrent import RecurrentHead
from .warm import copy_layers, norm_scale


class BackboneOptions(BaseModel):
    """The options of everything that is built like EAGLE-3."""

    model_config = ConfigDict(extra="forbid")
    layers: int = Field(default=1, ge=1)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    init_layer: Literal["random", "target"] = "target"
    init_lm_head: Literal["random", "target"] = "target"

    @model_validator(mode="after")
    def one_norm_in_front(self) -> Self:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: keep one")
        return self


class Eagle3Options(BackboneOptions):
    """The kind's own part of a recipe."""

    norm_output: bool = False


class Backbone(DraftHead):
    """The modules: taps -> fc -> layer(+ embedding of the next token) -> further layers -> norm -> lm_head.

    The first layer's attention reads embedding and feature side by side; the further ones are plain Llama layers.
    """

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
        self.further = nn.ModuleList(PlainLayer(layer) for _ in range(self.options.layers - 1))
        self.norm = LlamaRMSNorm(width, layer.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(layer)

    @classmethod
    def default_taps(cls, target: Target) -> list[int]:
        """EAGLE-3's (2, L // 2, L - 3), moved apart where a short target makes them collide."""
        return move_taps((2, target.depth // 2, target.depth - 3), target.depth)

    @classmethod
    def layer_config(cls, target: Target, options: BackboneOptions) -> dict:
        return llama_layer_config(target) | {"num_hidden_layers": options.layers}

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        """Warm starts: the layers from the target's last ones with the last tap passed through, the lm_head from its rows."""
        if self.options.init_layer == "target":
            copy_layers(target, [self.layer, *self.further])
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


class Eagle3Head(Backbone, RecurrentHead):
    """The layers' output, before the final norm or behind it, is the next depth's feature."""

    kind = "eagle3"
    Options = Eagle3Options

    def feature(self, features: Features) -> Tensor:
        return self.fuse(features.taps)

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.enter(embeds, hidden)

    def leave(self, out: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(out)
        return normed if self.options.norm_output else out, normed

    def readout(self, target: Target) -> Callable[[Tensor], Tensor]:
        return self.lm_head
