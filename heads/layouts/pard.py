"""How PARD drafters are stored: a draft model's directory whose config names the mask token (``pard_token``).

vLLM drafts with it by ``parallel_drafting``, TensorRT-LLM as PARD. AMD's own code reads the same two keys.
"""

from typing import Any

from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from ..pard import PardHead
from . import draft_model
from .layout import Layout

PUBLISHED = 8  # tokens that published drafters were trained to write at once; their configs do not say
SAMPLING = ("ratio", "ratio_min")


def config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """A draft model's config, with what training would go on with beside where it comes from."""
    found = draft_model.config(head, target, draft_length)
    found["draftsmith"] |= {key: getattr(head.options, key) for key in SAMPLING}
    return found


def tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    if head.options.features:
        raise UserError("no engine feeds PARD-2's options.features to a drafter: train the head without them to export it.")
    return draft_model.tensors(head, target)


def rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    token, ours = config.get("pard_token"), config.get("draftsmith", {})
    if not isinstance(token, int) or not 0 <= token < target.vocab_size:
        raise UserError(
            f"the checkpoint's config.json has pard_token {token!r}: it must be a token of the target's vocabulary."
        )
    options = {"mask_token": token} | {key: ours[key] for key in SAMPLING if key in ours}
    return draft_model.make_own(PardHead, config, tensors, target, ours.get("draft_length", PUBLISHED), options)


def is_pard(config: dict[str, Any]) -> bool:
    return config.get("spd_type") == "pard" or (
        "pard_token" in config and all(name.endswith("ForCausalLM") for name in config.get("architectures") or [""])
    )


PARALLEL = {"parallel_drafting": True}
VLLM = Layout(
    config, tensors, rebuild, method="draft_model", flags=PARALLEL, served=True, tells=is_pard, beside=draft_model.beside
)
TENSORRT_LLM = Layout(config, tensors, rebuild, method="PARD", tells=is_pard, beside=draft_model.beside)
