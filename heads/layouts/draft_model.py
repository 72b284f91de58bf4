"""How draft models are stored: an ordinary causal LM's directory with the target's tokenizer beside it.

vLLM, SGLang, TensorRT-LLM, llama.cpp's converter and transformers all load it as such. Tensors keep the names by which
transformers stores them.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from ...errors import UserError
from ...target import Target
from .. import own_lm
from ..base import DraftHead, HeadConfig, TargetIdentity
from ..draft_model import DraftModelHead
from .layout import FLAT_ROPE, Layout, dtype_names, flat_rope, provenance


def config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """The LM's config; RoPE in the flat keys that engines read and the nested one that transformers 5 writes."""
    layer = head.config.layer
    return {
        "architectures": [type(head.get_submodule("lm")).__name__],
        **layer,
        **flat_rope(layer.get("rope_parameters") or {}),
        **{name: getattr(target.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **dtype_names(target),
        "draftsmith": provenance(head, draft_length),
    }


def tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """The LM's tensors, tied ones once."""
    own = {name.removeprefix("lm."): tensor for name, tensor in head.tensors().items() if name.startswith("lm.")}
    stored = revert_weight_conversion(head.get_submodule("lm"), own)  # type: ignore[arg-type]
    return {name: tensor.detach().cpu().contiguous() for name, tensor in stored.items()}


def beside(head: DraftHead, target: Target, out: Path) -> None:
    """The tokenizer, and how many tokens transformers shall draft: that many every time, however unsure the draft is."""
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(out)
    found = json.loads((out / "config.json").read_text())
    GenerationConfig(
        bos_token_id=found["bos_token_id"],
        eos_token_id=sorted(target.eos_ids) or None,
        pad_token_id=found["pad_token_id"],
        num_assistant_tokens=found["draftsmith"]["draft_length"],
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    ).save_pretrained(out)


def rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    depths = config.get("draftsmith", {}).get("draft_length", 1)
    return make_own(DraftModelHead, config, tensors, target, depths, {})


def make_own(
    kind: type[DraftHead],
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    target: Target,
    depths: int,
    options: dict[str, Any],
) -> DraftHead:
    """A head whose LM is this checkpoint, with the target's vocabulary, in the checkpoint's dtype."""
    said = set(FLAT_ROPE) if config.get("rope_parameters") else set()
    try:
        layer = own_lm.plain(AutoConfig.for_model(**{key: config[key] for key in config.keys() - said - {"draftsmith"}}))
    except ValueError as error:
        raise UserError(f"the checkpoint's config.json tells of no causal LM that transformers knows: {error}") from error
    lm = own_lm.from_tensors(layer, tensors)
    own_lm.check_rows(target, lm.config.vocab_size, "the checkpoint")
    head = kind(
        HeadConfig(
            kind=kind.kind,
            target=TargetIdentity.of(target),
            taps=[],
            depths=depths,
            draft_vocab_size=target.vocab_size,
            options=kind.Options.model_validate(options).model_dump(),
            layer=layer | {"vocab_size": target.vocab_size},
        )
    )
    for parameter in head.parameters():  # head.to(dtype) would round RoPE's frequencies, too
        parameter.data = parameter.data.to(lm.dtype)
    own_lm.copy_weights(lm.state_dict(), lm.config.vocab_size, head.get_submodule("lm"), "the checkpoint")  # type: ignore[arg-type]
    return head.to(target.device).eval()


def is_ours(kind: str, config: dict[str, Any]) -> bool:
    """Nothing but our own word tells a draft model from any other LM."""
    return config.get("draftsmith", {}).get("kind") == kind


LM = partial(Layout, config, tensors, rebuild, tells=partial(is_ours, "draft_model"), beside=beside)
VLLM = LM(method="draft_model", served=True)
SGLANG = LM(method="STANDALONE")
TENSORRT_LLM = LM(method="Draft_Target")
LLAMA_CPP = LM(method="draft-simple")
TRANSFORMERS = LM(method="assistant_model", served=True)
