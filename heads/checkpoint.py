"""The files of a target's checkpoint: which tensor lies where, reading some, and a copy in which some are others."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import UserError, first_line
from ..fetch import located
from ..target import Target

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADDED = "model-mtp.safetensors"  # what a sharded checkpoint gets for tensors that it did not have
UNREAD = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*/*"]


def directory_of(target: Target) -> Path:
    """The directory that the target was loaded from, on this machine; UserError where it has no safetensors."""
    path, where = located(target.name)
    if "gguf_file" in where:
        raise UserError(f"{target.name} is a GGUF file, whose tensors are not those of training: name the original checkpoint.")
    directory = Path(path)
    if not directory.is_dir():
        try:
            directory = Path(snapshot_download(path, ignore_patterns=UNREAD, local_files_only=where["local_files_only"]))
        except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
            raise UserError(f"the files of {target.name} cannot be found ({first_line(error)}): name its directory.") from error
    if not (directory / WHOLE).is_file() and not (directory / INDEX).is_file():
        raise UserError(f"{directory} has neither {WHOLE} nor {INDEX}: save the target as safetensors.")
    return directory


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def places(directory: Path) -> dict[str, str]:
    """The file of every tensor, by the tensor's name."""
    if (directory / WHOLE).is_file():
        with safe_open(directory / WHOLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), WHOLE)
    return json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]


def read(directory: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """The named tensors, on the CPU and in their own dtype."""
    where, tensors = places(directory), {}
    for name in names:
        with safe_open(directory / where[name], framework="pt") as file:
            tensors[name] = file.get_tensor(name)
    return tensors


def write_copy(source: Path, out: Path, tensors: dict[str, Tensor]) -> None:
    """Write the files of ``source`` but its config.json into the directory ``out``, with ``tensors`` in place of its own.

    A tensor that ``source`` has keeps its file; others join the one file, or get one of their own where there are several.
    """
    where = places(source)
    added = WHOLE if (source / WHOLE).is_file() else ADDED
    changed: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        changed.setdefault(where.get(name, added), {})[name] = tensor
    for file in source.iterdir():
        if file.is_file() and file.name not in {"config.json", *changed}:
            shutil.copyfile(file, out / file.name)
    for name, new in changed.items():
        held = load_file(source / name) if (source / name).is_file() else {}
        save_file(held | new, out / name, metadata=metadata(source / name))
    if added == ADDED and ADDED in changed:
        index = json.loads((source / INDEX).read_text(encoding="utf-8"))
        index["weight_map"] |= dict.fromkeys(changed[ADDED], ADDED)
        sizes = [tensor.numel() * tensor.element_size() for tensor in changed[ADDED].values()]
        if "total_size" in index.get("metadata", {}):
            index["metadata"]["total_size"] += sum(sizes)
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def metadata(file: Path) -> dict[str, str]:
    """What a file says of itself; what a new one must say for transformers to read it."""
    if not file.is_file():
        return {"format": "pt"}
    with safe_open(file, framework="pt") as opened:
        return opened.metadata() or {"format": "pt"}


def as_stored(directory: Path, tensors: dict[str, Tensor], otherwise: torch.dtype) -> dict[str, Tensor]:
    """``tensors`` in the dtype that the checkpoint has each in; in ``otherwise`` where it has none of that name."""
    held = read(directory, places(directory).keys() & tensors.keys())
    for name, own in held.items():
        if own.shape != tensors[name].shape:
            raise UserError(f"{directory} holds {name!r} as {list(own.shape)}, and the head's is {list(tensors[name].shape)}.")
    return {name: tensor.to(held[name].dtype if name in held else otherwise) for name, tensor in tensors.items()}
