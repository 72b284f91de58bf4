"""What a head is taught: a cost per row and depth, from draft logits and the target's own distribution.

p is the target's row over its whole vocabulary, q the head's over the draft vocabulary. The overlap
alpha = sum_v min(p_v, q_v) over the draft vocabulary is the chance that a sampled draft is accepted; mass of p outside the
draft vocabulary is lost. Everything is computed in float32: in bfloat16 these gradients are mostly noise.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Look:
    """One depth's rows of one piece: ``logits`` and ``p`` [m, draft vocab] float32 (p not renormalised), ``labels`` and
    ``best`` [m], the draft ids of the data's token and of the target's greedy one (-1 outside the draft vocabulary), and
    ``place`` [m], which of the piece's rows each is, so that depths of one row can be told to belong together."""

    logits: Tensor
    p: Tensor
    labels: Tensor
    best: Tensor
    place: Tensor


def kl(look: Look) -> Tensor:
    """Forward KL(p' || q) [rows], p' being p restricted to the draft vocabulary and renormalised.

    Its gradients are those of EAGLE-3's soft cross-entropy.
    """
    restricted = look.p / look.p.sum(-1, keepdim=True).clamp_min(1e-20)
    return (restricted * (restricted.clamp_min(1e-20).log() - look.logits.log_softmax(-1))).sum(-1)


def lk(look: Look, eta: float = 3.0) -> Tensor:
    """The acceptance-aware hybrid lambda * KL + (1 - lambda) * (1 - alpha) [rows], lambda = exp(-eta * alpha) (LK losses).

    Far from the target it is KL, which trains from cold; near it, the rejection probability itself.
    """
    alpha = torch.minimum(look.p, look.logits.softmax(-1)).sum(-1)
    weight = (-eta * alpha.detach()).exp()
    return weight * kl(look) + (1 - weight) * (1 - alpha)


def ce(look: Look) -> Tensor:
    """Cross-entropy [rows] on the data's own next token (Medusa-1); a token outside the draft vocabulary (-1) gives 0."""
    return torch.nn.functional.cross_entropy(look.logits, look.labels, ignore_index=-1, reduction="none")


LOSSES: dict[str, Callable[[Look], Tensor]] = {"kl": kl, "lk": lk, "ce": ce}


@dataclass
class Objective:
    """The loss of every row and the weight of every depth, as a recipe's ``objective`` names them."""

    loss: str = "lk"
    depth_decay: float = 0.8

    def shares(self, depths: int) -> Tensor:
        """The weight of every depth's mean loss [depths], summing to 1."""
        weights = self.depth_decay ** torch.arange(depths, dtype=torch.float32)
        return weights / weights.sum()

    def costs(self, looks: list[Look], places: int) -> list[Tensor]:
        """What every row of every depth costs [m], unweighted by depth; ``places`` counts the piece's rows."""
        return [LOSSES[self.loss](look) for look in looks]

    def side_costs(self, look: Look, loss: str | None) -> Tensor:
        """What every row of a side lesson costs [m]."""
        return LOSSES[loss or self.loss](look)
