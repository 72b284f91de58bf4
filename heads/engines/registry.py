"""The engines, one line each, and the one way a head is written for one: beside, read back, compared, renamed into place."""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...console import note
from ...errors import UserError, first_line
from ...outputs import new_directory
from ...target import Target
from ..base import DraftHead, check_target
from ..layouts.layout import Layout
from . import apple, fms, hydra, llamacpp, sglang, speculators, tensorrt_llm, tensorrt_llm_legacy, tgi, transformers, vllm
from .engine import Engine

ENGINES: dict[str, Engine] = {
    "vllm": vllm.ENGINE,
    "speculators": speculators.ENGINE,
    "vllm-merged": vllm.MERGED,
    "sglang": sglang.ENGINE,
    "llamacpp": llamacpp.ENGINE,
    "tensorrt-llm": tensorrt_llm.ENGINE,
    "apple": apple.ENGINE,
    "tensorrt-llm-legacy": tensorrt_llm_legacy.ENGINE,
    "hydra": hydra.ENGINE,
    "fms": fms.ENGINE,
    "tgi": tgi.ENGINE,
    "transformers": transformers.ENGINE,
}

BROKEN = (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError)


def exports(kind: str) -> list[str]:
    """The engines that have a layout for heads of this kind."""
    return [name for name, engine in ENGINES.items() if kind in engine.layouts]


def served(kind: str) -> list[str]:
    """The engines in which scripts/serving_parity.py or a test loads heads of this kind."""
    return [name for name, engine in ENGINES.items() if kind in engine.layouts and engine.layouts[kind].served]


def export(head: DraftHead, target: Target, engine: str, out: str | Path, draft_length: int, force: bool = False) -> Path:
    """Write ``head`` for ``engine`` into the new directory ``out`` and return it.

    ``draft_length`` is the chain that the engine shall draft. The directory is read back by the layout's own rules and its
    logits compared with the head's before it gets its name; an interrupted export leaves nothing under that name.
    Raises UserError for an engine without a layout for this kind, another target, a broken head or an existing ``out``.
    """
    out = Path(out)
    layout = find_layout(head.kind, engine)
    check_target(head.config, target)
    check_length(head, draft_length)
    if engine.startswith("vllm") or engine == "speculators":
        check_path(out, layout.method)
    head = head.merged().to(target.device)
    tensors = layout.tensors(head, target)
    check_finite(tensors)
    if layout.rounded:
        head = layout.rounded(head, target)
    with new_directory(out, force) as partial:
        (partial / "config.json").write_text(json.dumps(layout.config(head, target, draft_length), indent=2) + "\n")
        if layout.file:
            write_tensors(tensors, partial / layout.file)
        if layout.beside:
            layout.beside(head, target, partial)
        again = read(engine, head.kind, partial, target)
        compare(head, again, target)
    if head.confidence is not None and again.confidence is None:
        note(f"left out: the confidence estimate, which {engine} does not read of such {head.kind} heads")
    return out


def read(engine: str, kind: str, directory: str | Path, target: Target) -> DraftHead:
    """The head that an exported directory holds, by the layout's rules; UserError where it breaks them."""
    layout = find_layout(kind, engine)
    config, tensors = read_files(Path(directory), layout.file)
    beside = layout.also(Path(directory)) if layout.also else {}
    try:
        return layout.rebuild(config, tensors | beside, target)
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{directory} is no {engine} directory of an {kind} head ({error!r}): export the head again."
        ) from error


def read_files(directory: Path, file: str | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for name in filter(None, ("config.json", file)):
        if not (directory / name).is_file():
            raise UserError(f"{directory} has no {name}: it is no whole export.")
    config = json.loads((directory / "config.json").read_text())
    return config, read_tensors(directory / file) if file else {}


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file of the kind that its name tells: safetensors or, as .pt, torch's own."""
    if path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        save_file(tensors, path, metadata={"format": "pt"})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or of torch's own kind (the weights alone: no code is run)."""
    try:
        is_safe = path.suffix == ".safetensors"
        found = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except BROKEN as error:
        raise UserError(f"{path} cannot be read as tensors ({first_line(error)}): fetch it again.") from error
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def find_layout(kind: str, engine: str) -> Layout:
    if engine not in ENGINES:
        raise UserError(f"{engine!r} is no engine that draftsmith writes for: choose from {', '.join(ENGINES)}.")
    if kind not in ENGINES[engine].layouts:
        why = ENGINES[engine].others
        raise UserError(f"a {kind} head cannot be written for {engine} ({why}): export it to {' or '.join(exports(kind))}.")
    return ENGINES[engine].layouts[kind]


def check_length(head: DraftHead, draft_length: int) -> None:
    if draft_length < 1 or (head.deepest is not None and draft_length > head.deepest):
        most = "" if head.deepest is None else f" and at most {head.deepest}, the depths this {head.kind} head has"
        raise UserError(f"a draft length of {draft_length} cannot be served: give at least 1{most}.")


def check_path(out: Path, method: str) -> None:
    """Refuse a path from which vLLM would guess another method than the one it is told."""
    words = ("eagle-", "eagle3", "dflash", "dspark")
    misleading = [word for word in words if word in str(out.resolve()).lower()]
    if method not in ("eagle", "eagle3", "dflash", "dspark") and misleading:
        raise UserError(
            f"vLLM would take {out} for another method, for the {misleading[0]!r} in its path: choose another path."
        )


def check_finite(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"the head's tensor {name!r} holds NaN or infinity, so nothing was written: train the head again.")


@torch.no_grad()
def compare(head: DraftHead, again: DraftHead, target: Target) -> None:
    """Raise RuntimeError unless both heads give the same logits on random tokens: bit for bit, or where one has fewer depths,
    which sums in another order, to rounding."""
    depths = min(head.config.depths, again.config.depths)
    generator = torch.Generator().manual_seed(0)
    shape = (1, min(target.max_positions, depths + 12))
    ids = torch.randint(target.vocab_size, shape, generator=generator).to(target.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    ours, theirs = (logits(one, head, ids, mask, target) for one in (head, again))
    exact = head.config.depths == again.config.depths
    equal = [torch.equal(a, b) if exact else torch.allclose(a, b, 1e-4, 1e-4) for a, b in zip(ours, theirs, strict=False)]
    if not equal or not all(equal) or not torch.equal(head.target_ids, again.target_ids):
        raise RuntimeError(f"the export does not read back as the {head.kind} head it was made from: please report this")


def logits(one: DraftHead, head: DraftHead, ids: Tensor, mask: Tensor, target: Target) -> list[Tensor]:
    """What a head says at every depth; without the adapters of the ``head`` that it was made from, of its adapted target."""
    with (one if one.adapts else head).adapted(target):
        features = target.features(ids, one.config.taps)
        found = one.predict(ids, one.taught(ids, mask, 0), features, target)
        return [depth.logits for depth in found if depth.side is None]
