"""How long the next draft is, from how the drafts before it have fared.

The goodput rule of SmartSpec / TurboSpec (Liu et al., 2406.14066): of all lengths, none included, take the one that promises
the most tokens per second. Where they follow one acceptance rate by a moving average, here every position of every sequence
has a rate of its own. (transformers' heuristic, two more after a draft that was accepted whole and one less after any other,
knows no costs.) A length follows from the past alone, never from the draft it is chosen for: verification stays lossless.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from ..heads.base import Draft, DraftHead
from ..heads.drafting import Form
from ..target import Features, Target
from .proposers import NOTHING, HeadProposer, Proposer, Text
from .tree import Paced, chain

KEPT = 0.85  # of every count from one pass to the next, so that the last six or seven passes are remembered
HOPE = 0.7  # the first position's rate before anything was seen
TRUST = 2.0  # how many drafts an expectation counts for


@dataclass
class Pace:
    """The drafts of one sequence, counted by position: how many got that far (``tried``) and were right there (``right``),
    older ones weighing less."""

    tried: list[float]
    right: list[float]

    @classmethod
    def of(cls, length: int) -> "Pace":
        return cls([0.0] * length, [0.0] * length)

    def count(self, proposed: int, accepted: int) -> None:
        """One more pass, with a draft of ``proposed`` tokens (0: none) of which ``accepted`` were right.

        A pass without a draft lets the counts fade as any other does, so that hope returns and drafting is tried again.
        """
        for counts in (self.tried, self.right):
            counts[:] = [KEPT * seen for seen in counts]
        for position in range(min(accepted + 1, proposed)):
            self.tried[position] += 1
            self.right[position] += position < accepted

    def rates(self) -> list[float]:
        """The chance of every position to be right where all before it were. A position that is seldom reached is taken to
        be like the one before it."""
        found, expected = [], HOPE
        for tried, right in zip(self.tried, self.right, strict=True):
            expected = (right + TRUST * expected) / (tried + TRUST)
            found.append(expected)
        return found

    def tokens(self) -> list[float]:
        """What a pass with a draft of 0, 1, 2, … tokens is expected to give."""
        return list(accumulate(accumulate(self.rates(), mul), initial=1.0))


def best_length(paces: Sequence[Pace], costs: Sequence[float]) -> int:
    """The length of the most tokens per second for sequences that share a pass, of equally good ones the shortest.
    ``costs``: of a pass with drafts of 0, 1, 2, … tokens, in any unit."""
    given = [sum(each) for each in zip(*(pace.tokens() for pace in paces), strict=True)]
    speeds = [tokens / cost for tokens, cost in zip(given, costs, strict=True)]
    return speeds.index(max(speeds))


@dataclass
class PacedState:
    """``own``: the proposer's. ``drafted`` tokens were in the last draft, made behind ``read`` tokens. ``fresh``: the
    target's rows that came in since the proposer was last asked."""

    own: Any
    pace: Pace
    drafted: int = 0
    read: int = 0
    fresh: list[Features] = field(default_factory=list)


class PacedProposer:
    """A proposer of chains that is told before every pass how long they may be; sequences that share a pass are told the
    same, since its cost is the longest one's."""

    def __init__(self, proposer: Proposer, form: Paced) -> None:
        self.proposer, self.form = proposer, form
        self.name, self.taps, self.length = proposer.name, proposer.taps, form.length
        self.adapts, self.adapted = proposer.adapts, proposer.adapted
        self.drawn = proposer.drawn

    def described(self) -> dict[str, Any]:
        return {**self.proposer.described(), "name": self.form.name, "costs": list(self.form.costs)}

    def begin(self, prompt: list[int]) -> PacedState:
        return PacedState(self.proposer.begin(prompt), Pace.of(self.length))

    def propose(self, texts: list[Text], target: Target) -> list[Draft]:
        for text in texts:
            take_stock(text)
        length = best_length([text.state.pace for text in texts], self.form.costs)
        drafts = [NOTHING] * len(texts)
        if length:
            drafts = self.proposer.propose([inner(text, length) for text in texts], target)
        for text, draft in zip(texts, drafts, strict=True):
            text.state.drafted = draft.shape.length
        return drafts

    def learn(self, text: Text, draft: Draft, logits: Tensor) -> None:
        self.proposer.learn(replace(text, state=text.state.own), draft, logits)

    def finish(self, text: Text) -> None:
        self.proposer.finish(replace(text, state=text.state.own))


def drafting(head: DraftHead, form: Form | Paced, drawn: bool = False) -> Proposer:
    """The proposer of a head in a form, an adaptive one included; its costs must be known."""
    if isinstance(form, Paced):
        return PacedProposer(HeadProposer(head, chain(form.length), drawn), form)
    return HeadProposer(head, form, drawn)


def take_stock(text: Text) -> None:
    """Count how the last draft fared, and keep what the target read meanwhile."""
    state: PacedState = text.state
    if state.read:
        state.pace.count(state.drafted, len(text.tokens) - state.read - 1)
    state.read = len(text.tokens)
    state.fresh.append(text.fresh)


def inner(text: Text, length: int) -> Text:
    """The text as the proposer inside sees it, with all rows since it was last asked."""
    state: PacedState = text.state
    taps, last = (torch.cat([getattr(rows, name) for rows in state.fresh]) for name in ("taps", "last"))
    state.fresh = []
    return replace(text, state=state.own, fresh=Features(taps, last), room=min(text.room, length))
