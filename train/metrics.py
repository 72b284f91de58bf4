"""What training reports, kept as raw sums per depth and reduced once."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .calibration import BINS, FAR, calibration_error
from .objectives import Look


@dataclass
class DepthSums:
    """Sums over taught rows, each [depths] float64: ``loss``, ``right`` (greedy draft = the target's greedy token),
    ``prefix`` (right at this depth and at all before it: joint counts, never products), ``overlap`` (sum_v min(p_v, q_v),
    the chance that a sampled draft is accepted) and ``rows``.

    ``sure`` [depths, BINS, 3] float64 tells how sure a head's confidence estimate is where, and how right: rows are binned
    by its logit, each weighs the chance that a draft gets there, and summed are the weight, weight x logit and
    weight x overlap. Bins are fine, so that calibration can be fitted to the sums. ``side`` [side lessons, 2]: what their
    rows cost, and how many there are.
    """

    loss: Tensor
    right: Tensor
    prefix: Tensor
    overlap: Tensor
    rows: Tensor
    sure: Tensor
    side: Tensor

    @classmethod
    def zeros(cls, depths: int, device: torch.device, sides: int = 0) -> "DepthSums":
        shapes = {each.name: (depths,) for each in fields(cls)} | {"sure": (depths, BINS, 3), "side": (sides, 2)}
        return cls(**{name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()})

    def add(self, other: "DepthSums") -> None:
        """Add other sums; zeros that were made for no side lessons take those over."""
        self.side = self.side if len(self.side) else torch.zeros_like(other.side)
        for name in (each.name for each in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @torch.no_grad()
    def count(self, depth: int, look: Look, cost: Tensor, alive: Tensor) -> Tensor:
        """Add one depth's rows of a piece. ``alive`` bool [places]: whose drafts were right so far; returns it for the next."""
        right = look.logits.argmax(-1) == look.best
        prefix = right & alive[look.place]
        self.loss[depth] += cost.sum()
        self.right[depth] += right.sum()
        self.prefix[depth] += prefix.sum()
        self.overlap[depth] += look.alpha.sum()
        self.rows[depth] += len(right)
        return torch.zeros_like(alive).index_put((look.place,), prefix)

    @torch.no_grad()
    def count_sure(self, depth: int, look: Look, sure: Tensor) -> None:
        """Add what a confidence estimate says, logits ``sure`` [m], of one depth's rows of a piece."""
        bins = ((sure.clamp(-FAR, FAR) + FAR) * (BINS / (2 * FAR))).long().clamp_max(BINS - 1)
        seen = torch.stack([look.reach, look.reach * sure, look.reach * look.alpha], 1)
        self.sure[depth].index_add_(0, bins, seen.double())

    def reduced(self, accelerator: Any) -> "DepthSums":
        """The sums over all processes."""
        mine = [getattr(self, each.name) for each in fields(self)]
        summed = accelerator.reduce(torch.cat([part.flatten() for part in mine]), reduction="sum")
        parts = summed.split([part.numel() for part in mine])
        return DepthSums(*(flat.view_as(part) for flat, part in zip(parts, mine, strict=True)))

    def report(self, shares: Tensor) -> dict[str, float]:
        """Means: ``loss`` (depths weighted by ``shares``, which sum to 1), ``accuracy_i`` and ``overlap_i`` per depth,
        ``ece_i`` (the calibration error of the confidence estimate, where there is one), ``side_i`` (the cost of a row of each
        side lesson, which ``loss`` leaves out) and the simulated τ ``tau_sim``.

        tau_sim = 1 + the sum over depths of the share of rows whose whole prefix of greedy drafts is right.
        """
        rows = self.rows.clamp_min(1)
        means = {"loss": float((self.loss / rows * shares.to(rows)).sum())}
        means |= {f"accuracy_{i}": float(value) for i, value in enumerate(self.right / rows)}
        means |= {f"overlap_{i}": float(value) for i, value in enumerate(self.overlap / rows)}
        if self.sure.any():
            means |= {f"ece_{i}": value for i, value in enumerate(calibration_error(self.sure).tolist())}
        means |= {f"side_{i}": cost / max(count, 1) for i, (cost, count) in enumerate(self.side.tolist())}
        return means | {"tau_sim": 1 + float((self.prefix / rows).sum())}
