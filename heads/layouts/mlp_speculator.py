"""How MLP speculators are stored: the Hugging Face directory of IBM's fms-extras (16339f7: modeling_mlp_speculator.py), in
which published ones come, and what Text Generation Inference (db931fcf: layers/mlp.py) asks of it besides."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from ..mlp_speculator import MlpSpeculatorHead
from .layout import Layout, dtype_names, make_head, provenance, spread

PARTS = ("emb", "proj", "head", "ln")
TOP_K = (5, 4, 3, 2)  # candidates per depth, as published configs have them; 2 at all further depths


def config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """Both flags are written as they are: the reference's exporter leaves them False unless it is told."""
    depths = head.config.depths
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "base_model_name_or_path": target.name,
        "vocab_size": target.vocab_size,
        "emb_dim": target.hidden_size,
        "inner_dim": head.width(head.config),
        "n_predict": depths,
        "top_k_tokens_per_head": [TOP_K[min(depth, len(TOP_K) - 1)] for depth in range(depths)],
        "n_candidates": 5,
        "tie_weights": head.options.tie_weights,
        "scale_input": head.options.scale_input,
        **dtype_names(target),
        "draftsmith": provenance(head, draft_length),
    }


def tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """``speculator.{emb,proj,head}.{depth}.weight`` and ``speculator.ln.{depth}.{weight,bias}``; tied ones once, under their
    first name, as published.

    A reduced vocabulary is spread over all tokens, with ``token_map``, which every loader passes over, naming the real rows.
    """
    ids = head.target_ids.cpu()
    reduced = len(ids) < target.vocab_size
    found = {}
    for name, tensor in head.tensors().items():
        part = name.split(".")[0]
        if part in PARTS:
            whole = tensor.detach().cpu().contiguous()
            found[f"speculator.{name}"] = spread(whole, ids, target.vocab_size) if part == "head" and reduced else whole
    return found | ({"token_map": ids} if reduced else {})


def rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    """Older published configs have neither flag, and both are then False. Tied tensors may stand there once or n times."""
    for key, size in (("emb_dim", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config[key] != size:
            raise UserError(f"the MLP speculator has {key} {config[key]}, and {target.name} has {size}.")
    own = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items() if name != "token_map"}
    ids, depths, tied = tensors.get("token_map"), config["n_predict"], bool(config.get("tie_weights", False))
    if tied:
        own = untie(own, depths)
    if ids is not None:
        own = {name: tensor[ids] if name.startswith("head.") else tensor for name, tensor in own.items()}
    return make_head(
        MlpSpeculatorHead,
        target,
        torch.arange(target.vocab_size) if ids is None else ids,
        own,
        taps=[],
        depths=depths,
        options={
            "inner_dim": config.get("inner_dim") or None,  # 0 is the target's hidden size
            "tie_weights": tied,
            "scale_input": bool(config.get("scale_input", False)),
        },
    )


def untie(own: dict[str, Tensor], depths: int) -> dict[str, Tensor]:
    """The tensors under the names of all depths; UserError where tied ones differ."""
    found = dict(own)
    for name, tensor in own.items():
        part, index, *rest = name.split(".")
        first = 1 if part == "proj" else 0
        if index != str(first):
            continue
        for depth in range(first, depths):
            again = ".".join((part, str(depth), *rest))
            if not torch.equal(found.setdefault(again, tensor), tensor):
                raise UserError(f"the MLP speculator says tie_weights, and its {again} is not its {name}.")
    return found


def tells(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "mlp_speculator"


# -- Text Generation Inference ---------------------------------------------------------------------------------


def tgi_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    if draft_length != head.config.depths:
        raise UserError(
            "TGI takes the weights of state and tokens from the length that it is told to draft, so another length than the "
            f"head's would spoil every draft: export with --draft-length {head.config.depths}, and serve with that."
        )
    return config(head, target, draft_length)


def tgi_tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    if not head.options.tie_weights:
        raise UserError(
            "TGI cannot load untied MLP speculators (it scales a list of embeddings as if it were one): train with "
            "options.tie_weights true."
        )
    return tensors(head, target)


FMS = Layout(config, tensors, rebuild, method="mlp_speculator", tells=tells)
TGI = replace(FMS, config=tgi_config, tensors=tgi_tensors)
