"""A copy of a target's checkpoint in which some tensors are others."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import UserError
from ..weights import INDEX, WHOLE, places, read

ADDED = "model-mtp.safetensors"  # what a sharded checkpoint gets for tensors that it did not have


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


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
