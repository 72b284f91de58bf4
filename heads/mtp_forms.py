"""The forms in which published targets carry a multi-token-prediction module: what it joins, and what its tensors are called.

Names were read in the loaders of vLLM 0.32 (qwen3_next_mtp.py, deepseek_mtp.py, mimo_mtp.py) and transformers 5.24
(modeling_layers.py). Below its norms a module is one decoder layer of the target's family, under the family's own names.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..errors import UserError, first_line

COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's own tensors, in some modules
JOINING = ("input_proj", "token_norm", "hidden_norm")  # the parts in front of the layer, as the head calls them


@dataclass(frozen=True)
class Form:
    """``prefix`` of all its tensors, with the number of the target's layers as ``{depth}``; ``names``: ours, theirs.
    ``layer`` stands before the decoder layer's tensors.

    ``hidden_first``: the joined states begin with the hidden one. ``blank_first``: the token after a text's first is hidden
    from its row, by the engines that serve the form. ``pre_norm``: whether they feed the state before the final norm.
    """

    prefix: str
    names: dict[str, str]
    layer: str
    hidden_first: bool = False
    blank_first: bool = False
    pre_norm: bool = False

    def own(self, names: Iterable[str], depth: int) -> list[str]:
        """Those of a checkpoint's tensor names that belong to a module of this form."""
        prefix = self.prefix.format(depth=depth)
        return [name for name in names if name.startswith(prefix) and name.removeprefix(prefix) not in COPIES]


def named(*theirs: str) -> dict[str, str]:
    return dict(zip((*JOINING, "norm"), theirs, strict=True))


FORMS = {
    "qwen": Form("mtp.", named("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "layers.0."),
    "deepseek": Form(
        "model.layers.{depth}.", named("eh_proj", "enorm", "hnorm", "shared_head.norm"), layer="", blank_first=True
    ),
    "mimo": Form(
        "model.mtp_layers.0.",
        named("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
        layer="",
        hidden_first=True,
        blank_first=True,
        pre_norm=True,
    ),
}
SPECULATORS = Form("mtp_layers.0.", FORMS["mimo"].names, layer="")  # of the speculators format; the rest is as in "qwen"
FURTHER = ("mtp.layers.1.", "model.layers.{further}.eh_proj.", "model.mtp_layers.1.")  # tensors of a second layer


def find(names: Iterable[str], depth: int) -> str | None:
    """The form of the module that a checkpoint of these tensor names has; None where it has none.

    Raises UserError for a module of several layers, one per depth.
    """
    names = set(names)
    further = tuple(prefix.format(further=depth + 1) for prefix in FURTHER)
    if any(name.startswith(further) for name in names):
        raise UserError(
            "the target's module has a layer for each depth, and draftsmith trains one layer for all: "
            "set head.options.init to target, or train an eagle3 head."
        )
    joined = {form: each.prefix.format(depth=depth) + each.names["input_proj"] + ".weight" for form, each in FORMS.items()}
    return next((form for form, name in joined.items() if name in names), None)


def to_theirs(head: Any, form: Form, depth: int) -> dict[str, Tensor]:
    """The head's tensors under a form's names, on the CPU; those of experts one by one, as checkpoints have them."""
    decoder = {name: tensor.detach().cpu() for name, tensor in head.decoder.state_dict().items()}
    found = {}
    for name, tensor in revert_weight_conversion(head.decoder, decoder).items():
        in_layer = name.startswith("layers.0.")
        found[name.replace("layers.0.", form.layer, 1) if in_layer else name.replace("norm", form.names["norm"], 1)] = tensor
    for part in JOINING:
        for name, tensor in head.get_submodule(part).state_dict().items():
            found[f"{form.names[part]}.{name}"] = tensor.detach().cpu()
    return {form.prefix.format(depth=depth) + name: tensor.contiguous() for name, tensor in found.items()}


def to_ours(tensors: dict[str, Tensor], decoder: PreTrainedModel, form: Form, depth: int) -> dict[str, Tensor]:
    """A module's tensors under the head's names in float32; ``decoder`` is a one-layer decoder of the target's family.

    Raises UserError for a tensor that is missing, has no place, is quantized or has another shape.
    """
    back = {theirs: ours for ours, theirs in form.names.items()}
    layer, found = {}, {}
    for name in form.own(tensors, depth):
        tensor, local = tensors[name], name.removeprefix(form.prefix.format(depth=depth))
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise UserError(f"the module's tensor {name!r} is {tensor.dtype}: name the target's unquantized checkpoint.")
        module, _, part = local.rpartition(".")
        place = f"{back[module]}.{part}" if module in back else "layers.0." + local.removeprefix(form.layer)
        (found if back.get(module) in JOINING else layer)[place] = tensor
    return {name: tensor.float() for name, tensor in found.items()} | {
        f"decoder.{name}": tensor for name, tensor in loaded(decoder, layer).items()
    }


def loaded(decoder: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of such a decoder with these tensors of a checkpoint, converted by the library's own rules."""
    held = tensors | {"embed_tokens.weight": torch.zeros(1, decoder.config.hidden_size)}  # which the decoder goes without
    how: Any = {"config": decoder.config, "state_dict": held, "dtype": torch.float32, "output_loading_info": True}
    try:
        filled, report = type(decoder).from_pretrained(None, **how)  # type: ignore[misc] (a pair, with loading info)
    except RuntimeError as error:
        raise UserError(f"the module does not fit the target's own layers ({first_line(error)}).") from error
    missing = sorted(report["missing_keys"])
    odd = missing or sorted(report["unexpected_keys"]) or sorted(map(str, report["mismatched_keys"]))
    if odd:
        what = "lacks" if missing else "has, against the target's own layers,"
        raise UserError(
            f"the module {what} the tensor {odd[0].removeprefix('layers.0.')!r}: name the target's whole checkpoint."
        )
    return {name: tensor for name, tensor in filled.state_dict().items() if "embed_tokens" not in name}
