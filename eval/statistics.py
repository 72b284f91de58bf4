"""How sure a measured number is: intervals by resampling prompts, and whether two runs differ by swapping their labels.

Passes of one prompt are not independent, so the prompt (a question with all its turns) is what is drawn and what is
swapped. Every number here is a ratio of sums over prompts, since τ and speeds are pooled: long answers weigh more.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

Counts = np.ndarray  # [prompts, k]: what one prompt adds to each of k sums
Statistic = Callable[[np.ndarray], np.ndarray]  # sums [..., k] to the pooled number [...]

DRAWS = 2000  # bootstrap samples
SWAPS = 10_000  # label swaps; up to 13 prompts all of them are tried
NORMAL = NormalDist()


def tau(sums: np.ndarray) -> np.ndarray:
    """Acceptance length of sums [..., (accepted drafts, verify passes)]; 1 where there was no pass."""
    return 1 + np.divide(sums[..., 0], sums[..., 1], out=np.zeros(sums.shape[:-1]), where=sums[..., 1] > 0)


def rate(sums: np.ndarray) -> np.ndarray:
    """A quotient of sums [..., (numerator, denominator)], such as tokens per second; nan without a denominator."""
    return np.divide(sums[..., 0], sums[..., 1], out=np.full(sums.shape[:-1], np.nan), where=sums[..., 1] > 0)


def speedup(sums: np.ndarray) -> np.ndarray:
    """The quotient of two rates, of sums [..., (tokens, seconds, plain tokens, plain seconds)]."""
    return rate(np.stack([rate(sums[..., :2]), rate(sums[..., 2:])], -1))


def by_question(per_prompt: Iterable[dict[str, Any]], keys: Sequence[str]) -> dict[str, np.ndarray]:
    """What every question adds to the sums named by ``keys`` [k]; entries of one id (a question's turns) are summed."""
    found: dict[str, np.ndarray] = {}
    for entry in per_prompt:
        found[entry["id"]] = found.get(entry["id"], 0) + np.array([float(entry[key] or 0) for key in keys])
    return found


def interval(counts: Counts, statistic: Statistic, seed: int = 0) -> list[float] | None:
    """The 95 % bootstrap interval of a pooled number; None where the number itself does not exist."""
    counts = np.asarray(counts, dtype=float)
    if not len(counts) or not np.isfinite(statistic(counts.sum(0))):
        return None
    return middle(statistic(resampled(counts, seed)), len(counts))


def resampled(counts: Counts, seed: int) -> np.ndarray:
    """Sums [DRAWS, k] over as many prompts as there are, drawn with replacement."""
    n = len(counts)
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=DRAWS) @ counts


def middle(values: np.ndarray, n: int) -> list[float]:
    """The interval that holds 95 % of a number from ``n`` prompts, by its bootstrap values.

    The plain percentiles are too narrow for few prompts, because a resample varies by (n - 1) / n of what a new sample
    does and no t quantile is in them. Both are put right by going further out (Hesterberg, "What Teachers Should Know
    About the Bootstrap", 2015, section 4.3: the expanded percentile interval).
    """
    tail = NORMAL.cdf(-math.sqrt(n / (n - 1)) * student(n - 1)) if n > 1 else 0.0
    low, high = np.nanquantile(values, [tail, 1 - tail])
    return [float(low), float(high)]


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t (Abramowitz and Stegun, 26.7.5): within 1 % from three degrees of freedom on."""
    z, v = NORMAL.inv_cdf(0.975), freedom
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3


def paired(a: Counts, b: Counts, statistic: Statistic, seed: int = 0) -> tuple[float, list[float], float]:
    """B's number minus A's on the same prompts, row by row: the difference, its 95 % interval and its p-value.

    The interval draws prompts, each with both of its rows. The p-value is two-sided: how often the difference is as large
    when at every prompt a coin decides which row is A's (a sign-flip test, exact if the two are exchangeable). With n
    prompts it cannot fall below 2 / 2^n. The difference must exist; see ``rate``.
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    k = a.shape[1]

    def difference(sums: np.ndarray) -> np.ndarray:
        return statistic(sums[..., k:]) - statistic(sums[..., :k])

    both = np.concatenate([a, b], 1)
    found = float(difference(both.sum(0)))
    swapped = difference(both.sum(0) + swaps(len(a), seed) @ np.concatenate([b - a, a - b], 1))
    # sums taken in another order differ in their last digits, and an equal difference must count as one
    extreme = int(np.sum(~(np.abs(swapped) < abs(found) * (1 - 1e-9) - 1e-12)))
    tried = len(swapped)
    p = extreme / tried if tried == 2 ** len(a) else (extreme + 1) / (tried + 1)
    return found, middle(difference(resampled(both, seed)), len(a)), p


def swaps(n: int, seed: int) -> np.ndarray:
    """Which prompts change sides: 0 or 1 [tries, n]; every way there is, or SWAPS random ones."""
    if 2**n <= SWAPS:
        return (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    return np.random.default_rng(seed).integers(0, 2, (SWAPS, n))


def holm(ps: Sequence[float]) -> list[float]:
    """The p-values of several questions asked at once, each raised so that all verdicts together err in 5 % (Holm, 1979)."""
    raised, worst = [0.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[place]))
        raised[place] = worst
    return raised
