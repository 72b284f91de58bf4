"""Warm starts: a head's layers and norms from the target's own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..target import Target
from .layers import FeatureLayer, PlainLayer


def copy_layers(target: Target, layers: Sequence[Any]) -> None:
    """Copy the target's last layers into the head's, in their order; a head with more layers repeats the first of them."""
    own = list(target.layers)[-len(layers) :]
    own = [own[0]] * (len(layers) - len(own)) + own
    for source, layer in zip(own, layers, strict=True):
        copy_layer(target, source, layer)


def copy_layer(target: Target, source: nn.Module, layer: FeatureLayer | PlainLayer) -> None:
    """Copy one of the target's layers into the head's, tensor by tensor of the same name.

    Where attention inputs are twice as wide, the feature's half gets the target's weights and the embedding's half stays at
    a tenth of its random size, so that at first the layer reads features as the target's own layer does.
    """
    parts = target.weights_of(source) if has_llama_layers(target) else {}
    for name, parameter in layer.named_parameters():
        own = parts.get("input_layernorm.weight" if name == "hidden_norm.weight" else name)
        if name == "input_layernorm.weight" and isinstance(layer, FeatureLayer):
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
