"""LoRA on a frozen target: peft's layers around a head's own weights, put into place for a while and taken out again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import UserError, first_line
from ..target import Target

if TYPE_CHECKING:  # peft takes seconds to import, and most heads have no adapter
    from peft import LoraConfig

NAME = "default"  # what peft calls its only adapter
PREFIX = "base_model.model."  # what peft's files put before a module's name
FILE = "adapter_model.safetensors"


class Adapter(nn.Module):
    """The matrices of a low-rank adapter (LoRA, 2106.09685) by the names of the target's modules that it changes:
    y = W x + alpha / rank * B A x, with B zero at first.

    ``sizes`` gives every module's [inputs, outputs]. The tree of names is the target's own, so that the state is named as in
    peft's files: ``model.layers.0.self_attn.q_proj.lora_A.weight`` [rank, inputs] and ``….lora_B.weight`` [outputs, rank].
    """

    def __init__(self, sizes: dict[str, list[int]], rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.sizes, self.rank, self.alpha, self.dropout = sizes, rank, alpha, dropout
        # a target's model and its grafts, which are no parts of this module
        self.attached: tuple[Any, list[tuple[nn.Module, str, Any]]] = (None, [])
        for name, (inputs, outputs) in sizes.items():
            module: nn.Module = self
            for place in name.split("."):
                if place not in module._modules:
                    module.add_module(place, nn.Module())
                module = module.get_submodule(place)
            module.lora_A = nn.Linear(inputs, rank, bias=False)
            module.lora_B = nn.Linear(rank, outputs, bias=False)
            nn.init.zeros_(module.lora_B.weight)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is attached anew: it holds no copy of a target."""
        return self.__dict__ | {"attached": (None, [])}

    @contextmanager
    def on(self, target: Target) -> Iterator[None]:
        """Inside, the target's modules are the adapted ones; outside they are the very same objects as ever."""
        before: list[nn.Module | None] = []
        grafts = self.grafts(target)
        try:
            for parent, name, layer in grafts:
                layer.lora_dropout[NAME].training = self.training
                before.append(parent._modules[name])
                parent._modules[name] = layer
            yield
        finally:
            for (parent, name, _), module in zip(grafts, before, strict=False):
                parent._modules[name] = module

    def grafts(self, target: Target) -> list[tuple[nn.Module, str, Any]]:
        """peft's layers for this target, each with the module that it goes into and its name there; they read the matrices
        that are registered here."""
        if self.attached[0] is not target.model:
            layers, grafts = lora_layers(target, self.config(list(self.sizes))), []
            if linear_sizes(layers) != self.sizes:
                raise UserError(
                    f"{target.name} has not the linear modules that the adapters change: name the head's own target."
                )
            self.check_device(target)
            for name, layer in layers.items():
                own: Any = self.get_submodule(name)
                layer.lora_A[NAME], layer.lora_B[NAME] = own.lora_A, own.lora_B
                parent, _, last = name.rpartition(".")
                grafts.append((target.model.get_submodule(parent), last, layer))
            self.attached = target.model, grafts
        return self.attached[1]

    def check_device(self, target: Target) -> None:
        ours = next(self.parameters()).device
        theirs = {parameter.device for name in self.sizes for parameter in target.model.get_submodule(name).parameters()}
        if theirs != {ours}:
            where = ", ".join(sorted(map(str, theirs)))
            raise UserError(
                f"{target.name} lies on {where} and its adapters on {ours}: load the target on one device, for both."
            )

    def config(self, modules: list[str]) -> "LoraConfig":
        from peft import LoraConfig

        alpha: Any = self.alpha  # peft says int and takes any number
        return LoraConfig(
            r=self.rank, lora_alpha=alpha, lora_dropout=self.dropout, target_modules=modules, task_type="CAUSAL_LM"
        )

    def save(self, directory: Path, target: Target) -> None:
        """Write a directory that peft and the engines load: adapter_config.json and adapter_model.safetensors."""
        config = self.config(list(self.sizes))
        config.target_modules = sorted({name.rpartition(".")[2] for name in self.sizes})  # a list: peft's sets have no order
        config.base_model_name_or_path, config.inference_mode = target.name, True
        config.save_pretrained(str(directory))
        tensors = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, directory / FILE, metadata={"format": "pt"})


def sizes(target: Target, rank: int, modules: Sequence[str] | str) -> dict[str, list[int]]:
    """[inputs, outputs] of the target's linear modules whose names end in one of ``modules``, or of all but the output head
    ("all-linear"), by name. UserError where there is none, or one that is not linear or tied."""
    from peft import LoraConfig

    names = modules if isinstance(modules, str) else list(modules)
    layers = lora_layers(target, LoraConfig(r=rank, target_modules=names))
    for name, layer in layers.items():
        if not isinstance(layer.base_layer, nn.Linear | Conv1D):
            raise UserError(
                f"{name} of {target.name} is no linear module: name others in head.options.lora.modules, such as those of "
                "the attention."
            )
        if layer.base_layer.weight is target.embed.get_parameter("weight"):
            raise UserError(
                f"{target.name} ties {name} to its embedding, which an adapter would pull apart: "
                "leave it out of head.options.lora.modules."
            )
    return linear_sizes(layers)


def linear_sizes(layers: dict[str, Any]) -> dict[str, list[int]]:
    """[inputs, outputs] of peft's layers, by name."""
    return {name: [layer.in_features, layer.out_features] for name, layer in layers.items()}


def lora_layers(target: Target, config: "LoraConfig") -> dict[str, Any]:
    """peft's layers around the target's modules that ``config`` names, by name, their matrices still empty.

    peft puts them into the model; they are taken out again, so that the target is left as it was.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = target.model
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise UserError(f"{target.name} carries adapters already: merge them into it (peft's merge_and_unload) and save it.")
    try:
        inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UserError(
            f"adapters do not fit {target.name} ({first_line(error)}): "
            "name its linear modules in head.options.lora.modules, or write all-linear."
        ) from error
    finally:
        found = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        made: dict[str, Any] = {name: layer for name, layer in found.items() if not name.endswith(".base_layer")}
        for name, layer in made.items():
            place(model, name, layer.get_base_layer())
        model.__dict__.pop("peft_config", None)
    return made


def place(model: nn.Module, name: str, module: nn.Module) -> None:
    """Make ``module`` the model's submodule of a dotted name."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def load_tensors(directory: Path) -> dict[str, Tensor]:
    """The tensors of a peft adapter's directory by the names of ``Adapter``'s state."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in load_file(directory / FILE).items()}


@torch.no_grad()
def merged(target: Target, adapter: Path) -> Any:
    """A copy of the target's model with the adapter of a peft directory added to its weights, in the target's dtype."""
    from peft import PeftModel

    return PeftModel.from_pretrained(deepcopy(target.model), str(adapter)).merge_and_unload()
