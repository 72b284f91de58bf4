"""How a stored DFlash head is read: our own exports, and the directories that z-lab, DeepSeek, SpecForge and speculators
publish, whose configs leave out what their loaders fill in."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from ..dflash import DFlashHead, published_taps
from ..layers import LAYER_KEYS
from .layout import embedding_tensors, make_head, same, vocabulary_ids

MASK_FILE = "mask_embedding.pt"
PREFIX = {"none": "in_block.", "markov": "markov_head.", "gru": "", "conv": "candidate_selector."}
ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "DominoDraftModel", "Qwen3DSparkModel", "DSparkDraftModel")


def tells(config: dict[str, Any]) -> bool:
    """Whether a config is of the plain layout."""
    named = set(config.get("architectures") or []) & set(ARCHITECTURES)
    return bool(named) and "speculators_model_type" not in config and config.get("model_type") == "qwen3"


def read_mask(directory: Path) -> dict[str, Tensor]:
    """The mask's own embedding, where one lies beside the weights."""
    path = directory / MASK_FILE
    if not path.is_file():
        return {}
    found = torch.load(path, map_location="cpu", weights_only=True)
    return {"mask_embedding": (found["embedding"] if isinstance(found, dict) else found).flatten()}


def read_plain(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    said = {**config, **(config.get("dflash_config") or {})}
    outputs = said.get("target_layer_ids")
    taps = published_taps(target.depth, said["num_hidden_layers"]) if outputs is None else [i + 1 for i in outputs]
    return rebuild(config, said, taps, tensors, target)


def read_speculators(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    """speculators' own defaults for what is missing; ``sliding_window_non_causal`` speaks of sliding layers alone."""
    layer = config["transformer_layer_config"]
    kind = config["speculators_model_type"]
    sliding = "sliding_attention" in (layer.get("layer_types") or [])
    said = {"sample_from_anchor": kind == "dspark", "sliding_window_non_causal": kind == "dflash2", **layer, **config}
    said["is_causal"] = sliding and not said["sliding_window_non_causal"]
    return rebuild(layer, said, said["aux_hidden_state_layer_ids"], tensors, target)


def read_assistant(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    """Muse Glimmer's names; its layers are never causal."""
    named = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    renamed = {named.get(name, name): tensor for name, tensor in tensors.items()}
    types = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
    said = {**config, "is_causal": False, "vocab_size": target.vocab_size, "layer_types": types}
    return rebuild(said, said, [i + 1 for i in said["target_layer_ids"]], renamed, target)


def rebuild(
    layer: dict[str, Any], said: dict[str, Any], taps: list[int], tensors: dict[str, Tensor], target: Target
) -> DraftHead:
    """The head of ``tensors`` with published names; ``said`` holds all keys, ``layer`` those of its layers."""
    refuse(said, target)
    in_block, ours = dependency(said, tensors), said.get("draftsmith") or {}
    anchored = (
        said.get("shift_label", False) if in_block == "gru" else in_block == "markov" and said.get("sample_from_anchor", True)
    )
    depths = said.get("block_size", 16) - (not anchored)
    own = own_names(dict(tensors), in_block, ours.get("temperature"), depths)
    ids = vocabulary_ids(own, said.get("draft_vocab_size") or target.vocab_size, target.vocab_size)
    drop_copies(own, len(ids) == target.vocab_size, target)
    options = {
        "layers": said["num_hidden_layers"],
        "in_block": in_block,
        "causal": causal(said),
        "anchor_predicts": anchored,
        "window": window(said),
        "mask_token": said["mask_token_id"],
        "mask_embedding": "mask_embedding" in own,
        **dependency_options(in_block, said, own),
        **ours.get("options", {}),
    }
    confidence = "confidence.proj.weight" in own
    return make_head(
        DFlashHead, target, ids, own, taps=taps, depths=depths, options=options, layer=sizes(layer), confidence=confidence
    )


def refuse(said: dict[str, Any], target: Target) -> None:
    """UserError for a directory whose computation this kind does not have, or whose sizes are another target's."""
    expected = {
        "hidden_size": (target.hidden_size,),
        "vocab_size": (target.vocab_size,),
        "target_hidden_size": (None, target.hidden_size),
        "num_target_layers": (None, target.depth),
        "attention_bias": (None, False),
        "attention_sink_bias": (None, False),
        "attention_value_scale": (None, 1.0),
        "output_multiplier": (None, 1.0),
        "final_logit_softcapping": (None, 0.0),
        "input_embedding_scale": (None, 1.0),
        "conv_kernel_size": (None, 0, 2),
        "pure_draft_prefix_len": (None, 1),
        "markov_head_type": (None, "vanilla", "gated"),
    }
    for key, allowed in expected.items():
        if said.get(key) not in allowed:
            raise UserError(
                f"the directory's config says {key}: {said.get(key)}, and a dflash head of {target.name} has {allowed[-1]}."
            )


def dependency(said: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Which in_block the directory has, by its tensors."""
    for kind, name in (("markov", "markov_head.markov_w1.weight"), ("gru", "prefix_gru.weight_ih_l0")):
        if name in tensors:
            return kind
    return "conv" if said.get("conv_kernel_size") else "none"


def dependency_options(in_block: str, said: dict[str, Any], own: dict[str, Tensor]) -> dict[str, Any]:
    if in_block == "markov":
        return {"rank": own["in_block.markov_w1.weight"].shape[1], "gated": "in_block.gate_proj.weight" in own}
    if in_block == "gru":
        return {
            "rank": own["in_block.embed_proj.0.weight"].shape[0],
            "memory": own["in_block.prefix_gru.weight_hh_l0"].shape[1],
        }
    if in_block == "conv":
        return {"rank": said["selector_rank"], "group": said["conv_group_size"], "candidates": said["selector_top_k"]}
    return {}


def own_names(tensors: dict[str, Tensor], in_block: str, temperature: list[float] | None, depths: int) -> dict[str, Tensor]:
    """Published names as the head's own, with the calibration of a confidence where there is one."""
    roots = {"gru": ("prefix_gru.", "embed_proj."), "markov": ("markov_head.",), "conv": ("candidate_selector.",)}
    found = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").replace("confidence_head.", "confidence.", 1)
        if name.startswith(roots.get(in_block, ())):
            name = "in_block." + name.removeprefix(PREFIX[in_block])
        found[name] = tensor
    if "confidence.proj.weight" in found:
        dtype = found["confidence.proj.weight"].dtype
        found["confidence.temperature"] = (
            torch.ones(depths, dtype=dtype) if temperature is None else torch.tensor(temperature, dtype=dtype)
        )
    return found


def drop_copies(own: dict[str, Tensor], whole: bool, target: Target) -> None:
    """Take out frozen copies of the target's embedding and output head; UserError where they are no copies."""
    scaled = embedding_tensors(target).get("embed_tokens.weight")
    copies = {"embed_tokens.weight": target.embed.get_parameter("weight") if scaled is None else scaled}
    copies |= {"lm_head.weight": target.output_head.get_parameter("weight")} if whole else {}
    for name, theirs in copies.items():
        stored = own.pop(name, None)
        if stored is not None and not same(stored.float(), theirs.detach().cpu().to(stored.dtype).float()):
            raise UserError(
                f"the directory's {name} is not the target's own, and a dflash head has none: it is another target's."
            )


def causal(said: dict[str, Any]) -> bool:
    """As vLLM reads it: by name, else sliding layers are causal and full ones are not."""
    for key in ("is_causal", "causal"):
        if said.get(key) is not None:
            return bool(said[key])
    return "sliding_attention" in (said.get("layer_types") or [])


def window(said: dict[str, Any]) -> int | None:
    """The window of the layers; None where they see everything. UserError where they differ."""
    types = set(said.get("layer_types") or ["full_attention"])
    if len(types) > 1:
        raise UserError(f"the directory's layers are of kinds {', '.join(sorted(types))}, and a dflash head has one kind.")
    if types == {"full_attention"} and not said.get("use_swa"):
        return None
    found = said.get("swa_window_size") or said["sliding_window"]
    return None if found >= said["max_position_embeddings"] else found


def sizes(layer: dict[str, Any]) -> dict[str, Any]:
    """The layers' sizes; RoPE from transformers 5's key or from those of its forerunners."""
    rope = layer.get("rope_parameters") or {
        "rope_type": "default",
        "rope_theta": float(layer.get("rope_theta", 1e6)),
        **(layer.get("rope_scaling") or {}),
    }
    heads = layer["num_attention_heads"]
    filled = {
        "num_key_value_heads": heads,
        "head_dim": layer["hidden_size"] // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        **layer,
        "rope_parameters": rope,
    }
    return {key: filled[key] for key in LAYER_KEYS}
