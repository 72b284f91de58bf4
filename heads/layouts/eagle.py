"""How EAGLE-1 heads are stored: as in the paper's repository, which vLLM (0.32: llama_eagle.py) and SGLang (0.5.23:
llama_eagle.py) read under two architectures' names, vLLM without fc's bias and SGLang never without it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from ..eagle import EagleHead
from .layout import Layout, embedding_tensors, llama_config, make_head, provenance
from .llama import draft_length_of, layer_of, layer_tensors, own_names, refuse_scaled_embedding, take_embedding

USUAL_LENGTH = 5  # the chain that the paper's repository measures
VLLM_NAMES = ("EagleLlamaForCausalLM", "LlamaForCausalLM")  # the second is the paper's repository's
SGLANG_NAME = "LlamaForCausalLMEagle"


def config(head: DraftHead, target: Target, draft_length: int, architecture: str) -> dict[str, Any]:
    """A Llama config. No ``bias`` key: vLLM takes it for the attention's."""
    llama = llama_config(head, target)
    del llama["num_aux_hidden_states"]  # the last hidden state is no auxiliary one
    return {"architectures": [architecture], **llama, "logit_scale": 1.0, "draftsmith": provenance(head, draft_length)}


def vllm_tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """fc.weight and ``layers.{i}.*``, the first layer without an input norm; no norm, lm_head or embedding of the target's."""
    tensors = whole_vocabulary(head)
    bias = tensors.pop("fc.bias", None)
    if bias is not None and bias.any():
        raise UserError("vLLM drops an EAGLE-1 head's fc.bias: export it for sglang, or train it with options.bias false.")
    return tensors | embedding_tensors(target)


def sglang_tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """As for vLLM, and fc.bias, zeros where the head has none: SGLang would otherwise leave it random."""
    refuse_scaled_embedding(target, "SGLang")
    tensors = whole_vocabulary(head)
    return {"fc.bias": torch.zeros(len(tensors["fc.weight"]), dtype=tensors["fc.weight"].dtype)} | tensors


def whole_vocabulary(head: DraftHead) -> dict[str, Tensor]:
    if len(head.target_ids) < head.config.target.vocab_size:
        raise UserError(
            "engines read an EAGLE-1 head's drafts from the target's whole output head: train it with head.draft_vocab null."
        )
    return layer_tensors(head, "layers.0.")


def rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    """The head of any such directory; a bias of zeros is none."""
    tensors = own_names(tensors)
    take_embedding(tensors, target)
    biased = bool(tensors.get("fc.bias", torch.zeros(1)).any())
    if not biased:
        tensors.pop("fc.bias", None)
    layer = layer_of(config, target)
    return make_head(
        EagleHead,
        target,
        torch.arange(target.vocab_size),
        tensors,
        taps=[],
        depths=draft_length_of(config, USUAL_LENGTH),
        options={"layers": layer["num_hidden_layers"], "bias": biased},
        layer=layer,
    )


def tells_vllm(config: dict[str, Any]) -> bool:
    """The paper's repository gives a head the name of a whole Llama, with one layer."""
    name = (config.get("architectures") or [None])[0]
    plain = config.get("num_hidden_layers") == 1 and "draft_vocab_size" not in config
    return name == VLLM_NAMES[0] or (name == VLLM_NAMES[1] and plain)


def tells_sglang(config: dict[str, Any]) -> bool:
    return config.get("architectures") == [SGLANG_NAME]


VLLM = Layout(partial(config, architecture=VLLM_NAMES[0]), vllm_tensors, rebuild, method="eagle", served=True, tells=tells_vllm)
SGLANG = Layout(partial(config, architecture=SGLANG_NAME), sglang_tensors, rebuild, method="EAGLE", tells=tells_sglang)
