"""How Medusa heads are stored: vLLM's directory (0.32: medusa.py, configs/medusa.py; 0.33 has no Medusa), and the one of the
Medusa repository, which TGI and TensorRT-LLM 1.2 load: ``{i}.{j}.linear.{weight,bias}`` and ``{i}.{blocks}.weight``.

Medusa-2's heads go with the adapted target. A directory holds its adapter as peft and vLLM load it (``adapter/``), or the
target with the adapter merged into it (``target/``), to be served in the target's place.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..adapters import load_tensors, merged
from ..base import DraftHead
from ..medusa import MedusaHead
from .layout import Layout, dtype_names, make_head, own_tensors, provenance, spread

ADAPTER, TARGET = "adapter", "target"  # folders beside the heads
PREFIXES = ("medusa_head.", "medusa_heads.")  # of a checkpoint's heads
MERGED = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # how far rounding the sum may move a state


def origin(head: DraftHead, draft_length: int, is_merged: bool) -> dict[str, Any]:
    """``provenance``, and what an adapter that lies beside is scaled by."""
    return provenance(head, draft_length) | ({"lora": head.options.lora.model_dump()} if head.adapts and not is_merged else {})


def vllm_config(head: DraftHead, target: Target, draft_length: int, is_merged: bool = False) -> dict[str, Any]:
    """No key beside ``num_heads`` and ``num_hidden_layers`` may hold num and heads or layers: vLLM matches substrings.

    ``truncated_vocab_size`` is always the whole vocabulary: see ``vllm_tensors``. vLLM leaves biases out unless
    ``medusa_fc_bias`` says that there are some.
    """
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_heads": head.config.depths,
        "num_hidden_layers": head.options.blocks,
        "medusa_fc_bias": biased(head),
        "original_lm_head": head.options.lm_head == "shared",
        "truncated_vocab_size": target.vocab_size,
        "logit_scale": 1.0,
        "max_paths": 64,
        "topk": 10,
        **dtype_names(target),
        "draftsmith": origin(head, draft_length, is_merged),
    }


def vllm_merged_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    if not head.adapts:
        raise UserError("this medusa head trains no adapter on its target, so there is nothing to merge: export it to vllm.")
    return vllm_config(head, target, draft_length, is_merged=True)


def vllm_tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """``blocks.{i}.layers.{j}.{weight,bias}`` and ``lm_heads.{i}.weight`` or, shared, the target's ``lm_head.weight``.

    vLLM builds an own lm_head with the target's whole vocabulary and refuses fewer rows, whatever truncated_vocab_size
    says. So a reduced one is spread over all tokens, with ``token_map`` (which vLLM then passes over) naming the real rows.
    """
    tensors = {}
    for name, tensor in whole_tensors(head, target).items():
        match name.split("."):
            case ["blocks", _, _, _, "bias"] if not biased(head):
                pass
            case ["blocks", depth, block, _, part]:
                tensors[f"blocks.{depth}.layers.{block}.{part}"] = tensor
            case _:
                tensors[name] = tensor
    return tensors | ({"lm_head.weight": output_rows(target)} if head.options.lm_head == "shared" else {})


def biased(head: DraftHead) -> bool:
    return any(bool(tensor.any()) for name, tensor in own_tensors(head).items() if name.endswith(".linear.bias"))


def whole_tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """The heads' own tensors over the target's whole vocabulary, by their own names; ``token_map`` where it was reduced."""
    if head.options.lm_head == "shared" and getattr(target.output_head, "bias", None) is not None:
        raise UserError(f"{target.name}'s output head has a bias, for which Medusa heads have no place: train lm_head: own.")
    ids = head.target_ids.cpu()
    reduced = len(ids) < target.vocab_size
    found = {name: tensor for name, tensor in own_tensors(head).items() if name.startswith(("blocks.", "lm_heads."))}
    if reduced:
        found = {name: spread(t, ids, target.vocab_size) if "lm_heads" in name else t for name, t in found.items()}
    return found | ({"token_map": ids} if reduced else {})


def output_rows(target: Target) -> Tensor:
    return target.output_head.get_parameter("weight").detach().cpu().clone()


# -- the Medusa repository's directory -------------------------------------------------------------------------------


def reference_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """No ``architectures``: TGI takes such a config for a whole model's. The base model is the merged one, if there is one."""
    shared = {"version": "2"} if head.options.lm_head == "shared" else {}
    return {
        "medusa_num_heads": head.config.depths,
        "medusa_num_layers": head.options.blocks,
        "base_model_name_or_path": TARGET if head.adapts else target.name,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        **shared,
        **dtype_names(target),
        "draftsmith": origin(head, draft_length, True),
    }


