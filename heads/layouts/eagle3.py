"""How EAGLE-3 heads are stored: the directory that vLLM, SGLang and TensorRT-LLM's PyTorch backend load (vLLM 0.32's
llama_eagle3.py), and the same tensors in the speculators format."""

from functools import partial
from typing import Any

from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from ..eagle3 import Eagle3Head
from ..layers import LAYER_KEYS
from .layout import (
    Layout,
    dtype_names,
    embedding_tensors,
    llama_config,
    make_head,
    own_tensors,
    provenance,
    same,
    speculators_block,
    vocabulary_ids,
    vocabulary_tensors,
)

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER = "layers.0."  # the layer's name in the speculators format


def config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """A one-layer Llama config with every field that some loader would otherwise fill in by itself."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_config(head, target),
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "logit_scale": 1.0,
        **{flag: getattr(head.options, flag) for flag in FLAGS},
        **tap_keys(head.config.taps, target.depth),
        "draftsmith": provenance(head, draft_length),
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


def tensors(head: DraftHead, target: Target, layer: str = "midlayer.") -> dict[str, Tensor]:
    """fc, ``midlayer.*``, norm, lm_head, the norms that the options ask for, and d2t/t2d of a reduced vocabulary.

    embed_tokens is left out, which makes engines share the target's, unless the target's scales what it looks up.
    """
    renamed = {
        name.replace("layer.", layer, 1) if name.startswith("layer.") else name: t for name, t in own_tensors(head).items()
    }
    return renamed | vocabulary_tensors(head) | embedding_tensors(target)


def rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target, layer: str = "midlayer.") -> DraftHead:
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
        options={flag: config[flag] for flag in FLAGS},
        layer={key: config[key] for key in LAYER_KEYS},
    )


def speculators_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """Every field is written: the libraries' defaults differ (norm_before_residual is True in vLLM, False in speculators).

    There must be no top-level ``model_type``; ``num_aux_hidden_states`` stands in the layer's config, where vLLM's Llama
    EAGLE-3 looks for it.
    """
    return {
        "architectures": ["Eagle3Speculator"],
        **speculators_block("eagle3", head, target, draft_length),
        "transformer_layer_config": llama_config(head, target),
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": head.config.taps,
        **{flag: getattr(head.options, flag) for flag in FLAGS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        **dtype_names(target),
        "draftsmith": provenance(head, draft_length),
    }


def speculators_rebuild(config: dict[str, Any], tensors: dict[str, Any], target: Target) -> DraftHead:
    return rebuild({**config["transformer_layer_config"], **config}, tensors, target, LAYER)


PLAIN = Layout(config, tensors, rebuild, method="eagle3", served=True)
SPECULATORS = Layout(speculators_config, partial(tensors, layer=LAYER), speculators_rebuild, method="eagle3", served=True)
