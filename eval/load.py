"""How many requests run at once: at a fixed rate of requests a faster service has fewer of them under way.

By Little's law a replica that is asked for λ tokens per second runs B sequences with B = λ · (seconds per token of B
sequences). Speculation shortens the seconds per token and so lowers B, which shortens them further: the gain at a rate of
requests is not the gain at a batch size, and is found by solving for B. Kong et al. (2605.15051) write a request's latency
as L = A + b · N with N = λ L requests under way, so that L = A / (1 - λ b): speculation may lower A and raise b.
"""

from collections.abc import Callable
from dataclasses import dataclass

Step = Callable[[float], float]  # seconds of a pass of so many sequences
STEP = 1.05  # between the batch sizes at which a solution is looked for
LEAST = 1e-6


@dataclass(frozen=True)
class Steady:
    """A replica in balance: ``batch`` sequences on average, ``tpot`` seconds per token of each."""

    batch: float
    tpot: float


def balance(tokens_per_s: float, step: Step, tau: float = 1.0, most: float = 1024, busy: float = 0.0) -> Steady | None:
    """Solve B = tokens_per_s · step(B) / τ for its smallest solution by bisection; None where even ``most`` sequences at
    once give fewer tokens than are asked for: the service is saturated.

    ``busy``: the share of the time in which a replica reads prompts instead of decoding. Below one sequence the replica
    idles in between, and a pass costs what it costs for one.
    """
    if busy >= 1:
        return None

    def tpot(batch: float) -> float:
        return step(max(batch, 1.0)) / tau / (1 - busy)

    def short(batch: float) -> bool:
        return tokens_per_s * tpot(batch) > batch

    low, high = 0.0, LEAST
    while short(high):
        if high >= most:
            return None
        low, high = high, min(high * STEP, most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if short(middle) else (low, middle)
    return Steady(high, tpot(high))


def capacity(step: Step, tau: float = 1.0, most: float = 1024, busy_per_token: float = 0.0) -> float:
    """The most tokens per second that a replica gives with up to ``most`` sequences at once.

    ``busy_per_token``: seconds of reading prompts for every token that is written.
    """
    batch, best = 1.0, 0.0
    while True:
        best = max(best, 1 / (step(batch) / tau / batch + busy_per_token))
        if batch >= most:
            return best
        batch = min(batch * STEP, most)


def latency(alone: float, per_request: float, rate: float) -> float | None:
    """Kong et al.: seconds of a request when ``rate`` arrive per second; ``alone`` seconds for the only one, ``per_request``
    more for every other under way. None from the rate 1 / per_request on, at which the service is saturated."""
    left = 1 - rate * per_request
    return alone / left if left > 0 else None
