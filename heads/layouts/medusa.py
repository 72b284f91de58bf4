"""How Medusa heads are stored: vLLM's directory (0.32: medusa.py, configs/medusa.py; 0.33 has no Medusa)."""

from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from ..medusa import MedusaHead
from .layout import Layout, dtype_names, make_head, own_tensors, provenance, same


def config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """No key beside ``num_heads`` and ``num_hidden_layers`` may hold num and heads or layers: vLLM matches substrings.

    ``truncated_vocab_size`` is always the whole vocabulary: see ``tensors``.
    """
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_heads": head.config.depths,
        "num_hidden_layers": head.options.blocks,
        "medusa_fc_bias": True,
        "original_lm_head": head.options.lm_head == "shared",
        "truncated_vocab_size": target.vocab_size,
        "logit_scale": 1.0,
        "max_paths": 64,
        "topk": 10,
        **dtype_names(target),
        "draftsmith": provenance(head, draft_length),
    }


def tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """``blocks.{i}.layers.{j}.{weight,bias}`` and ``lm_heads.{i}.weight`` or, shared, the target's ``lm_head.weight``.

    vLLM builds an own lm_head with the target's whole vocabulary and refuses fewer rows, whatever truncated_vocab_size
    says. So a reduced one is spread over all tokens, with ``token_map`` (which vLLM then passes over) naming the real rows.
    """
    if getattr(target.output_head, "bias", None) is not None:
        raise UserError(f"{target.name}'s output head has a bias, for which vLLM's Medusa has no place: train an eagle3 head.")
    ids = head.target_ids.cpu()
    reduced = len(ids) < target.vocab_size
    tensors = {}
    for name, tensor in own_tensors(head).items():
        part, index, *rest = name.split(".")
        if part == "blocks":  # blocks.{i}.{j}.linear.{weight,bias}
            tensors[f"blocks.{index}.layers.{rest[0]}.{rest[2]}"] = tensor
        else:
            tensors[name] = spread(tensor, ids, target.vocab_size) if reduced else tensor
    if head.options.lm_head == "shared":
        tensors["lm_head.weight"] = target.output_head.get_parameter("weight").detach().cpu().clone()
    return tensors | ({"token_map": ids} if reduced else {})


def spread(rows: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Rows [draft vocab, hidden] at their ids in [vocab, hidden]; all other tokens repeat the first row.

    They can then never beat the best drafted token, and ``argmax`` gives a tie to the lower id, the drafted one.
    """
    spread = rows[:1].repeat(vocab, 1)
    spread[ids] = rows
    return spread


def rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    ids = tensors.get("token_map", torch.arange(target.vocab_size))
    shared = bool(config["original_lm_head"])
    if shared and not same(tensors.get("lm_head.weight"), target.output_head.get_parameter("weight").detach().cpu()):
        raise UserError("the export's lm_head.weight is not the target's output head: it belongs to another target.")
    own = {}
    for name, tensor in tensors.items():
        part, *rest = name.split(".")
        if part == "blocks":
            own[f"blocks.{rest[0]}.{rest[2]}.linear.{rest[3]}"] = tensor
        elif part == "lm_heads":
            own[name] = tensor[ids]
        elif name not in ("token_map", "lm_head.weight"):
            raise UserError(f"the export's tensor {name!r} has no place in vLLM's Medusa: export the head again.")
    return make_head(
        MedusaHead,
        target,
        ids,
        own,
        taps=[],
        depths=config["num_heads"],
        options={"blocks": config["num_hidden_layers"], "lm_head": "shared" if shared else "own"},
    )


VLLM = Layout(config, tensors, rebuild, method="medusa", served=True)
