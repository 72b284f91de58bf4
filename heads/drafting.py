"""How a head writes a draft: level by level into a form, each node's likeliest children or drawn ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import UserError
from ..sampling import Sampling, probabilities
from ..target import Features, Target
from .base import Ask, Draft, DraftHead, Guess, Shape
from .growing import Beam, Dynamic, Writing, beam, dynamic

T = TypeVar("T")


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


@dataclass
class Drafting:
    """One sequence to draft for: the head's state of it, and what ``DraftHead.begin`` takes.

    ``sampled`` None takes each node's most likely children; a Sampling draws them without replacement from the head's own
    warped distribution and reports it as ``q``. Dynamic trees and beams are never drawn.
    """

    state: Any
    features: Features
    ids: Tensor
    form: Form
    sampled: Sampling | None = None
    generator: torch.Generator | None = None


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
    """Draft behind the last of the newly committed rows of one sequence; see ``Drafting``."""
    return draft_all(head, [Drafting(state, features, ids, form, sampled, generator)], target)[0]


@torch.no_grad()
def draft_all(head: DraftHead, each: list[Drafting], target: Target) -> list[Draft]:
    """A draft for each of several sequences, level by level together, so that the head may read them in one forward."""
    states = [own.state for own in each]
    guesses = head.begin_all(states, [own.features for own in each], [own.ids for own in each], target)
    return written(head, [writer(head, guess, own) for guess, own in zip(guesses, each, strict=True)], states, target)


def writer(head: DraftHead, guess: Guess, own: Drafting) -> Writing[Draft]:
    """What writes one sequence's draft from the guess below its root on, asking for further ones."""
    if isinstance(own.form, Dynamic):
        return dynamic(head, guess, own.form)
    if isinstance(own.form, Beam):
        return beam(head, guess, own.form)
    return fill(head, guess, own.form, own.sampled, own.generator)


def written(head: DraftHead, writers: Sequence[Writing[T]], states: Sequence[Any], target: Target) -> list[T]:
    """What the writers return in the end; what they ask meanwhile is answered for all of them at once."""
    found: dict[int, T] = {}
    answers: dict[int, Guess | None] = dict.fromkeys(range(len(writers)))
    while answers:
        asks: dict[int, Ask] = {}
        for place, guess in answers.items():
            try:
                asks[place] = writers[place].send(guess)  # type: ignore[arg-type]  # None starts it
            except StopIteration as end:
                found[place] = end.value
        guesses = head.deepen_all([states[place] for place in asks], list(asks.values()), target) if asks else []
        answers = dict(zip(asks, guesses, strict=True))
    return [found[place] for place in range(len(writers))]


def fill(
    head: DraftHead,
    guess: Guess,
    form: Shape | Adaptive,
    sampled: Sampling | None,
    generator: torch.Generator | None,
) -> Writing[Draft]:
    """Fill a shape that is known beforehand."""
    shape, stop = (form.shape, form.stop) if isinstance(form, Adaptive) else (form, 0.0)
    drafted = [0] * len(shape.parents)
    q = torch.zeros(len(drafted) + 1, head.config.target.vocab_size) if sampled else None
    chance = 1.0
    for depth, nodes in enumerate(shape.bearing):
        if depth:
            tokens = torch.tensor([drafted[node - 1] for node in nodes], device=guess.logits.device)
            guess = yield Ask(list(nodes), tokens, shape)
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
