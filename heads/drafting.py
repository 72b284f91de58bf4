"""How a head writes a draft: level by level into a given shape, each node's likeliest children or drawn ones."""

from typing import Any

import torch
from torch import Tensor

from ..sampling import Sampling, probabilities
from ..target import Features, Target
from .base import Draft, DraftHead, Shape


@torch.no_grad()
def draft(
    head: DraftHead,
    state: Any,
    features: Features,
    ids: Tensor,
    shape: Shape,
    target: Target,
    sampled: Sampling | None = None,
    generator: torch.Generator | None = None,
) -> Draft:
    """Draft a tree behind the last of the newly committed rows (``features`` and ``ids`` as ``DraftHead.begin`` takes them).

    ``sampled`` None takes each node's most likely children; a Sampling draws them without replacement from the head's
    own warped distribution and reports it as ``q``.
    """
    drafted = [0] * len(shape.parents)
    q = torch.zeros(len(drafted) + 1, head.config.target.vocab_size) if sampled else None
    frontier, guess = [0], head.begin(state, features, ids, target)
    for depth in range(max(shape.depths)):
        choose(head, frontier, guess.logits, shape, drafted, q, sampled, generator)
        frontier = [node for node in shape.level(depth + 1) if shape.children(node)]
        if frontier:
            chosen = torch.tensor([drafted[node - 1] for node in frontier], device=target.device)
            guess = head.deepen(state, frontier, chosen, shape, target)
    return Draft(drafted, shape, q)


def choose(
    head: DraftHead,
    nodes: list[int],
    logits: Tensor,
    shape: Shape,
    drafted: list[int],
    q: Tensor | None,
    sampled: Sampling | None,
    generator: torch.Generator | None,
) -> None:
    """Write the children of ``nodes`` (one row of logits each) into ``drafted``, and their distributions into ``q``."""
    widths = [len(shape.children(node)) for node in nodes]
    if sampled is None or q is None:
        ranked = logits.topk(max(widths), dim=-1).indices if max(widths) > 1 else logits.argmax(-1, keepdim=True)
    else:
        probs = probabilities(logits, sampled).cpu()
        noise = torch.empty_like(probs).exponential_(generator=generator)
        ranked = (probs / noise).topk(max(widths), dim=-1).indices  # the exponential race draws without replacement
        for node, row in zip(nodes, probs, strict=True):
            q[node, head.target_ids.cpu()] = row
    ids = head.target_ids[ranked.to(head.target_ids.device)].tolist()
    for node, row in zip(nodes, ids, strict=True):
        for rank, child in enumerate(shape.children(node)):
            drafted[child - 1] = row[rank]
