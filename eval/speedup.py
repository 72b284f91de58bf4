"""How much faster than plain decoding a proposer is, from what its drafts give and what passes cost.

S(B, g) = τ(g) · T(B, 1) / (T_draft(B, g) + T(B, g + 1)), bookkeeping counted in the passes; the general form of Leviathan et
al. (2211.17192), with MoESD's target efficiency T(B, 1) / T(B, g + 1) (2505.19645) measured instead of assumed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .acceptance import known, tau
from .costs import Cost, Surface, draft_surface
from .service import ProposerFacts

PER_TOKEN = {"head": 0.07, "model": 0.25, "lookup": 0.0}  # of a plain pass: what drafting a token costs, where not measured
PER_DRAFT = {"head": 0.0, "model": 0.0, "lookup": 0.01}  # and what a draft costs whatever its length


@dataclass(frozen=True)
class Prediction:
    """``speedup`` [``low``, ``high``] of ``batch`` sequences that draft ``length`` tokens; ``pass_seconds``: of a pass, its
    draft included. ``beyond``: the pass is larger than any that was measured. ``bound``: a roofline's upper bound."""

    batch: float
    length: int
    tau: float
    speedup: float
    low: float
    high: float
    pass_seconds: float
    beyond: bool
    bound: bool

    @property
    def break_even(self) -> float:
        """The τ at which a pass is worth its time."""
        return self.tau / self.speedup


@dataclass(frozen=True)
class Predictor:
    """A proposer on a target of these costs, behind ``context`` tokens.

    ``pads``: the drafts of a pass are padded to the largest of them (ours are); otherwise a pass reads what they hold.
    """

    facts: ProposerFacts
    cost: Cost
    context: float = 0.0
    pads: bool = True

    @cached_property
    def drafts(self) -> Surface | None:
        return draft_surface(self.facts.draft_seconds) if self.facts.draft_seconds else None

    @cached_property
    def lengths(self) -> list[int]:
        """The draft lengths that can be predicted, 0 (none) among them: trees are drafted as they were measured."""
        longest = len(known(self.facts))
        return [0, longest] if self.facts.tree and longest else list(range(longest + 1))

    def predict(self, batch: float, length: int) -> Prediction:
        """The speed-up at a batch size. The interval joins τ's own with the spread of the costs, as independent errors."""
        middle, low, high = tau(self.facts, length)
        seconds = self.pass_seconds(batch, length)
        speedup = middle * self.cost.seconds(batch, 1, self.context) / seconds
        spread = 1.96 * math.sqrt(2) * self.cost.spread() if length else 0.0
        down, up = (math.hypot(math.log(edge / middle), spread) for edge in (low, high))
        beyond = self.cost.beyond(batch, max(size for size, _ in self.drafted(length)) + 1)
        return Prediction(
            batch, length, middle, speedup, speedup * math.exp(-down), speedup * math.exp(up), seconds, beyond, self.cost.bound
        )

    def best(self, batch: float) -> Prediction:
        """The length with the highest speed-up at a batch size, of equally good ones the shortest."""
        found = [self.predict(batch, length) for length in self.lengths]
        return max(found, key=lambda each: (each.speedup, -each.length))

    def pass_seconds(self, batch: float, length: int) -> float:
        """Seconds of one pass of so many sequences that draft up to ``length`` tokens each, the drafting included."""
        if not length:
            return self.cost.seconds(batch, 1, self.context)
        if self.pads:
            largest = self.largest(length, batch)
            read = sum(chance * self.cost.seconds(batch, 1 + size, self.context) for size, chance in largest)
        else:
            mean = sum(chance * size for size, chance in self.drafted(length))
            read = self.cost.seconds(batch, 1 + mean, self.context)
        return read + self.draft_seconds(batch, length)

    def drafted(self, length: int) -> list[tuple[int, float]]:
        """How large a sequence's draft is, with its chance, where drafts are cut at ``length`` tokens; trees are not cut."""
        if self.facts.sizes is None or not length:
            return [(length, 1.0)]
        found: dict[int, float] = {}
        for size, share in self.facts.sizes.items():
            cut = size if self.facts.tree else min(size, length)
            found[cut] = found.get(cut, 0.0) + share / sum(self.facts.sizes.values())
        return sorted(found.items())

    def largest(self, length: int, batch: float) -> Iterator[tuple[int, float]]:
        """How large the largest draft of so many independent ones is, with its chance."""
        below = total = 0.0
        for size, chance in self.drafted(length):
            total += chance
            reached = min(total, 1.0) ** max(batch, 1)
            yield size, reached - below
            below = reached

    def draft_seconds(self, batch: float, length: int) -> float:
        """Seconds of drafting. A proposer that was timed at one batch size is taken to slow down as the target does; one
        that was not timed at all costs the usual share of a plain pass (see ``PER_TOKEN``)."""
        kind, plain = self.facts.kind, self.cost.seconds(batch, 1, self.context)
        if self.drafts is None:
            return plain * (PER_DRAFT[kind] + PER_TOKEN[kind] * length)
        timed, *more = self.drafts.axes[1]
        if more:
            return self.drafts.at(batch, length)
        slower = 1.0 if kind == "lookup" else plain / self.cost.seconds(timed, 1, self.context)
        return self.drafts.at(timed, length) * slower


def end_to_end(prefill: float, decode_speedup: float) -> float:
    """Amdahl: the speed-up of a whole request whose prefill takes this share of its time."""
    return 1 / (prefill + (1 - prefill) / decode_speedup)
