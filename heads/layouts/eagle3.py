"""How EAGLE-3 heads are stored: one directory for vLLM (0.32: llama_eagle3.py), SGLang (0.5.23: llama_eagle3.py),
TensorRT-LLM's PyTorch backend (modeling_speculative.py) and llama.cpp's converter, as far as each of them goes, and the same
tensors in the speculators format."""

from functools import partial
from typing import Any

from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from ..eagle3 import Eagle3Head
from .layout import (
    Layout,
    dtype_names,
    embedding_tensors,
    llama_config,
    make_head,
    provenance,
    speculators_block,
    vocabulary_ids,
    vocabulary_tensors,
)
from .llama import draft_length_of, layer_of, layer_tensors, own_names, refuse_scaled_embedding, take_embedding

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# NeMo AutoModel's name: one layer, all but the lm_head under ``model.``, and the config counts the target's layers
AUTOMODEL = "LlamaEagle3DraftModel"
NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", AUTOMODEL)
USUAL_LENGTH = 5
UNREAD = "eagle3_layers_to_capture"  # what TensorRT-LLM is told on its command line
LLAMACPP_LACKS = (
    "Qwen2ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "SmolLM3ForCausalLM",
)  # fmt: skip


# -- out -----------------------------------------------------------------------------------------------------------


def config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """A Llama config with every field that some loader would otherwise fill in by itself."""
    return {
        "architectures": [NAMES[0]],
        **llama_config(head, target),
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "logit_scale": 1.0,
        **flags(head),
        **tap_keys(head, target.depth),
        "draftsmith": provenance(head, draft_length),
    }


def flags(head: DraftHead) -> dict[str, bool]:
    """What engines must be told; a kind without the option has it off."""
    return {flag: getattr(head.options, flag, False) for flag in FLAGS}


def default_taps(depth: int) -> list[int]:
    """The taps an engine takes when the config names none."""
    return [2, depth // 2, depth - 3]


def tap_keys(head: DraftHead, depth: int) -> dict[str, Any]:
    """No key for the default taps: all engines agree on those. Otherwise vLLM and llama.cpp read the top-level ids, as inputs
    of layers; SGLang the nested ones, as outputs, one lower (it cannot name the embedding). TensorRT-LLM reads none, and
    norm_before_fc in the nested place alone."""
    taps = head.config.taps
    flat: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    if taps != default_taps(depth):
        flat["eagle_aux_hidden_state_layer_ids"] = taps
        if taps[0] > 0:
            nested["eagle_aux_hidden_state_layer_ids"] = [tap - 1 for tap in taps]
    if head.options.norm_before_fc:
        nested["norm_before_fc"] = True
    return flat | ({"eagle_config": nested} if nested else {})


def tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """fc, ``midlayer.*``, norm, lm_head, the norms that the options ask for, and d2t/t2d of a reduced vocabulary.

    Several layers are ``layers.{i}.*``. The norm before a further layer's attention is vLLM's input_layernorm and SGLang's
    and TensorRT-LLM's hidden_norm: it stands under both names. embed_tokens is left out, which makes engines share the
    target's, unless the target's scales what it looks up.
    """
    own = layer_tensors(head, "midlayer." if head.options.layers == 1 else "layers.0.")
    twice = {
        name.replace("input_layernorm", "hidden_norm"): norm.clone()
        for name, norm in own.items()
        if name.startswith("layers.") and name.endswith("input_layernorm.weight") and not name.startswith("layers.0.")
    }
    return own | twice | vocabulary_tensors(head) | embedding_tensors(target)


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
        **flags(head),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        **dtype_names(target),
        "draftsmith": provenance(head, draft_length),
    }


def speculators_tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    return layer_tensors(head, "layers.0.") | vocabulary_tensors(head) | embedding_tensors(target)


