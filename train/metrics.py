"""What training reports, kept as raw sums per depth and reduced once."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class DepthSums:
    """Sums over supervised rows, each [depths] float64: ``loss``, ``right`` (greedy draft = the target's greedy token),
    ``prefix`` (right at this depth and at all before it: joint counts, never products) and ``rows``."""

    loss: Tensor
    right: Tensor
    prefix: Tensor
    rows: Tensor

    @classmethod
    def zeros(cls, depths: int, device: torch.device) -> "DepthSums":
        return cls(*(torch.zeros(depths, dtype=torch.float64, device=device) for _ in range(4)))

    def add(self, other: "DepthSums") -> None:
        for name in ("loss", "right", "prefix", "rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def reduced(self, accelerator: Any) -> "DepthSums":
        """The sums over all processes."""
        stacked = torch.stack([self.loss, self.right, self.prefix, self.rows])
        return DepthSums(*accelerator.reduce(stacked, reduction="sum"))

    def report(self, weights: Tensor) -> dict[str, float]:
        """Means: ``loss`` (depths weighted as in training), ``accuracy_i`` per depth and the simulated τ ``tau_sim``.

        tau_sim = 1 + the sum over depths of the share of rows whose whole prefix of greedy drafts is right.
        """
        rows = self.rows.clamp_min(1)
        means = {"loss": float((self.loss / rows * weights.to(rows)).sum() / weights.sum())}
        means |= {f"accuracy_{i}": float(value) for i, value in enumerate(self.right / rows)}
        return means | {"tau_sim": 1 + float((self.prefix / rows).sum())}
