"""What went into a measurement: all that its numbers depend on, as one document, and the digest it is kept under."""

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from ..data.manifest import UNSEEN, StoredTarget, own_version
from ..heads.base import DraftHead
from ..target import Target
from .prompts import Prompt
from .registry import read_lookup

MEASURING = 2  # rises when what is measured, or what an entry of the results holds, changes


def digest(made_from: Any) -> str:
    """The name of a document, 24 hex digits."""
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:24]


def of_target(target: Target) -> dict[str, Any]:
    """Config, tokenizer, template, weights and how they are run; not where they lie.

    The weights' digest reads numbers from all over every tensor as loaded. Weights that stay on the disk until they are used
    are not read: such a target goes by its name.
    """
    stored = StoredTarget.of(target).model_dump()
    return {
        **stored,
        "name": target.name if stored["weights"] == UNSEEN else None,
        "ends": sorted(target.eos_ids),
        "attention": target.config._attn_implementation,
        "placed": {str(module): str(device) for module, device in getattr(target.model, "hf_device_map", {}).items()},
    }


def of_head(head: DraftHead) -> dict[str, Any]:
    """Config and every number of the weights; not where they lie, nor what they were trained on and from."""
    sha = hashlib.sha256()
    for name, tensor in sorted(head.tensors().items()):
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return {
        "config": head.config.model_dump(mode="json", exclude={"target": {"name"}, "options": {"model"}}),
        "weights": sha.hexdigest(),
    }


def of_lookup(text: str) -> dict[str, Any]:
    """A look-up's settings as they were given, and what the defaults make of them."""
    proposer = read_lookup(text)
    return {"settings": text, "draft": proposer and proposer.described()}


def of_prompts(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What is asked, in order, as it was read: a file's name says nothing, a task's template is in its prompts."""
    return {"count": len(prompts), "content": digest([asdict(prompt) for prompt in prompts])}


def of_machine(target: Target) -> dict[str, Any]:
    """What speed depends on, and the rounding too."""
    device = target.device
    return {
        "machine": platform.node(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "versions": {
            "draftsmith": own_version(),
            "measuring": MEASURING,
            **{name: version(name) for name in ("torch", "transformers")},
        },
    }