def sglang_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    refuse_normed_residual(head, "SGLang")
    refuse_scaled_embedding(target, "SGLang")
    refuse_taps(head, "SGLang", {0: "the embedding", target.depth: "the last layer's output"})
    return config(head, target, draft_length)


def tensorrt_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """Taps cannot be in it: ``draftsmith`` notes what Eagle3DecodingConfig has to be told, layers by their outputs."""
    refuse_normed_residual(head, "TensorRT-LLM")
    refuse_scaled_embedding(target, "TensorRT-LLM")
    refuse_taps(head, "TensorRT-LLM", {0: "the embedding"})
    found = config(head, target, draft_length)
    return found | {"draftsmith": found["draftsmith"] | {UNREAD: [tap - 1 for tap in head.config.taps]}}


def llamacpp_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """The converter reads the ids of taps as vLLM does. It needs the target's directory beside this one."""
    if len(head.config.taps) != 3:
        raise UserError(f"llama.cpp reads exactly 3 taps, and this head has {len(head.config.taps)}: export it for vllm.")
    if head.options.layers != 1:
        raise UserError(f"llama.cpp runs heads of one layer, and this one has {head.options.layers}: export it for vllm.")
    for flag in ("fc_norm", "norm_output"):
        if flags(head)[flag]:
            raise UserError(f"llama.cpp knows no {flag}: export the head for vllm, or train it without options.{flag}.")
    if head.config.target.architecture in LLAMACPP_LACKS:
        raise UserError(f"llama.cpp records no features of a {head.config.target.architecture}: export the head for vllm.")
    return config(head, target, draft_length)


def refuse_normed_residual(head: DraftHead, engine: str) -> None:
    if head.options.norm_before_residual:
        raise UserError(
            f"{engine} has no norm_before_residual and would draft something else: export the head for vllm, or train it "
            "without options.norm_before_residual."
        )


def refuse_taps(head: DraftHead, engine: str, unread: dict[int, str]) -> None:
    for tap, what in unread.items():
        if tap in head.config.taps:
            raise UserError(f"{engine} cannot read tap {tap}, {what}: export the head for vllm, or train it with other taps.")


# -- in ------------------------------------------------------------------------------------------------------------


def rebuild(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    target: Target,
    taps: list[int] | None,
    norm: str = "input_layernorm",
    normed_residual: bool = False,
) -> DraftHead:
    """The head of a directory, ours or published.

    ``taps`` as the engine finds them in the config (None: the default ones), ``norm`` the name under which it reads the norm
    before a further layer's attention, ``normed_residual`` what a silent config means by norm_before_residual.
    """
    if config.get("architectures") == [AUTOMODEL]:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        config = config | {"num_hidden_layers": 1}
    tensors = further_norms(own_names(tensors), norm)
    take_embedding(tensors, target)
    return backbone(Eagle3Head, config, tensors, target, taps, draft_length_of(config, USUAL_LENGTH), normed_residual)


def backbone(
    kind: type[DraftHead],
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    target: Target,
    taps: list[int] | None,
    depths: int,
    normed_residual: bool = False,
    options: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None,
) -> DraftHead:
    """A head of ``kind`` from tensors under its own names, with more ``options`` and more ``keys`` of its layer's config."""
    layer = layer_of(config, target)
    said = config | (config.get("eagle_config") or {})
    taps = taps or default_taps(target.depth)
    target.check_taps(taps)
    for key, own in (("num_aux_hidden_states", len(taps)), ("target_hidden_size", target.hidden_size)):
        if (said.get(key) or own) != own:
            raise UserError(f"the checkpoint's {key} is {said[key]}, and its taps {taps} of {target.name} make it {own}.")
    size = said.get("draft_vocab_size") or len(tensors.get("d2t", range(target.vocab_size)))
    if size == target.vocab_size:
        without_map(tensors, target)
    silent = {"norm_before_residual": normed_residual}
    ours = "draftsmith" in config
    found = {flag: bool(said[flag] if ours else said.get(flag, silent.get(flag, False))) for flag in FLAGS}
    known = {flag: found[flag] for flag in FLAGS if flag in kind.Options.model_fields}
    return make_head(
        kind,
        target,
        vocabulary_ids(tensors, size, target.vocab_size),
        tensors,
        taps=taps,
        depths=depths,
        options=known | {"layers": layer["num_hidden_layers"]} | (options or {}),
        layer=layer | (keys or {}),
    )


