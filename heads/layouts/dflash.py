"""How DFlash heads are stored: one directory for vLLM, SGLang, TensorRT-LLM and llama.cpp (the names of z-lab/dflash, DeepSpec
and SpecForge), the same tensors in the speculators format, and as transformers' DFlash assistant."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from .dflash_reading import MASK_FILE, PREFIX, read_assistant, read_mask, read_plain, read_speculators, tells
from .layout import (
    Layout,
    dtype_names,
    embedding_tensors,
    flat_rope,
    own_tensors,
    provenance,
    scales_embedding,
    speculators_block,
    vocabulary_tensors,
)

ARCHITECTURE = {
    "none": "DFlashDraftModel",
    "conv": "DFlash2DraftModel",
    "gru": "DominoDraftModel",
    "markov": "Qwen3DSparkModel",
}
SPECULATORS = {
    "none": ("dflash", "DFlashDraftModel"),
    "conv": ("dflash2", "DFlash2DraftModel"),
    "markov": ("dspark", "DSparkDraftModel"),
}


@dataclass(frozen=True)
class Limits:
    """What an engine serves of the kind: which ``in_block``, and which of the rest it can do. ``anchored``: its Markov and GRU
    drafts always begin at the anchor's own place."""

    engine: str
    in_block: tuple[str, ...]
    causal: bool = True
    window: bool = True
    reduced: bool = False
    mask_embedding: bool = False
    gated: bool = False
    anchored: bool = False
    embeds: bool = False  # whether it takes an embedding of the head's own, where the target scales what it looks up
    scaled_rope: bool = True

    def check(self, head: DraftHead, target: Target) -> None:
        """Raise UserError for what the engine would refuse or, worse, draft wrongly from."""
        options, reduced = head.options, head.config.draft_vocab_size < target.vocab_size
        asked = {
            f"in_block: {options.in_block}": options.in_block in self.in_block,
            "causal: true": self.causal or not options.causal,
            "a window": self.window or options.window is None,
            "a draft vocabulary of its own": self.reduced or not reduced,
            "an embedding of the mask's own": (self.mask_embedding and options.in_block != "markov")
            or not options.mask_embedding,
            "gated: true": self.gated or not options.gated,
            "anchor_predicts: false": not self.anchored or options.in_block != "markov" or options.anchor_predicts,
            "a RoPE that is scaled": self.scaled_rope or head.config.layer["rope_parameters"]["rope_type"] == "default",
            "a target that scales its embeddings": self.embeds or not scales_embedding(target),
            "a target that scales or caps its logits": options.in_block == "none" or plain_logits(target),
            f"taps {head.config.taps}": head.config.taps[0] > 0 and head.config.taps[-1] < target.depth,
        }
        wrong = [what for what, served in asked.items() if not served]
        if wrong:
            raise UserError(
                f"{self.engine} cannot draft from a dflash head with {wrong[0]}: train one without, or export elsewhere."
            )


@torch.no_grad()
def plain_logits(target: Target) -> bool:
    """Whether the target's logits are its output head's and nothing else, so that an engine can add a correction to them."""
    last = torch.randn(4, target.hidden_size, generator=torch.Generator().manual_seed(0)).to(target.device, target.dtype)
    return torch.equal(target.logits(last), target.output_head(last)) and getattr(target.output_head, "bias", None) is None


