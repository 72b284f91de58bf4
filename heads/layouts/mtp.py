"""How MTP modules are stored: in the target's own checkpoint, where engines look for them, and in the speculators format,
which no engine of this release serves."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import weights
from ...errors import UserError
from ...target import Target
from .. import checkpoint
from ..base import DraftHead
from ..mtp import MtpHead, MtpOptions, build
from ..mtp_forms import FORMS, find, to_ours, to_theirs
from ..mtp_forms import SPECULATORS as NAMES
from .layout import Layout, dtype_names, make_head, own_tensors, provenance, speculators_block

LENGTH = 3  # depths of a module that comes without word of how it was trained
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # what configs call the number of a module's layers
# form -> the hidden state that an engine feeds it, and for which families
Fed = Mapping[str, tuple[str, tuple[str, ...]]]

QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
FED_BY_VLLM: Fed = {
    "mimo": ("pre_norm", ("qwen2", "mimo")),
    "qwen": ("post_norm", QWEN),
    "deepseek": ("post_norm", ("deepseek_v3",)),
}
FED_BY_SGLANG: Fed = FED_BY_VLLM | {"mimo": ("post_norm", ("qwen2", "mimo"))}
FED_BY_TRANSFORMERS: Fed = {"qwen": ("post_norm", ("mellum",))}


# -- in the target's checkpoint --------------------------------------------------------------------------------


def config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """The target's own, as it is where it ships a module; otherwise with the number of layers that makes engines look for one.

    A Qwen2 model with MiMo's module is what engines call a MiMo model.
    """
    directory = weights.directory_of(target.name)
    found = checkpoint.read_config(directory)
    if find(weights.places(directory), target.depth) is None:
        text = found.get("text_config", found)
        text[COUNTS["qwen3_5" in target.config.model_type]] = 1
        if head.options.form == "mimo":
            found["architectures"] = ["MiMoForCausalLM"]
    elif counted(found) not in (None, 1):
        raise UserError(f"{directory / 'config.json'} counts {counted(found)} layers in its module, which has one: correct it.")
    return found


def counted(config: dict[str, Any]) -> int | None:
    text = config.get("text_config", config)
    return next((text[name] for name in COUNTS if text.get(name) is not None), None)


def tensors(head: DraftHead, target: Target, engine: str, fed: Fed) -> dict[str, Tensor]:
    """The module's tensors under the checkpoint's names, each in the dtype that the checkpoint has it in.

    Raises UserError for a head whose form, hidden state or target's family the engine does not serve.
    """
    form, family = head.options.form, target.config.model_type
    hidden, families = fed.get(form, ("", ()))
    own = "pre_norm" if head.options.pre_norm else "post_norm"
    if family not in families:
        raise UserError(
            f"{engine} loads no module of form {form} for a {family} target: export a head of form qwen to "
            "speculators, or train an eagle3 head."
        )
    if own != hidden:
        raise UserError(f"{engine} feeds a {form} module the {hidden} state, and this head reads {own}: train with {hidden}.")
    directory = weights.directory_of(target.name)
    found = find(weights.places(directory), target.depth)
    if found not in (None, form):
        raise UserError(f"{directory} carries a {found} module, whose place no {form} one can take: train one of form {found}.")
    return checkpoint.as_stored(directory, to_theirs(head, FORMS[form], target.depth), target.dtype)


def rounded(head: DraftHead, target: Target, engine: str, fed: Fed) -> DraftHead:
    """The head in the numbers that the checkpoint can hold; RuntimeError where one moves further than rounding moves it."""
    stored = tensors(head, target, engine, fed)
    found = rebuild(config(head, target, 1), stored, target, fed, head.config.depths)
    coarsest = max(torch.finfo(tensor.dtype).eps for tensor in stored.values())
    state = head.state_dict()
    for name, tensor in found.state_dict().items():
        if not torch.allclose(tensor, state[name], rtol=coarsest, atol=coarsest**2):
            raise RuntimeError(f"the mtp head's {name} does not read back as it was written: please report this")
    return found


def beside(head: DraftHead, target: Target, out: Path, engine: str, fed: Fed) -> None:
    """The rest of the target's checkpoint around the module, and a note of where the module comes from."""
    checkpoint.write_copy(weights.directory_of(target.name), out, tensors(head, target, engine, fed))
    note = provenance(head, head.config.depths)
    (out / "draftsmith.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def also(directory: Path) -> dict[str, Tensor]:
    """The tensors of the module that a target's directory carries."""
    found = checkpoint.read_config(directory)
    depth, names = found.get("text_config", found)["num_hidden_layers"], weights.places(directory)
    form = find(names, depth)
    if form is None:
        raise UserError(f"{directory} carries no module: name the directory of a target that does.")
    return weights.read(directory, FORMS[form].own(names, depth))


def rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target, fed: Fed, depths: int = LENGTH) -> DraftHead:
    form = find(tensors, target.depth)
    if form is None:
        raise UserError(f"there is no module behind the {target.depth} layers of {target.name}: it belongs to another target.")
    hidden = fed[form][0] if form in fed else None
    options = MtpOptions.model_validate({"form": form, "hidden": hidden})
    layer = MtpHead.layer_config(target, options)
    return make(target, to_ours(tensors, build(layer), FORMS[form], target.depth), options, layer, depths)


