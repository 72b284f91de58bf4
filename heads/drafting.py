"""How a head writes a draft: level by level into a form, each node's likeliest children or drawn ones."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..sampling import Sampling, probabilities
from ..target import Features, Target
from .base import Draft, DraftHead, Guess, Shape
from .growing import Beam, Dynamic, beam, dynamic


@dataclass(frozen=True)
class Adaptive:
    """A chain of at most ``length`` tokens that ends where its next one is too unlikely to be accepted.

    The chance of a path is the product of the estimates along it (see ``sureness``). The chain ends before the first token
    whose path has less than ``stop``; its first token is always drafted. An estimate is made before its token is chosen,
    so that drawn chains stay lossless.
    """

    length: int
    stop: float
    kind = "chain"

    @property
    def name(self) -> str:
        return f"chain:{self.length},stop={self.stop:g}"

    @property
    def nodes(self) -> int:
        return self.length

    @cached_property
    def shape(self) -> Shape:
        return Shape(self.name, tuple(range(self.length)), (0,) * self.length)

    def cut(self, depth: int) -> "Adaptive":
        """The same with at most ``depth`` tokens."""
        return self if depth >= self.length else Adaptive(depth, self.stop)


Form = Shape | Adaptive | Dynamic | Beam


@torch.no_grad()
def draft(
    head: DraftHead,
    state: Any,
    features: Features,
    ids: Tensor,
    form: Form,
    target: Target,
    sampled: Sampling | None = None,
    generator: torch.Generator | None = None,
) -> Draft:
    """Draft behind the last of the newly committed rows (``features`` and ``ids`` as ``DraftHead.begin`` takes them).

    ``sampled`` None takes each node's most likely children; a Sampling draws them without replacement from the head's
    own warped distribution and reports it as ``q``. Dynamic trees and beams are never drawn.
    """
    guess = head.begin(state, features, ids, target)
    if isinstance(form, Dynamic):
        return dynamic(head, state, guess, form, target)
    if isinstance(form, Beam):
        return beam(head, state, guess, form, target)
    return fill(head, state, guess, form, target, sampled, generator)


def fill(
    head: DraftHead,
    state: Any,
    guess: Guess,
    form: Shape | Adaptive,
    target: Target,
    sampled: Sampling | None,
    generator: torch.Generator | None,
) -> Draft:
    """Fill a shape that is known beforehand, from the guess below its root on."""
    shape, stop = (form.shape, form.stop) if isinstance(form, Adaptive) else (form, 0.0)
    drafted = [0] * len(shape.parents)
    q = torch.zeros(len(drafted) + 1, head.config.target.vocab_size) if sampled else None
    chance = 1.0
    for depth, nodes in enumerate(shape.bearing):
        if depth:
            tokens = torch.tensor([drafted[node - 1] for node in nodes], device=target.device)
            guess = head.deepen(state, list(nodes), tokens, shape, target)
        if stop:
            chance *= sureness(head, guess, depth)
            if depth and chance < stop:
                return Draft(drafted[:depth], shape.cut(depth), None if q is None else q[: depth + 1])
        choose(head, nodes, guess.logits, shape, drafted, q, sampled, generator)
    return Draft(drafted, shape, q)


def sureness(head: DraftHead, guess: Guess, depth: int) -> float:
    """The chance that the next token of a chain is accepted: the confidence head's estimate, or without one the draft's own
    probability of its likeliest token."""
    if head.confidence is not None:
        return float(head.confidence.probability(guess.states, depth))
    return float(guess.logits.float().softmax(-1).max())


def choose(
    head: DraftHead,
    nodes: tuple[int, ...],
    logits: Tensor,
    shape: Shape,
    drafted: list[int],
    q: Tensor | None,
    sampled: Sampling | None,
    generator: torch.Generator | None,
) -> None:
    """Write the children of ``nodes`` (one row of logits each) into ``drafted``, and their distributions into ``q``."""
    widest = max(len(shape.families[node]) for node in nodes)
    if widest > logits.shape[-1]:
        raise UserError(
            f"the draft shape {shape.name} has {widest} children under one node, and this head knows {logits.shape[-1]} tokens "
            "alone: choose a narrower one."
        )
    if sampled is None or q is None:
        ranked = logits.topk(widest, dim=-1).indices if widest > 1 else logits.argmax(-1, keepdim=True)
    else:
        probs = probabilities(logits, sampled).cpu()
        noise = torch.empty_like(probs).exponential_(generator=generator)
        ranked = (probs / noise).topk(widest, dim=-1).indices  # the exponential race draws without replacement
        q[torch.tensor(nodes)[:, None], head.target_ids.cpu()] = probs
    ids = head.target_ids[ranked.to(head.target_ids.device)].tolist()
    for node, row in zip(nodes, ids, strict=True):
        for child, token in zip(shape.families[node], row, strict=False):
            drafted[child - 1] = token
