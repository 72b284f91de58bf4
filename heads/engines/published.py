"""A checkpoint directory that others published, read as a head: for evaluation, or as a start for training."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead
from .registry import ENGINES
from .registry import read_tensors as read_file


def import_head(directory: str | Path, target: Target, kind: str | None = None) -> DraftHead:
    """The head of a published checkpoint, in evaluation mode, as one of ``target``'s.

    The layout is told by config.json; ``kind`` names the head kind where that does not tell it. Names and shapes are
    checked by the layout's rules. Raises UserError for an unknown layout and for every mismatch, naming it.
    """
    directory = Path(directory)
    config = read_json(directory / "config.json")
    told = [
        (engine, name)
        for engine, each in ENGINES.items()
        for name, layout in each.layouts.items()
        if (kind is None or kind == name) and layout.tells(config)
    ]
    told = told or [(engine, kind) for engine, each in ENGINES.items() if kind in each.layouts]
    if not told:
        kinds = sorted({name for engine in ENGINES.values() for name in engine.layouts})
        said = f"architectures {config.get('architectures')}, model_type {config.get('model_type')!r}"
        raise UserError(
            f"{directory / 'config.json'} ({said}) tells no layout{f' of {kind} heads' if kind else ''} that draftsmith "
            f"reads: name one of {', '.join(kinds)} with --kind."
        )
    engine, name = told[0]
    layout = ENGINES[engine].layouts[name]
    beside = layout.also(directory) if layout.also else {}
    try:
        return layout.rebuild(config, (read_tensors(directory) if layout.file else {}) | beside, target)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{directory} looks like a {name} head for {engine}, but its config.json lacks or misstates a key ({error!r})."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): name a checkpoint's directory.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is no model's config: name a checkpoint's directory.")
    return found


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """The tensors of all *.safetensors, else of all *.bin and *.pt files (weights alone: no code is run)."""
    files = sorted(directory.glob("*.safetensors")) or sorted([*directory.glob("*.bin"), *directory.glob("*.pt")])
    if not files:
        raise UserError(f"{directory} holds no *.safetensors, *.bin or *.pt file: name a checkpoint's directory.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= read_file(file)
    return tensors
