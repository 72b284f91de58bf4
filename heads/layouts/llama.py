"""What checkpoints of Llama-like heads have in common: names of layers, sizes with their defaults, the target's embedding."""

import re
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from ..layers import LAYER_KEYS
from .layout import embedded, own_tensors, scales_embedding

SIZES = (*LAYER_KEYS, "rope_theta", "rope_scaling")
NUMBERED = re.compile(r"(?:layers|midlayer)\.(\d+)\.")


def layer_tensors(head: DraftHead, first: str) -> dict[str, Tensor]:
    """The head's own tensors: the first layer's begin with ``first``, the others' with layers.{i}."""
    found = {}
    for name, tensor in own_tensors(head).items():
        part, _, rest = name.partition(".")
        if part == "layer":
            found[f"{first}{rest}"] = tensor
        elif part == "further":
            index, _, rest = rest.partition(".")
            found[f"layers.{int(index) + 1}.{rest}"] = tensor
        else:
            found[name] = tensor
    return found


def own_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors by the head's names, without RoPE's frequencies: old files hold them, and the config has them."""
    return {own_name(name): t for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def own_name(name: str) -> str:
    numbered = NUMBERED.match(name)
    if numbered is None:
        return name.replace("midlayer.", "layer.", 1) if name.startswith("midlayer.") else name
    index, rest = int(numbered[1]), name[numbered.end() :]
    return f"further.{index - 1}.{rest}" if index else f"layer.{rest}"


def layer_of(config: dict[str, Any], target: Target) -> dict[str, Any]:
    """The sizes of the layers, with Llama's defaults for what ``config`` leaves out; UserError where ``target`` has others."""
    full = LlamaConfig.from_dict({"num_hidden_layers": 1} | {key: config[key] for key in SIZES if key in config}).to_dict()
    for size in ("hidden_size", "vocab_size"):
        ours = getattr(target, size)
        if full[size] != ours:
            raise UserError(
                f"the checkpoint's {size} is {full[size]}, and {target.name} has {ours}: give the target that it was made for."
            )
    return {key: full[key] for key in LAYER_KEYS}


def draft_length_of(config: dict[str, Any], usual: int) -> int:
    """The draft length that an export of ours or the speculators format names, else the usual one."""
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return config.get("draftsmith", {}).get("draft_length") or proposals[0].get("speculative_tokens") or usual


def take_embedding(tensors: dict[str, Tensor], target: Target) -> None:
    """Take embed_tokens.weight out of ``tensors``: the head reads the target's. UserError where it is another one."""
    theirs, ours = tensors.pop("embed_tokens.weight", None), embedded(target)
    if theirs is None and not scales_embedding(target):
        return
    if theirs is None or theirs.shape != ours.shape or not torch.equal(theirs.to(ours.dtype), ours):
        raise UserError(
            f"the checkpoint's embed_tokens.weight is not what {target.name}'s embedding gives, which this kind of head "
            "reads: give the target that it was made for."
        )


def refuse_scaled_embedding(target: Target, engine: str) -> None:
    if scales_embedding(target):
        raise UserError(
            f"{engine} gives a head the bare rows of {target.name}'s embedding, whose layer does more than look them up: "
            "export for vllm."
        )