def reference_tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """``{i}.{j}.linear.{weight,bias}``, and ``{i}.{blocks}.weight`` where the heads have an lm_head of their own."""
    tensors = {}
    for name, tensor in whole_tensors(head, target).items():
        match name.split("."):
            case ["blocks", *place]:
                tensors[".".join(place)] = tensor
            case ["lm_heads", depth, _]:
                tensors[f"{depth}.{head.options.blocks}.weight"] = tensor
            case _:
                tensors[name] = tensor
    return tensors


def tgi_tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    if head.options.lm_head == "shared" and head.options.blocks > 1:
        raise UserError(
            "TGI shares the target's output head among heads of one residual block alone: train blocks: 1 or lm_head: own."
        )
    return reference_tensors(head, target)


def tensorrt_llm_tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """Every head with an output head: where the target's is shared, the very same tensor (a .pt file holds it once)."""
    tensors = reference_tensors(head, target)
    if head.options.lm_head == "shared":
        rows = output_rows(target)
        tensors |= {f"{depth}.{head.options.blocks}.weight": rows for depth in range(head.config.depths)}
    return tensors


# -- the adapter -----------------------------------------------------------------------------------------------------


def write_adapter(head: DraftHead, target: Target, directory: Path) -> None:
    if head.adapts:
        assert isinstance(head, MedusaHead)
        (directory / ADAPTER).mkdir()
        head.adapter.save(directory / ADAPTER, target)


def write_merged(head: DraftHead, target: Target, directory: Path) -> None:
    """The adapter, and a copy of the target that it is merged into. Takes the target's memory once more."""
    write_adapter(head, target, directory)
    if not head.adapts:
        return
    model = merged(target, directory / ADAPTER)
    check_merged(head, target, Target(model, target.tokenizer, TARGET))
    model.save_pretrained(str(directory / TARGET))
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(str(directory / TARGET))


@torch.no_grad()
def check_merged(head: DraftHead, target: Target, copy: Target) -> None:
    """Raise RuntimeError unless the merged target's states are the adapted one's, but for the rounding of its dtype."""
    ids = torch.arange(min(target.max_positions, target.vocab_size, 32), device=target.device)[None]
    with head.adapted(target):
        adapted = target.features(ids, []).last.float()
    distance = (copy.features(ids, []).last.float() - adapted).norm() / adapted.norm()
    if distance > MERGED[target.dtype]:
        raise RuntimeError(f"the merged target's states are {distance:.1e} away from the adapted one's: please report this")


def read_adapter(directory: Path) -> dict[str, Tensor]:
    """The adapter's tensors by the head's names; none where there is no adapter to attach."""
    if not (directory / ADAPTER).is_dir() or (directory / TARGET).is_dir():
        return {}
    return {f"adapter.{name}": tensor for name, tensor in load_tensors(directory / ADAPTER).items()}


# -- the way back ----------------------------------------------------------------------------------------------------


def rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    """The head of either directory; of a checkpoint of target and heads together its ``medusa_head.`` tensors alone.

    The tensors say how many heads there are: published configs name fewer than their files hold.
    """
    blocks = config.get("medusa_num_layers", config.get("num_hidden_layers", 1))
    own = own_names(tensors, blocks)
    ids = own.pop("token_map", torch.arange(target.vocab_size))
    depths = 1 + max((int(name.split(".")[1]) for name in own if name.startswith("blocks.")), default=-1)
    asked = config.get("medusa_num_heads", config.get("num_heads", depths))
    if not 0 < asked <= depths:
        raise UserError(
            f"the export's config.json asks for {asked} heads and its tensors hold {depths}: export the head again."
        )
    if config.get("model_type") == "medusa" and not config.get("medusa_fc_bias"):
        for name in [name for name in own if name.startswith("blocks.") and name.endswith(".weight")]:
            own.setdefault(name.removesuffix("weight") + "bias", own[name].new_zeros(len(own[name])))
    shared = bool(config.get("original_lm_head")) or config.get("version") == "2"
    lm_heads = {name: own.pop(name) for name in list(own) if name.startswith(("lm_head.", "lm_heads."))}
    if shared:
        check_shared(lm_heads, target)
    else:
        own |= {name: rows[ids] if len(rows) == target.vocab_size else rows for name, rows in lm_heads.items()}
    options: dict[str, Any] = {"blocks": blocks, "lm_head": "shared" if shared or not lm_heads else "own"}
    sizes = adapter_sizes(own)
    if sizes:
        options["lora"] = config["draftsmith"]["lora"]
    layer = {"adapted": sizes} if sizes else {}
    return make_head(MedusaHead, target, ids, own, taps=[], depths=depths, options=options, layer=layer)


def own_names(tensors: dict[str, Tensor], blocks: int) -> dict[str, Tensor]:
    """The tensors by the names of heads of so many residual blocks; UserError for one that has no place there."""
    prefixed = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIXES)}
    known = [str(block) for block in range(blocks)]
    found = {}
    for name, tensor in (prefixed or tensors).items():
        match name.removeprefix(PREFIXES[0]).removeprefix(PREFIXES[1]).split("."):
            case ["blocks", depth, "layers", block, part] | [depth, block, "linear", part] if (
                block in known and depth.isdigit()
            ):
                found[f"blocks.{depth}.{block}.linear.{part}"] = tensor
            case ["lm_heads", depth, "weight"]:
                found[f"lm_heads.{depth}.weight"] = tensor
            case [depth, block, "weight"] if block == str(blocks) and depth.isdigit():
                found[f"lm_heads.{depth}.weight"] = tensor
            case ["token_map"] | ["lm_head", "weight"] | ["adapter", *_]:
                found[name] = tensor
            case _:
                raise UserError(f"the tensor {name!r} has no place in Medusa heads of {blocks} residual blocks each.")
    return found


def check_shared(lm_heads: dict[str, Tensor], target: Target) -> None:
    theirs = output_rows(target)
    for name, rows in lm_heads.items():
        if rows.shape != theirs.shape or not torch.equal(rows, theirs.to(rows.dtype)):
            raise UserError(f"the export's {name} is not the target's output head: it belongs to another target.")


def adapter_sizes(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    """[inputs, outputs] of every module that an adapter among these tensors changes."""
    ends = ("adapter.", ".lora_A.weight", ".lora_B.weight")
    names = [name.removeprefix(ends[0]).removesuffix(ends[1]) for name in tensors if name.endswith(ends[1])]
    return {name: [tensors[ends[0] + name + ends[1]].shape[1], tensors[ends[0] + name + ends[2]].shape[0]] for name in names}


def is_reference(config: dict[str, Any]) -> bool:
    return "medusa_num_heads" in config and config.get("model_type") != "medusa"


def is_vllm(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "medusa"


VLLM = Layout(
    vllm_config, vllm_tensors, rebuild, method="medusa", served=True, tells=is_vllm, beside=write_adapter, also=read_adapter
)
VLLM_MERGED = Layout(vllm_merged_config, vllm_tensors, rebuild, method="medusa", beside=write_merged, also=read_adapter)
TGI = Layout(
    reference_config,
    tgi_tensors,
    rebuild,
    method="medusa",
    tells=is_reference,
    file="medusa_lm_head.safetensors",
    beside=write_merged,
    also=read_adapter,
)
TENSORRT_LLM = Layout(
    reference_config,
    tensorrt_llm_tensors,
    rebuild,
    method="medusa",
    file="medusa_lm_head.pt",
    beside=write_merged,
    also=read_adapter,
)