def layers(head: DraftHead, target: Target, window: int | None) -> dict[str, Any]:
    """The layers as a Qwen3 config, every field written: RoPE in the flat keys of engines and in transformers' nested one."""
    return {
        "model_type": "qwen3",
        **head.config.layer,
        **flat_rope(head.config.layer["rope_parameters"]),
        "layer_types": ["sliding_attention" if window else "full_attention"] * head.options.layers,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": head.options.layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "is_causal": head.options.causal,
        "tie_word_embeddings": False,
        **{name: getattr(target.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **dtype_names(target),
    }


def ours(head: DraftHead, draft_length: int) -> dict[str, Any]:
    """The block that engines pass over: where the head comes from, and what of it no engine's key can say."""
    taught = {name: getattr(head.options, name) for name in ("anchors", "base_weight")}
    calibrated = {} if head.confidence is None else {"temperature": head.confidence.temperature.tolist()}
    method = "dspark" if head.options.in_block == "markov" else "dflash"
    return {**provenance(head, draft_length), "method": method, "options": taught, **calibrated}


def markov_keys(head: DraftHead) -> dict[str, Any]:
    return {
        "markov_rank": head.options.rank,
        "markov_head_type": "gated" if head.options.gated else "vanilla",
        "enable_confidence_head": head.confidence is not None,
        "confidence_head_with_markov": True,
        "sample_from_anchor": head.options.anchor_predicts,
    }


def selector_keys(head: DraftHead) -> dict[str, Any]:
    options = head.options
    return {
        "conv_kernel_size": 2,
        "conv_group_size": options.group,
        "selector_rank": options.rank,
        "selector_top_k": min(options.candidates, head.config.target.vocab_size),
    }


def plain_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """DSpark's own keys stand at the top, those of the others in ``dflash_config``. Layers are counted by their outputs
    there: tap - 1."""
    options: Any = head.options
    block, outputs = head.config.depths + (not options.anchor_predicts), [tap - 1 for tap in head.config.taps]
    common = {
        "architectures": [ARCHITECTURE[options.in_block]],
        **layers(head, target, options.window),
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "num_target_layers": target.depth,
        "block_size": block,
        "mask_token_id": options.mask_token,
        "draftsmith": ours(head, draft_length),
    }
    if options.in_block == "markov":
        anchored = {"dspark_bonus_anchor": not options.anchor_predicts, "target_layer_ids": outputs}
        return {**common, **markov_keys(head), **anchored}
    nested = {
        "mask_token_id": options.mask_token,
        "target_layer_ids": outputs,
        "num_target_layers": target.depth,
        "block_size": block,
        "causal": options.causal,
        "use_aux_hidden_state": True,
        "sample_from_anchor": False,
        "use_swa": options.window is not None,
        **({"swa_window_size": options.window} if options.window else {}),
        **(selector_keys(head) if options.in_block == "conv" else {}),
    }
    if options.in_block == "gru":
        nested |= {"projector_type": "domino", "pure_draft_prefix_len": 1, "shift_label": options.anchor_predicts}
        nested |= {"gru_hidden_dim": options.memory, "emb_dim": options.rank}
    return {**common, "dflash_config": nested}


def speculators_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """Causal is said by sliding layers alone in speculators itself, so a causal head's layers slide, if need be over
    everything; vLLM is told by ``is_causal`` of the layers' config. Taps are counted as here."""
    options: Any = head.options
    kind, architecture = SPECULATORS[options.in_block]
    window = options.window or (head.config.layer["max_position_embeddings"] if options.causal else None)
    return {
        "architectures": [architecture],
        **speculators_block(kind, head, target, draft_length),
        "transformer_layer_config": layers(head, target, window),
        "draft_vocab_size": head.config.draft_vocab_size,
        "block_size": head.config.depths + (not options.anchor_predicts),
        "target_hidden_size": target.hidden_size,
        "aux_hidden_state_layer_ids": head.config.taps,
        "mask_token_id": options.mask_token,
        "sliding_window_non_causal": not options.causal,
        "sample_from_anchor": options.anchor_predicts,
        **(selector_keys(head) if options.in_block == "conv" else {}),
        **(markov_keys(head) if options.in_block == "markov" else {}),
        "tie_word_embeddings": False,
        **dtype_names(target),
        "draftsmith": ours(head, draft_length),
    }


def tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """The head's own names, its dependency's under ``markov_head.``, ``candidate_selector.`` or none; a confidence beside a
    Markov head alone, for no engine reads another. The mask's embedding lies in a file of its own."""
    renamed = {}
    for name, tensor in own_tensors(head).items():
        if name.startswith("in_block."):
            renamed[name.replace("in_block.", PREFIX[head.options.in_block], 1)] = tensor
        elif name != "mask_embedding":
            renamed[name] = tensor
    if head.confidence is not None and head.options.in_block == "markov":
        renamed |= {f"confidence_head.proj.{name}": t.detach().cpu() for name, t in head.confidence.proj.state_dict().items()}
    return renamed | vocabulary_tensors(head) | embedding_tensors(target)


def write_mask(head: DraftHead, target: Target, directory: Path) -> None:
    if head.options.mask_embedding:
        embedding = head.get_parameter("mask_embedding").detach().cpu()
        torch.save({"embedding": embedding, "mask_token_id": head.options.mask_token}, directory / MASK_FILE)


def assistant_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """transformers has one DFlash model in its library, Muse Glimmer's assistant; any target may be drafted for with it."""
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        **layers(head, target, head.options.window),
        "model_type": "muse_glimmer_assistant",
        "sliding_window": head.options.window or head.config.layer["max_position_embeddings"],
        "block_size": head.config.depths + 1,
        "mask_token_id": head.options.mask_token,
        "target_layer_ids": [tap - 1 for tap in head.config.taps],
        "draftsmith": ours(head, draft_length),
    }


def assistant_tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return {renamed.get(name, name): tensor for name, tensor in tensors(head, target).items()}


def within(limits: Limits, made: Callable[[DraftHead, Target], dict[str, Tensor]]) -> Callable[[DraftHead, Target], Any]:
    """The tensors of a head that an engine serves."""

    def checked(head: DraftHead, target: Target) -> dict[str, Tensor]:
        limits.check(head, target)
        return made(head, target)

    return checked


def plain(limits: Limits, **told: Any) -> Layout:
    made = within(limits, tensors)
    return Layout(plain_config, made, read_plain, method="dflash", beside=write_mask, also=read_mask, **told)


VLLM_LIMITS = Limits("vllm", ("none", "markov", "conv"), reduced=True, mask_embedding=True, embeds=True)
VLLM = plain(VLLM_LIMITS, served=True, tells=tells)
SGLANG = plain(
    Limits("sglang", ("none", "markov", "gru", "conv"), causal=False, mask_embedding=True, gated=True, anchored=True)
)
TENSORRT_LLM = plain(Limits("tensorrt-llm", ("none", "markov"), causal=False, window=False, anchored=True, scaled_rope=False))
LLAMACPP = plain(Limits("llamacpp", ("none", "markov", "conv")))
SPECULATORS_FORMAT = Layout(
    speculators_config,
    within(
        Limits("speculators", ("none", "markov", "conv"), reduced=True, mask_embedding=True, gated=True, embeds=True), tensors
    ),
    read_speculators,
    method="dflash",
    served=True,
    tells=lambda config: config.get("speculators_model_type") in ("dflash", "dflash2", "dspark"),
    beside=write_mask,
    also=read_mask,
)
TRANSFORMERS = Layout(
    assistant_config,
    within(Limits("transformers", ("none",), causal=False), assistant_tensors),
    read_assistant,
    method="dflash",
    served=True,
    tells=lambda config: config.get("model_type") == "muse_glimmer_assistant",
)
