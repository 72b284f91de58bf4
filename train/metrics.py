"""What training reports, kept as raw sums per depth and reduced once."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .objectives import Look


@dataclass
class DepthSums:
    """Sums over taught rows, each [depths] float64: ``loss``, ``right`` (greedy draft = the target's greedy token),
    ``prefix`` (right at this depth and at all before it: joint counts, never products), ``overlap`` (sum_v min(p_v, q_v),
    the chance that a sampled draft is accepted) and ``rows``."""

    loss: Tensor
    right: Tensor
    prefix: Tensor
    overlap: Tensor
    rows: Tensor

    @classmethod
    def zeros(cls, depths: int, device: torch.device) -> "DepthSums":
        return cls(*(torch.zeros(depths, dtype=torch.float64, device=device) for _ in fields(cls)))

    def add(self, other: "DepthSums") -> None:
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
        self.overlap[depth] += torch.minimum(look.p, look.logits.softmax(-1)).sum()
        self.rows[depth] += len(right)
        return torch.zeros_like(alive).index_put((look.place,), prefix)

    def reduced(self, accelerator: Any) -> "DepthSums":
        """The sums over all processes."""
        stacked = torch.stack([getattr(self, each.name) for each in fields(self)])
        return DepthSums(*accelerator.reduce(stacked, reduction="sum"))

    def report(self, shares: Tensor) -> dict[str, float]:
        """Means: ``loss`` (depths weighted by ``shares``, which sum to 1), ``accuracy_i`` and ``overlap_i`` per depth and the
        simulated τ ``tau_sim``.

        tau_sim = 1 + the sum over depths of the share of rows whose whole prefix of greedy drafts is right.
        """
        rows = self.rows.clamp_min(1)
        means = {"loss": float((self.loss / rows * shares.to(rows)).sum())}
        means |= {f"accuracy_{i}": float(value) for i, value in enumerate(self.right / rows)}
        means |= {f"overlap_{i}": float(value) for i, value in enumerate(self.overlap / rows)}
        return means | {"tau_sim": 1 + float((self.prefix / rows).sum())}
