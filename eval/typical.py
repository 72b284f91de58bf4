"""Medusa's typical acceptance (Cai et al., 2401.10774): the one rule here that changes the target's text."""

import math
from dataclasses import dataclass

from torch import Tensor
from torch.special import entr

from ..errors import UserError
from ..heads.base import Draft


@dataclass(frozen=True)
class Typical:
    """A drafted token is accepted where the target gives it more than min(``eps``, ``delta`` · e^(-H)), H the entropy (in
    nats) of the target's row. Medusa's own numbers are 0.09 and its root, 0.3."""

    eps: float
    delta: float

    @property
    def name(self) -> str:
        return f"typical acceptance ε={self.eps:.3g} δ={self.delta:.3g}"


def read_typical(text: str) -> Typical:
    """``EPS`` or ``EPS,DELTA``; delta is the root of eps unless given."""
    try:
        eps, *rest = (float(part) for part in text.split(","))
        (delta,) = rest or [math.sqrt(eps)]
    except ValueError as error:
        raise UserError(f"--lossy-typical {text!r} cannot be read: write EPS or EPS,DELTA, such as 0.09,0.3.") from error
    if not (0 < eps < 1 and 0 < delta < math.inf):
        raise UserError(f"--lossy-typical {text!r} accepts all or nothing: write 0 < EPS < 1 and DELTA > 0, such as 0.09,0.3.")
    return Typical(eps, delta)


def accept_typical(logits: Tensor, probs: Tensor, draft: Draft, typical: Typical) -> tuple[list[int], int]:
    """The longest path of accepted nodes (root first), of equal ones that with the highest probability, and the target's
    likeliest token behind it. ``logits`` and ``probs`` [nodes + 1, V]: the target's rows, raw and as they are drawn from."""
    threshold = (typical.delta * (-entr(probs).sum(-1)).exp()).clamp_max(typical.eps).tolist()
    chances = probs[list(draft.shape.parents), draft.tokens].tolist()
    best, ends = 0, {0: (0, 0.0)}  # of every reached node: its depth and log-probability
    for node, (parent, chance) in enumerate(zip(draft.shape.parents, chances, strict=True), start=1):
        if parent in ends and chance > threshold[parent]:
            depth, score = ends[parent]
            ends[node] = (depth + 1, score + math.log(chance))
            best = max(best, node, key=ends.__getitem__)
    path = [best]
    while path[-1]:
        path.append(draft.shape.parents[path[-1] - 1])
    return path[::-1], int(logits[best].argmax())