def further_norms(tensors: dict[str, Tensor], norm: str) -> dict[str, Tensor]:
    """The norm before every further layer's attention as its input_layernorm: the one that the engine reads, else the other."""
    found = dict(tensors)
    for name in tensors:
        if name.startswith("further.") and name.endswith("hidden_norm.weight"):
            theirs, plain = found.pop(name), name.replace("hidden_norm", "input_layernorm")
            if norm == "hidden_norm" or plain not in found:
                found[plain] = theirs
    return found


def without_map(tensors: dict[str, Tensor], target: Target) -> None:
    """Drop the maps of a vocabulary that maps to itself, and fill in the output head that such a head may share."""
    if "d2t" in tensors and not tensors["d2t"].any():
        del tensors["d2t"]
        tensors.pop("t2d", None)
    if "lm_head.weight" not in tensors:
        rows = target.output_head.get_parameter("weight")[: target.vocab_size]
        tensors["lm_head.weight"] = rows.detach().cpu().to(tensors["fc.weight"].dtype).clone()


def vllm_taps(config: dict[str, Any]) -> list[int] | None:
    return config.get("eagle_aux_hidden_state_layer_ids")


def sglang_taps(config: dict[str, Any]) -> list[int] | None:
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return ids and [id + 1 for id in ids]


def vllm_rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    return rebuild(config, tensors, target, vllm_taps(config))


def sglang_rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    return rebuild(config, tensors, target, sglang_taps(config), norm="hidden_norm")


def tensorrt_rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    ids = config.get("draftsmith", {}).get(UNREAD)
    return rebuild(config, tensors, target, ids and [id + 1 for id in ids], norm="hidden_norm")


def speculators_rebuild(config: dict[str, Any], tensors: dict[str, Any], target: Target) -> DraftHead:
    """A silent config is read as vLLM reads it, with norm_before_residual."""
    merged = {**config["transformer_layer_config"], **config}
    return rebuild(merged, tensors, target, vllm_taps(merged), normed_residual=True)


def tells(config: dict[str, Any], engine: str) -> bool:
    """The paper's repository gives a head the name of a whole Llama, with a draft vocabulary; only SGLang's trainers write
    nested ids alone."""
    name = (config.get("architectures") or [None])[0]
    known = name in NAMES or (name == "LlamaForCausalLM" and "draft_vocab_size" in config)
    if not known or "pard_token" in config or "mask_token_id" in config:
        return False
    if UNREAD in config.get("draftsmith", {}):
        return engine == "tensorrt-llm"
    nested = vllm_taps(config) is None and sglang_taps(config) is not None
    return engine == ("sglang" if nested else "vllm")


PLAIN = Layout(config, tensors, vllm_rebuild, method="eagle3", served=True, tells=partial(tells, engine="vllm"))
SGLANG = Layout(sglang_config, tensors, sglang_rebuild, method="EAGLE3", tells=partial(tells, engine="sglang"))
TENSORRT_LLM = Layout(tensorrt_config, tensors, tensorrt_rebuild, method="Eagle3", tells=partial(tells, engine="tensorrt-llm"))
LLAMACPP = Layout(llamacpp_config, tensors, vllm_rebuild, method="draft-eagle3")
SPECULATORS = Layout(
    speculators_config,
    speculators_tensors,
    speculators_rebuild,
    method="eagle3",
    served=True,
    tells=lambda config: config.get("speculators_model_type") == "eagle3",
)
