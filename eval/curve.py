"""Where a learning curve is going: a saturating power law through what was measured, and how sure that is."""

from dataclasses import dataclass

import numpy as np

LEAST = 6  # points; fewer leave the law's three numbers open
POWERS = np.linspace(0.2, 2.0, 37)
DRAWS = 200


@dataclass(frozen=True)
class Outlook:
    """What more training would bring, in τ: the gain ``doubled`` by as many steps again and the gain ``ever``, each with its
    95 % interval."""

    doubled: float
    doubled_interval: tuple[float, float]
    ever: float
    ever_interval: tuple[float, float]


def outlook(steps: np.ndarray, taus: np.ndarray, most: float, seed: int = 0) -> Outlook | None:
    """Fit tau(step) = c - a step^-b, a >= 0, c <= ``most``, and ask it for twice the last step and for infinity; intervals by
    bootstrap over the residuals. None where there are fewer than LEAST points.
    """
    if len(steps) < LEAST:
        return None
    x = np.asarray(steps, float) / steps[-1]
    found = fit(x, taus, most)
    rng = np.random.default_rng(seed)
    curve = found[0] - found[1] * x ** -found[2]
    left = (taus - curve) * np.sqrt(len(x) / (len(x) - 3))
    draws = np.array([gains(fit(x, curve + rng.choice(left, len(left)), most)) for _ in range(DRAWS)])
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    doubled, ever = gains(found)
    return Outlook(doubled, (float(low[0]), float(high[0])), ever, (float(low[1]), float(high[1])))


def fit(x: np.ndarray, y: np.ndarray, most: float) -> tuple[float, float, float]:
    """(c, a, b) of the least squares; for every power b of a grid the rest is linear."""
    best, kept = np.inf, (float(y.mean()), 0.0, 1.0)
    for b in POWERS:
        z = x**-b
        a = max(0.0, -float(np.cov(z, y, bias=True)[0, 1] / z.var()))
        c = float(y.mean() + a * z.mean())
        if c > most:
            c, a = most, float((z * (most - y)).sum() / (z * z).sum())
        error = float(((c - a * z - y) ** 2).sum())
        if error < best:
            best, kept = error, (c, a, float(b))
    return kept


def gains(law: tuple[float, float, float]) -> tuple[float, float]:
    """What twice the last step brings, and infinitely many."""
    _, a, b = law
    return a * (1 - 2**-b), a
