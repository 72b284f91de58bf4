"""A target's two ends without its middle: embedding, final norm and output head, the rest of the model being shapes alone.

For training on hidden states that come from elsewhere: the layers, which are all but a few tensors of a checkpoint, are never
read, wherever its files keep them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from .errors import UserError, first_line
from .fetch import load_tokenizer, located
from .target import DTYPES, MAPS, UNREADABLE, Target
from .weights import directory_of, places, read

STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Ends(Target):
    """A target that embeds, norms and reads out as the whole one does, by the model's own modules; asked to run its layers it
    raises UserError. Fingerprint, sizes and end tokens are those of the whole target.
    """

    directory: Path
    stored: dict[str, str]  # the checkpoint's name of every tensor that the model takes as it is stored

    @classmethod
    def load(cls, name: str, dtype: str = "auto", device: Any = None) -> Self:
        """As ``Target.load``, on one device; ``name`` must have safetensors files. Raises UserError where a tensor is missing
        there, damaged or quantized.
        """
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype!r} is none that a target has: choose {', '.join(DTYPES)}.")
        directory = directory_of(name)
        path, where = located(name)
        try:
            tokenizer = load_tokenizer(path, **where)
            config = AutoConfig.from_pretrained(path, **where)
            chosen = stored_dtype(directory, config) if dtype == "auto" else getattr(torch, dtype)
            with init_empty_weights():
                model = AutoModelForCausalLM.from_config(config, dtype=chosen)
        except UNREADABLE as error:
            raise UserError(
                f"target {name!r} cannot be read ({first_line(error)}): give a model directory or a hub id with safetensors."
            ) from error
        model.generation_config = generation_config(path, where["local_files_only"]) or model.generation_config
        ends = cls(model, tokenizer, name)
        ends.fill(directory, torch.device("cpu" if device in (None, *MAPS) else device))
        return ends

    def fill(self, directory: Path, device: torch.device) -> None:
        """Read the ends from the checkpoint onto the device."""
        self.directory, self.stored = directory, stored_names(self.model, directory)
        inside = {id(module) for module in self.decoder.modules()}
        ends = {id(module) for end in (self.embed, self.final_norm) if end for module in end.modules()}
        kept = {name: m for name, m in self.model.named_modules() if id(m) in ends or id(m) not in inside}
        wanted = [join(at, name) for at, module in kept.items() for name, _ in module.named_parameters(recurse=False)]
        found = self.read([name for name in wanted if name in self.stored])
        missing = set(wanted) - found.keys()
        for name, tensor in found.items():
            parent, _, last = name.rpartition(".")
            setattr(self.model.get_submodule(parent), last, nn.Parameter(tensor.to(device), requires_grad=False))
        self.model.tie_weights(missing_keys=missing, recompute_mapping=False)
        if missing:
            raise UserError(f"{directory} has no tensor {min(missing)!r}: name the target's whole checkpoint.")
        for module in kept.values():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
        self.device = device

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors that the model has under these names, from the checkpoint, in the model's dtypes, on the CPU."""
        chosen, shapes = list(names), self.model.state_dict()
        held = read(self.directory, [self.stored[name] for name in chosen])
        tensors = {name: held[self.stored[name]] for name in chosen}
        for name, tensor in tensors.items():
            if tensor.shape != shapes[name].shape or tensor.dtype.itemsize < 2:
                is_stored = f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
                raise UserError(
                    f"{self.directory} stores {self.stored[name]!r} as {is_stored}, and the model has it as "
                    f"{list(shapes[name].shape)}: name a checkpoint that does not quantize it."
                )
        return {name: tensor.to(shapes[name].dtype) for name, tensor in tensors.items()}

    def weights_of(self, module: nn.Module, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        at = next(at for at, own in self.model.named_modules() if own is module)
        here = self.model.state_dict()
        chosen = [name for name in module.state_dict() if names is None or name in set(names)]
        apart = [join(at, name) for name in chosen if here[join(at, name)].is_meta]
        odd = [name for name in apart if name not in self.stored]
        if odd:
            raise UserError(f"{self.directory} keeps {odd[0]!r} together with others: start the head without target weights.")
        fresh = self.read(apart)
        return {name: fresh[join(at, name)] if join(at, name) in fresh else here[join(at, name)] for name in chosen}

    def _find_final_norm(self) -> nn.Module | None:
        """As the whole target's, in a forward of zeros in which every layer passes on what it reads."""
        self.device = torch.device("cpu")
        for passed_on in (lambda states, *_, **__: states, lambda states, *_, **__: (states,)):  # as the model's layers answer
            try:
                with self._passing(passed_on):
                    return super()._find_final_norm()
            except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
                continue
        raise UserError(f"the final norm of {self.name!r} is not found without its layers: take data.engine out.")

    @contextmanager
    def _passing(self, passed_on: Any) -> Iterator[None]:
        """Inside, the layers are ``passed_on``, and what is outside them holds zeros, which take no memory until read."""
        layers = {id(module) for module in self.layers.modules()}
        outside = [module for module in self.decoder.modules() if id(module) not in layers]
        shapes = [(own, name, shape) for own in outside for name, shape in own.named_parameters(recurse=False)]
        for own, name, shape in shapes:
            own._parameters[name] = nn.Parameter(torch.zeros_like(shape, device="cpu"), requires_grad=False)
        for layer in self.layers:
            layer.forward = passed_on
        try:
            yield
        finally:
            for own, name, shape in shapes:
                own._parameters[name] = shape
            for layer in self.layers:
                del layer.forward

    def keeps_packed_apart(self) -> bool:
        """True: where the layers run, each sequence runs alone."""
        return True

    @contextmanager
    def _watch(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        raise UserError(
            f"{self.name!r} is here without its layers, which the engine of data.engine runs, and this asks for them: start "
            "the head at random (head.options.init_layer or head.options.init), or take data.engine out."
        )
        yield {}


def join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def stored_names(model: Any, directory: Path) -> dict[str, str]:
    """The checkpoint's names of the model's tensors, by the library's own rules; without those that it makes of several."""
    rules, shapes = get_model_conversion_mapping(model), model.state_dict()
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    found = {}
    for key in sorted(places(directory)):
        name, made = rename_source_key(key, renamings, converters, model.base_model_prefix, shapes)
        if name in shapes and made is None:
            found[name] = key
    return found


def stored_dtype(directory: Path, config: Any) -> torch.dtype:
    """The dtype of a checkpoint: its config's, or that of its first floating tensor."""
    if getattr(config, "dtype", None):
        return config.dtype
    for key, file in sorted(places(directory).items()):
        with safe_open(directory / file, framework="pt") as opened:
            name = opened.get_slice(key).get_dtype()
        if name in STORED:
            return STORED[name]
    return torch.float32


def generation_config(path: str, local_files_only: bool) -> GenerationConfig | None:
    """What a model says of how it is sampled; None where it says nothing."""
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=local_files_only)
    except UNREADABLE:
        return None
