"""What a head is taught at one depth: a loss per supervised row, from draft logits and the target's own distribution.

p is the target's row over its whole vocabulary, q the head's over the draft vocabulary. The overlap
alpha = sum_v min(p_v, q_v) over the draft vocabulary is the chance that a sampled draft is accepted; mass of p outside the
draft vocabulary is lost. Everything is computed in float32: in bfloat16 these gradients are mostly noise.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def kl(logits: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """Forward KL(p' || q) [rows], p' being p restricted to the draft vocabulary and renormalised.

    Its gradients are those of EAGLE-3's soft cross-entropy.
    """
    restricted = p / p.sum(-1, keepdim=True).clamp_min(1e-20)
    return (restricted * (restricted.clamp_min(1e-20).log() - logits.log_softmax(-1))).sum(-1)


def lk(logits: Tensor, p: Tensor, labels: Tensor, eta: float = 3.0) -> Tensor:
    """The acceptance-aware hybrid lambda * KL + (1 - lambda) * (1 - alpha) [rows], lambda = exp(-eta * alpha) (LK losses).

    Far from the target it is KL, which trains from cold; near it, the rejection probability itself.
    """
    alpha = torch.minimum(p, logits.softmax(-1)).sum(-1)
    weight = (-eta * alpha.detach()).exp()
    return weight * kl(logits, p, labels) + (1 - weight) * (1 - alpha)


def ce(logits: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy [rows] on the data's own next token (Medusa-1); a token outside the draft vocabulary (-1) gives 0."""
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="none")


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {"kl": kl, "lk": lk, "ce": ce}
