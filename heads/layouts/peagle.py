"""How P-EAGLE heads are stored: EAGLE-3's directory with a mask token, an embedding of the head's own and ``mask_hidden``,
which vLLM (0.32: llama_eagle3.py) serves with parallel_drafting; and the same tensors in the speculators format."""

from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from ..mask_token import mask_token
from ..peagle import PEagleHead
from . import eagle3
from .layout import Layout, embedded, provenance
from .llama import draft_length_of, own_names

SAMPLING = ("ratio", "ratio_min")
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # in vLLM's order
USUAL_LENGTH = 8  # the depths that speculators trains


def config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """``pard_token`` is among the layer's keys."""
    return eagle3.config(head, target, draft_length) | {"draftsmith": noted(head, draft_length)}


def speculators_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """vLLM does not pass fc_norm on from the top level here, but all that the layer's config holds."""
    found = eagle3.speculators_config(head, target, draft_length)
    return found | {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_config": found["speculators_config"] | {"algorithm": "peagle"},
        "transformer_layer_config": found["transformer_layer_config"] | {"fc_norm": head.options.fc_norm},
        "mask_token_id": head.config.layer["pard_token"],
        "embed_requires_grad": True,
        "draftsmith": noted(head, draft_length),
    }


def noted(head: DraftHead, draft_length: int) -> dict[str, Any]:
    return provenance(head, draft_length) | {key: getattr(head.options, key) for key in SAMPLING}


def tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    return with_masks(eagle3.tensors(head, target), head, target)


def speculators_tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    return with_masks(eagle3.speculators_tensors(head, target), head, target)


def with_masks(tensors: dict[str, Tensor], head: DraftHead, target: Target) -> dict[str, Tensor]:
    """mask_hidden [1, 1, n_taps * hidden], and embed_tokens: where the head reads the target's, its rows but the mask token's.

    Those stand in the head's dtype where it holds them exactly, else in the target's.
    """
    found = tensors | {"mask_hidden": tensors["mask_hidden"][None, None]}
    mask = found.pop("mask_embedding", None)
    if mask is not None:
        table = embedded(target)
        exact = torch.equal(table, table.to(mask.dtype).to(table.dtype))
        table = table.to(mask.dtype) if exact else table.clone()
        table[head.config.layer["pard_token"]] = mask
        found["embed_tokens.weight"] = table
    return found


def rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    """The head of any such directory, ours or published, flat or of the speculators format.

    Where its embedding is the target's but for the mask token's row, or is missing, the head reads the target's.
    """
    config = {**config.get("transformer_layer_config", {}), **config}
    tensors, named = dict(tensors), next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
    if named is None or "mask_hidden" not in tensors:
        missing = f"none of the keys {', '.join(MASK_KEYS)} in its config.json" if named is None else "no tensor mask_hidden"
        raise UserError(f"the checkpoint has {missing}, without which it is no P-EAGLE head.")
    token = mask_token(target, named)
    tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    theirs, ours = tensors.pop("embed_tokens.weight", None), embedded(target)
    table = ours if theirs is None else theirs
    if table.shape != ours.shape:
        shapes = f"{list(table.shape)}, and that of {target.name} {list(ours.shape)}"
        raise UserError(f"the checkpoint's embed_tokens.weight is {shapes}: give the target that it was made for.")
    others = torch.arange(target.vocab_size) != token
    own = not torch.equal(table.to(ours.dtype)[others], ours[others])
    tensors |= {"embed_tokens.weight": table} if own else {"mask_embedding": table[token].to(tensors["fc.weight"].dtype)}
    sampling = {key: config["draftsmith"][key] for key in SAMPLING if key in config.get("draftsmith", {})}
    return eagle3.backbone(
        PEagleHead,
        config,
        eagle3.further_norms(own_names(tensors), "input_layernorm"),
        target,
        eagle3.vllm_taps(config),
        draft_length_of(config, USUAL_LENGTH),
        options={"mask_token": token, "embedding": "own" if own else "target", **sampling},
        keys={"pard_token": token},
    )


def tells(config: dict[str, Any]) -> bool:
    name = (config.get("architectures") or [""])[0]
    return name in eagle3.NAMES and any(config.get(key) is not None for key in MASK_KEYS)


PLAIN = Layout(config, tensors, rebuild, method="eagle3", flags={"parallel_drafting": True}, served=True, tells=tells)
SPECULATORS = Layout(
    speculators_config,
    speculators_tensors,
    rebuild,
    method="eagle3",
    flags={"parallel_drafting": True},
    served=True,
    tells=lambda config: config.get("speculators_model_type") == "peagle",
)
