"""How much faster than plain decoding a proposer is, from what its drafts give and what passes cost.

S(B, g) = τ(g) · T(B, 1) / (T_draft(B, g) + T(B, g + 1)), bookkeeping counted in the passes; the general form of Leviathan et
al. (2211.17192), with MoESD's target efficiency T(B, 1) / T(B, g + 1) (2505.19645) measured instead of assumed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .acceptance import known, tau
from .costs import Cost, draft_surface
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


def predict(facts: ProposerFacts, cost: Cost, batch: float, length: int, context: float, pads: bool = True) -> Prediction:
    """The speed-up at a batch size. The interval joins τ's own with the spread of the costs, as independent errors.

    ``pads``: the drafts of a pass are padded to the largest of them (ours are); otherwise a pass reads what they hold.
    """
    middle, low, high = tau(facts, length)
    plain = cost.seconds(batch, 1, context)
    with_draft = pass_seconds(facts, cost, batch, length, context, pads)
    speedup = middle * plain / with_draft
    spread = 1.96 * math.sqrt(2) * cost.spread() if length else 0.0
    down, up = (math.hypot(math.log(edge / middle), spread) for edge in (low, high))
    largest = max(size for size, _ in drafted(facts, length))
    return Prediction(
        batch, length, middle, speedup, speedup * math.exp(-down), speedup * math.exp(up), with_draft,
        cost.beyond(batch, largest + 1), cost.bound,
    )  # fmt: skip


def pass_seconds(facts: ProposerFacts, cost: Cost, batch: float, length: int, context: float, pads: bool = True) -> float:
    """Seconds of one pass of so many sequences that draft up to ``length`` tokens each, the drafting included."""
    if not length:
        return cost.seconds(batch, 1, context)
    if pads:
        read = sum(chance * cost.seconds(batch, 1 + size, context) for size, chance in largest_of(facts, length, batch))
    else:
        mean = sum(chance * size for size, chance in drafted(facts, length))
        read = cost.seconds(batch, 1 + mean, context)
    return read + draft_seconds(facts, cost, batch, length, context)


def drafted(facts: ProposerFacts, length: int) -> list[tuple[int, float]]:
    """How large a sequence's draft is, with its chance, where drafts are cut at ``length`` tokens; trees are not cut."""
    if facts.sizes is None or not length:
        return [(length, 1.0)]
    found: dict[int, float] = {}
    for size, share in facts.sizes.items():
        cut = size if facts.tree else min(size, length)
        found[cut] = found.get(cut, 0.0) + share / sum(facts.sizes.values())
    return sorted(found.items())


def largest_of(facts: ProposerFacts, length: int, batch: float) -> Iterator[tuple[int, float]]:
    """How large the largest draft of so many independent ones is, with its chance."""
    below = total = 0.0
    for size, chance in drafted(facts, length):
        total += chance
        reached = min(total, 1.0) ** max(batch, 1)
        yield size, reached - below
        below = reached


def draft_seconds(facts: ProposerFacts, cost: Cost, batch: float, length: int, context: float) -> float:
    """Seconds of drafting. A proposer that was timed at one batch size is taken to slow down as the target does; one that
    was not timed at all costs the usual share of a plain pass (see ``PER_TOKEN``)."""
    plain = cost.seconds(batch, 1, context)
    if not facts.draft_seconds:
        return plain * (PER_DRAFT[facts.kind] + PER_TOKEN[facts.kind] * length)
    surface = draft_surface(facts.draft_seconds)
    timed, *more = surface.axes[1]
    if more:
        return surface.at(batch, length)
    slower = 1.0 if facts.kind == "lookup" else plain / cost.seconds(timed, 1, context)
    return surface.at(timed, length) * slower


def lengths(facts: ProposerFacts) -> list[int]:
    """The draft lengths that can be predicted, 0 (none) among them: trees are drafted as they were measured."""
    longest = len(known(facts))
    return [0, longest] if facts.tree and longest else list(range(longest + 1))


def best(facts: ProposerFacts, cost: Cost, batch: float, context: float, pads: bool = True) -> Prediction:
    """The length with the highest speed-up at a batch size, of equally good ones the shortest."""
    found = [predict(facts, cost, batch, length, context, pads) for length in lengths(facts)]
    return max(found, key=lambda each: (each.speedup, -each.length))


def end_to_end(prefill: float, decode_speedup: float) -> float:
    """Amdahl: the speed-up of a whole request whose prefill takes this share of its time."""
    return 1 / (prefill + (1 - prefill) / decode_speedup)
