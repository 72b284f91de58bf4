"""What a published layout is: a config.json and named tensors made from a head, and the way back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...target import Target
from ..base import DraftHead, HeadConfig, TargetIdentity

FORMAT = 1  # of the "draftsmith" block below
SPECULATORS_VERSION = "0.9.0"
FLAT_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")  # says again what rope_parameters says


@dataclass(frozen=True)
class Layout:
    """How heads of one kind are stored for an engine. The three functions work in memory; engines/registry.py does the files.

    ``config(head, target, draft_length)`` is config.json, ``tensors(head, target)`` is model.safetensors,
    ``rebuild(config, tensors, target)`` makes the head again by the layout's rules alone and refuses anything odd.
    """

    config: Callable[[DraftHead, Target, int], dict[str, Any]]
    tensors: Callable[[DraftHead, Target], dict[str, Tensor]]
    rebuild: Callable[[dict[str, Any], dict[str, Tensor], Target], DraftHead]
    method: str  # what the engine calls it
    flags: dict[str, Any] = field(default_factory=dict)  # what the engine must be told besides, in its own words
    served: bool = False  # whether scripts/serving_parity.py or a test loads it in the engine itself
    tells: Callable[[dict[str, Any]], bool] = lambda config: False  # whether a published config.json is of this layout
    file: str | None = "model.safetensors"  # None: ``beside`` writes the tensors, among others that are not the head's
    beside: Callable[[DraftHead, Target, Path], None] | None = None  # writes what else the directory holds
    also: Callable[[Path], dict[str, Tensor]] | None = None  # reads for ``rebuild`` what tensors lie beside
    rounded: Callable[[DraftHead, Target], DraftHead] | None = None  # the head in the numbers that the file can hold


def provenance(head: DraftHead, draft_length: int) -> dict[str, Any]:
    """The block in which an export says where it comes from; engines pass over it."""
    target = head.config.target
    return {
        "format": FORMAT,
        "kind": head.kind,
        "draft_length": draft_length,
        "target": target.name,
        "target_fingerprint": target.fingerprint,
    }


def speculators_block(kind: str, head: DraftHead, target: Target, draft_length: int) -> dict[str, Any]:
    """What every config of the speculators format begins with. There must be no top-level ``model_type``."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": draft_length, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": [head.config.target.architecture]},
        },
    }


def dtype_names(target: Target) -> dict[str, str]:
    """The serving dtype under its old and its new key."""
    name = str(target.dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}


def own_tensors(head: DraftHead) -> dict[str, Tensor]:
    """The head's trained tensors by their own names, on the CPU; vocabulary and confidence are not among them."""
    left_out = ("target_ids", "confidence.")
    return {name: t.detach().cpu().contiguous() for name, t in head.state_dict().items() if not name.startswith(left_out)}


def vocabulary_tensors(head: DraftHead) -> dict[str, Tensor]:
    """d2t int64 [draft vocab] of offsets and t2d bool [vocab]; nothing where the vocabulary is the target's own."""
    ids, vocab = head.target_ids.cpu(), head.config.target.vocab_size
    if len(ids) == vocab:
        return {}
    return {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)}


def vocabulary_ids(tensors: dict[str, Tensor], size: int, vocab: int) -> Tensor:
    """The target ids [draft vocab] that d2t and t2d tell, which are taken out of ``tensors``; all of them without d2t."""
    if size == vocab:
        return torch.arange(vocab)
    if "d2t" not in tensors:
        raise UserError(f"the export has draft_vocab_size {size} of {vocab} and no d2t tensor: export the head again.")
    ids = tensors.pop("d2t") + torch.arange(size)
    t2d = tensors.pop("t2d", None)
    marked = ids if t2d is None else t2d.nonzero().squeeze(1)
    if not torch.equal(ids, marked) or len(ids.unique()) != size or not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise UserError("the export's d2t and t2d do not name the same distinct tokens of the target: export the head again.")
    return ids


def make_head(
    kind: type[DraftHead], target: Target, target_ids: Tensor, tensors: dict[str, Tensor], **config: Any
) -> DraftHead:
    """A head of these sizes with these tensors (own names), loaded strictly."""
    identity = TargetIdentity.of(target)
    head = kind(HeadConfig(kind=kind.kind, target=identity, draft_vocab_size=len(target_ids), **config))
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in {**tensors, "target_ids": target_ids}.items()}
    odd = sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name))
    if odd:
        said = (f"tensor {name!r} has shape {given.get(name)}, and its config asks for {expected.get(name)}" for name in odd)
        raise UserError(f"the export's {'; '.join(said)}: export the head again, or name the target that it was made for.")
    dtypes = {tensor.dtype for tensor in tensors.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    for stored in head.state_dict(keep_vars=True).values():  # head.to(dtype) would round RoPE's frequencies, too
        stored.data = stored.data.to(dtype) if stored.is_floating_point() else stored.data
    head.load_state_dict({**tensors, "target_ids": target_ids})
    return head.to(target.device).eval()


def llama_config(head: DraftHead, target: Target) -> dict[str, Any]:
    """The head's layer; RoPE in the flat keys that engines read and the nested one that transformers 5 writes."""
    return {
        "model_type": "llama",
        **head.config.layer,
        **flat_rope(head.config.layer["rope_parameters"]),
        "num_aux_hidden_states": len(head.config.taps),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": getattr(target.config, "bos_token_id", None),
        "eos_token_id": getattr(target.config, "eos_token_id", None),
        **dtype_names(target),
    }


def flat_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """RoPE in the flat keys; nothing where each kind of layer has a RoPE of its own, which they cannot say."""
    if "rope_theta" not in rope:
        return {}
    scaling = {key: value for key, value in rope.items() if key not in FLAT_ROPE}
    partly = {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}
    return {
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        **partly,
    }


@torch.no_grad()
def embedded(target: Target) -> Tensor:
    """What the target's embedding gives for every token [vocab, hidden]."""
    return target.embed(torch.arange(target.vocab_size, device=target.device)).cpu()


def scales_embedding(target: Target) -> bool:
    """Whether the target's embedding is more than a look-up of its weight."""
    return not torch.equal(embedded(target), target.embed.get_parameter("weight")[: target.vocab_size].cpu())


def embedding_tensors(target: Target) -> dict[str, Tensor]:
    """embed_tokens.weight [vocab, hidden] where the target's embedding is more than a look-up of its weight."""
    return {"embed_tokens.weight": embedded(target).contiguous()} if scales_embedding(target) else {}


def same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    return ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)


def spread(rows: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Rows [draft vocab, width] at their ids in [vocab, width], their mean everywhere else.

    The logit of any other token is then the mean of the drafted tokens' logits, which is never above the best of them.
    """
    return rows.mean(0).repeat(vocab, 1).index_copy(0, ids, rows)
