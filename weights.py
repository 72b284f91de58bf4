"""The files of a checkpoint: which tensor lies where, and reading some of them."""

import json
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import UserError, first_line
from .fetch import located

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
UNREAD = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*/*"]


def directory_of(name: str) -> Path:
    """The directory of the model ``name`` on this machine; UserError where it has no safetensors."""
    path, where = located(name)
    if "gguf_file" in where:
        raise UserError(f"{name} is a GGUF file, whose tensors are not those of training: name the original checkpoint.")
    directory = Path(path)
    if not directory.is_dir():
        try:
            directory = Path(snapshot_download(path, ignore_patterns=UNREAD, local_files_only=where["local_files_only"]))
        except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
            raise UserError(f"the files of {name} cannot be found ({first_line(error)}): name its directory.") from error
    if not (directory / WHOLE).is_file() and not (directory / INDEX).is_file():
        raise UserError(f"{directory} has neither {WHOLE} nor {INDEX}: save the target as safetensors.")
    return directory


def places(directory: Path) -> dict[str, str]:
    """The file of every tensor, by the tensor's name. Raises UserError where what tells it is damaged."""
    whole = (directory / WHOLE).is_file()
    try:
        if whole:
            with safe_open(directory / WHOLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), WHOLE)
        return dict(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        damaged = directory / (WHOLE if whole else INDEX)
        raise UserError(f"{damaged} is damaged ({first_line(error)}): fetch the checkpoint again.") from error


def read(directory: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """The named tensors, on the CPU and in their own dtype; nothing else of the files is read. Raises UserError."""
    where, tensors = places(directory), {}
    for name in names:
        try:
            with safe_open(directory / where[name], framework="pt") as file:
                tensors[name] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{directory / where[name]} cannot be read ({first_line(error)}): fetch it again.") from error
    return tensors
