"""The speculators format (speculators 0.9), which vLLM serves as it is: EAGLE-3's tensors under a config of its own."""

from functools import partial
from typing import Any

from ...target import Target
from ..base import DraftHead
from .layout import Engine, Layout, dtype_names, provenance
from .vllm import EAGLE3_FLAGS, eagle3_rebuild, eagle3_tensors, llama_config

LAYER = "layers.0."
VERSION = "0.9.0"


def eagle3_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """Every field is written: the libraries' defaults differ (norm_before_residual is True in vLLM, False in speculators).

    There must be no top-level ``model_type``; ``num_aux_hidden_states`` stands in the layer's config, where vLLM's Llama
    EAGLE-3 looks for it.
    """
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": draft_length, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": target.name, "architectures": [head.config.target.architecture]},
        },
        "transformer_layer_config": llama_config(head, target),
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": head.config.taps,
        **{flag: getattr(head.options, flag) for flag in EAGLE3_FLAGS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        **dtype_names(target),
        "draftsmith": provenance(head, draft_length),
    }


def rebuild(config: dict[str, Any], tensors: dict[str, Any], target: Target) -> DraftHead:
    return eagle3_rebuild({**config["transformer_layer_config"], **config}, tensors, target, LAYER)


ENGINE = Engine(
    layouts={"eagle3": Layout(eagle3_config, partial(eagle3_tensors, layer=LAYER), rebuild, method="eagle3", served=True)},
    others="the speculators format that vLLM reads knows eagle3, peagle, dflash, dflash2 and dspark only",
)
