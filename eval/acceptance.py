"""How many tokens a pass gives, from how often each position of a draft is accepted; and the rate that misleads.

Engines report accepted / drafted tokens. That rate falls with the draft's length although nothing got worse, and is not the
α of Leviathan et al. (2211.17192), the chance of a token whose predecessors were all accepted: put in its place it promises
far too little. What always holds is τ = 1 + rate · length.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from .service import Acceptance, ProposerFacts
from .statistics import interval, rate
from .verifier import Generation

UNSURE = 0.05  # how far a rate without an interval may be off, relatively


def expected(rates: Sequence[float]) -> float:
    """τ of drafts whose positions are accepted with these conditional chances: 1 + their running products summed up."""
    return 1 + sum(accumulate(rates, mul))


def recovered(acceptance_rate: float, length: int) -> float:
    """The one conditional chance that gives an engine's accepted / drafted rate at this draft length, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected([middle] * length) < 1 + acceptance_rate * length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def known(facts: ProposerFacts) -> list[Acceptance]:
    """Acceptance by position; from an engine's rate alone every position is taken for equally good."""
    if facts.acceptance or facts.engine is None:
        return facts.acceptance
    return [Acceptance(rate=recovered(facts.engine.rate, facts.engine.length))] * facts.engine.length


def tau(facts: ProposerFacts, length: int) -> tuple[float, float, float]:
    """τ of a draft of so many tokens with its 95 % interval; a length beyond what was measured goes on like the last one.

    The interval takes all positions to be high or low together, since easy prompts are easy at every position.
    """
    found = known(facts)
    found = (found + found[-1:] * (length - len(found)))[:length]
    low = [each.rate * (1 - UNSURE) if each.low is None else each.low for each in found]
    high = [min(each.rate * (1 + UNSURE), 1.0) if each.high is None else each.high for each in found]
    return expected([each.rate for each in found]), expected(low), expected(high)


def measured(runs: Sequence[Generation], length: int, seed: int = 0) -> list[Acceptance]:
    """Conditional acceptance by position over all passes, with bootstrap intervals over prompts; it ends at the first
    position that no draft reached. A pass without a draft is a miss at the first position."""
    found = []
    for at in range(1, length + 1):
        counts = [(sum(taken >= at for taken in run.accepted), sum(taken >= at - 1 for taken in run.accepted)) for run in runs]
        seen = np.array(counts, dtype=float).sum(0)
        if not seen[1]:
            break
        value = float(seen[0] / seen[1])
        low, high = interval(np.array(counts), rate, seed) or (value, value)
        found.append(Acceptance(rate=value, low=min(max(low, 0.0), value), high=max(min(high, 1.0), value)))
    return found


def draft_sizes(drafted: Sequence[int]) -> dict[int, float]:
    """Which share of the passes had a draft of so many tokens."""
    return {size: drafted.count(size) / len(drafted) for size in sorted(set(drafted))}