def make(target: Target, tensors: dict[str, Tensor], options: MtpOptions, layer: dict[str, Any], depths: int) -> DraftHead:
    taps = [target.depth] if options.pre_norm else []
    ids = torch.arange(target.vocab_size)
    return make_head(MtpHead, target, ids, tensors, taps=taps, depths=depths, options=options.model_dump(), layer=layer)


def native(engine: str, fed: Fed, served: bool = False) -> Layout:
    return Layout(
        config,
        partial(tensors, engine=engine, fed=fed),
        partial(rebuild, fed=fed),
        method="mtp",
        served=served,
        tells=lambda config: bool(counted(config)) and "speculators_model_type" not in config,
        file=None,
        beside=partial(beside, engine=engine, fed=fed),
        also=also,
        rounded=partial(rounded, engine=engine, fed=fed),
    )


# -- in the speculators format ---------------------------------------------------------------------------------


def speculators_config(head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    return {
        "architectures": ["MTPDraftModel"],
        **speculators_block("mtp", head, target, draft_length),
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": json.loads(target.config.to_json_string(use_diff=False)),
        "tie_word_embeddings": False,
        **dtype_names(target),
        "draftsmith": provenance(head, draft_length),
    }


def speculators_tensors(head: DraftHead, target: Target) -> dict[str, Tensor]:
    """``mtp_layers.0.*``: three norms and the projection beside the layer's own tensors, experts fused."""
    if head.options.form != "qwen" or head.options.pre_norm:
        raise UserError(
            "the speculators format joins the embedding before the post_norm state, as form qwen does, and this head is of "
            f"form {head.options.form}: train one of form qwen."
        )
    return {NAMES.prefix + places(name): tensor for name, tensor in own_tensors(head).items()}


def places(name: str) -> str:
    """What the format calls one of the head's tensors, behind its prefix."""
    name = name.removeprefix("decoder.")
    if name.startswith("layers.0."):
        return name.removeprefix("layers.0.")
    module, _, part = name.rpartition(".")
    return f"{NAMES.names[module]}.{part}"


def speculators_rebuild(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> DraftHead:
    if config["num_nextn_predict_layers"] != 1:
        raise UserError("the export has several prediction layers, and draftsmith reads one for all depths.")
    options = MtpOptions()
    layer = MtpHead.layer_config(target, options)
    back = {theirs: ours for ours, theirs in NAMES.names.items()}
    own = {}
    for name, tensor in tensors.items():
        module, _, part = name.removeprefix(NAMES.prefix).rpartition(".")
        ours = back.get(module, f"layers.0.{module}")
        own[("decoder." if ours.startswith(("layers.", "norm")) else "") + f"{ours}.{part}"] = tensor
    depths = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    return make(target, own, options, layer, depths)


VLLM = native("vLLM", FED_BY_VLLM, served=True)
SGLANG = native("SGLang", FED_BY_SGLANG)
TRANSFORMERS = native("transformers", FED_BY_TRANSFORMERS, served=True)
IN_SPECULATORS = Layout(
    speculators_config,
    speculators_tensors,
    speculators_rebuild,
    method="mtp",
    tells=lambda config: config.get("speculators_model_type") == "mtp",
)
