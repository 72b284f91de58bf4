"""How ReDrafter heads are stored: the directory of Apple's Drafter (ml-recurrent-drafter bd8586b), which TensorRT-LLM's
examples/redrafter/convert_checkpoint.py (up to 1.2) takes as --drafter_model_dir."""

from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from ..redrafter import RedrafterHead
from .layout import Layout, dtype_names, make_head, own_tensors, provenance

MODEL_TYPE = "recurrent_drafting_drafter"
LENGTH = 5  # tokens that a drafter is trained to predict where nothing else is said
OLDER = {"lm_heads.": "lm_head.", "input_projs.": "input_proj.", "0.": "lm_head."}  # names the converter knows besides


def config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    return {
        "architectures": ["Drafter"],
        "model_type": MODEL_TYPE,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "exit_dim": head.width(head.config),
        "num_draft_layers": head.options.num_layers,
        "num_lookback_tokens": -1,
        "rnn": head.options.rnn,
        **dtype_names(target),
        "draftsmith": provenance(head, draft_length),
    }


def tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """``input_proj`` where exit_dim is not twice the hidden size, ``lm_head.{layer}.linear``, ``lm_head.{layers}``, ``rnn_u``
    and ``rnn_w``: the head's own names.

    The loaders have no map of a reduced vocabulary, and one spread over all tokens would not do: their beam search compares
    probabilities over the whole vocabulary.
    """
    if len(head.target_ids) < target.vocab_size:
        raise UserError(
            f"this redrafter head drafts {len(head.target_ids)} of {target.vocab_size} tokens, and its engines read the whole "
            "vocabulary alone: train one with head.draft_vocab null."
        )
    return own_tensors(head)


def rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    for size in ("hidden_size", "vocab_size"):
        if config[size] != getattr(target, size):
            raise UserError(f"the drafter has {size} {config[size]}, and {target.name} has {getattr(target, size)}.")
    width = config["exit_dim"]
    return make_head(
        RedrafterHead,
        target,
        torch.arange(target.vocab_size),
        {canonical(name): tensor for name, tensor in tensors.items()},
        taps=[],
        depths=config.get("draftsmith", {}).get("draft_length", LENGTH),
        options={
            "rnn": config.get("rnn", False),
            "num_layers": config["num_draft_layers"],
            "exit_dim": None if width == 2 * target.hidden_size else width,
        },
    )


def canonical(name: str) -> str:
    older = next((start for start in OLDER if name.startswith(start)), None)
    return name if older is None else OLDER[older] + name.removeprefix(older)


def tells(config: dict[str, Any]) -> bool:
    return config.get("model_type") == MODEL_TYPE


DRAFTER = Layout(config, tensors, rebuild, method="redrafter", tells=tells)
