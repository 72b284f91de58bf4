"""vLLM's own layouts, as its loaders read them (0.32: llama_eagle3.py, medusa.py, configs/medusa.py).

The EAGLE-3 directory is also the one that SGLang and TensorRT-LLM's PyTorch backend load. vLLM 0.33 has no Medusa.
"""

from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from ..eagle3 import Eagle3Head
from ..layers import LAYER_KEYS
from ..medusa import MedusaHead
from .layout import Engine, Layout, dtype_names, make_head, own_tensors, provenance, vocabulary_ids, vocabulary_tensors

EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

# -- EAGLE-3 -------------------------------------------------------------------------------------------------------


def eagle3_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """A one-layer Llama config with every field that some loader would otherwise fill in by itself."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_config(head, target),
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "logit_scale": 1.0,
        **{flag: getattr(head.options, flag) for flag in EAGLE3_FLAGS},
        **tap_keys(head.config.taps, target.depth),
        "draftsmith": provenance(head, draft_length),
    }


def llama_config(head: DraftHead, target: Target) -> dict[str, Any]:
    """The head's layer; RoPE in the flat keys that engines read and the nested one that transformers 5 writes."""
    rope = head.config.layer["rope_parameters"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        **head.config.layer,
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "num_aux_hidden_states": len(head.config.taps),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": getattr(target.config, "bos_token_id", None),
        "eos_token_id": getattr(target.config, "eos_token_id", None),
        **dtype_names(target),
    }


def default_taps(depth: int) -> list[int]:
    """The taps an engine takes when the config names none."""
    return [2, depth // 2, depth - 3]


def tap_keys(taps: list[int], depth: int) -> dict[str, Any]:
    """No key for the default taps: all engines agree on those. Otherwise vLLM reads the top-level ids, as inputs of layers;
    SGLang the nested ones, as outputs, one lower (it cannot name the embedding)."""
    if taps == default_taps(depth):
        return {}
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}} if taps[0] > 0 else {}
    return {"eagle_aux_hidden_state_layer_ids": taps, **nested}


def eagle3_tensors(head: DraftHead, target: Target, layer: str = "midlayer.") -> dict[str, Tensor]:
    """fc, ``midlayer.*``, norm, lm_head, the norms that the options ask for, and d2t/t2d of a reduced vocabulary.

    embed_tokens is left out, which makes engines share the target's, unless the target's scales what it looks up.
    """
    renamed = {
        name.replace("layer.", layer, 1) if name.startswith("layer.") else name: t for name, t in own_tensors(head).items()
    }
    return renamed | vocabulary_tensors(head) | embedding_tensors(target)


@torch.no_grad()
def embedding_tensors(target: Target) -> dict[str, Tensor]:
    """embed_tokens.weight [vocab, hidden] where the target's embedding is more than a look-up of its weight."""
    looked_up = target.embed(torch.arange(target.vocab_size, device=target.device))
    plain = torch.equal(looked_up, target.embed.get_parameter("weight")[: target.vocab_size])
    return {} if plain else {"embed_tokens.weight": looked_up.cpu().contiguous()}


def eagle3_rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target, layer: str = "midlayer.") -> DraftHead:
    """The head of a directory whose tensors of the layer begin with ``layer``."""
    tensors = dict(tensors)
    ids = vocabulary_ids(tensors, config["draft_vocab_size"], target.vocab_size)
    expected = embedding_tensors(target)
    if not same(expected.get("embed_tokens.weight"), tensors.pop("embed_tokens.weight", None)):
        raise UserError("the export's embed_tokens.weight is not what the target's embedding gives: export the head again.")
    taps = config.get("eagle_aux_hidden_state_layer_ids") or default_taps(target.depth)
    if len(taps) != config["num_aux_hidden_states"]:
        raise UserError(
            f"the export names taps {taps} and num_aux_hidden_states {config['num_aux_hidden_states']}: they must agree."
        )
    return make_head(
        Eagle3Head,
        target,
        ids,
        {name.replace(layer, "layer.", 1) if name.startswith(layer) else name: t for name, t in tensors.items()},
        taps=taps,
        depths=config["draftsmith"]["draft_length"],
        options={flag: config[flag] for flag in EAGLE3_FLAGS},
        layer={key: config[key] for key in LAYER_KEYS},
    )


def same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    return ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)


# -- Medusa --------------------------------------------------------------------------------------------------------


def medusa_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """No key beside ``num_heads`` and ``num_hidden_layers`` may hold num and heads or layers: vLLM matches substrings.

    ``truncated_vocab_size`` is always the whole vocabulary: see ``medusa_tensors``.
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


def medusa_tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
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


def medusa_rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
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


ENGINE = Engine(
    layouts={
        "eagle3": Layout(eagle3_config, eagle3_tensors, eagle3_rebuild, method="eagle3", served=True),
        "medusa": Layout(medusa_config, medusa_tensors, medusa_rebuild, method="medusa", served=True),
    },
    others="its layouts here are for eagle3 and medusa",
)
