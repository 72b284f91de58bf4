"""What a head is taught: a cost per row and depth, from draft logits and the target's own distribution.

p is the target's row over its whole vocabulary, q the head's over the draft vocabulary. The overlap
alpha = sum_v min(p_v, q_v) over the draft vocabulary is the chance that a sampled draft is accepted; mass of p outside the
draft vocabulary is lost. p' is p restricted to the draft vocabulary and renormalised. Everything is computed in float32: in
bfloat16 these gradients are mostly noise. docs/objectives.md says what each was worth.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

TINY = 1e-30  # stands for 0 where a logarithm is taken
SMOOTHING = 0.5  # D-PACE's: what a depth's confidence is mixed with, so that one bad depth does not silence those behind it


@dataclass
class Look:
    """One depth's rows of one piece: ``logits`` and ``p`` [m, draft vocab] float32 (p not renormalised), ``labels`` and
    ``best`` [m], the draft ids of the data's token and of the target's greedy one (-1 outside the draft vocabulary), and
    ``place`` [m], which of the piece's rows each is, so that depths of one row can be told to belong together.

    ``reach`` [m] is the product of the same row's overlaps at the depths before: the chance that a draft gets this far.
    """

    logits: Tensor
    p: Tensor
    labels: Tensor
    best: Tensor
    place: Tensor
    reach: Tensor = field(default_factory=lambda: torch.ones(()))

    @cached_property
    def logq(self) -> Tensor:
        """log q [m, draft vocab]."""
        return self.logits.log_softmax(-1)

    @cached_property
    def q(self) -> Tensor:
        """[m, draft vocab]."""
        return self.logq.exp()

    @cached_property
    def mass(self) -> Tensor:
        """p's mass in the draft vocabulary [m]."""
        return self.p.sum(-1)

    @cached_property
    def alpha(self) -> Tensor:
        """The overlap [m]. Written with relu, whose backward is several times faster than that of minimum."""
        return self.mass - (self.p - self.q).relu().sum(-1)


def kl(look: Look) -> Tensor:
    """Forward KL(p' || q) [rows]. Its gradients are those of EAGLE-3's soft cross-entropy (2503.01840)."""
    return divergence(look.p, look.logq, look.mass)


def kl_top(look: Look, top_k: int = 10) -> Tensor:
    """KL on the target's ``top_k`` likeliest tokens alone [rows]: p' is cut off behind them, and not renormalised again.

    Its gradients are those of HASS's top-k loss -sum_{v in top k} p'_v log q_v (2408.15766).
    """
    p, ids = look.p.topk(min(top_k, look.p.shape[-1]), dim=-1)
    return divergence(p, look.logq.gather(-1, ids), look.mass)


def divergence(p: Tensor, logq: Tensor, mass: Tensor) -> Tensor:
    """sum_v p_v (log(p_v / sum p) - log q_v) / mass [rows]: 0 where p is nothing but 0."""
    own = p.sum(-1)
    entropy = torch.linalg.vecdot(p, p.clamp_min(TINY).log()) - own * own.clamp_min(TINY).log()
    return (entropy - torch.linalg.vecdot(p, logq)) / mass.clamp_min(TINY)


def rkl(look: Look) -> Tensor:
    """Reverse KL(q || p') [rows]: drafts what the target surely says, and leaves out what it only may say (MiniLLM,
    2306.08543). A row without mass in the draft vocabulary costs nothing."""
    logp = look.p.clamp_min(TINY).log() - look.mass.clamp_min(TINY).log()[:, None]
    return torch.linalg.vecdot(look.q, look.logq - logp) * (look.mass > 0)


def js(look: Look) -> Tensor:
    """Jensen-Shannon divergence of p' and q [rows], at most log 2 (Lin 1991): between both KLs."""
    p = look.p / look.mass.clamp_min(TINY)[:, None]
    log_middle = ((p + look.q) / 2).clamp_min(TINY).log()
    to_p = torch.linalg.vecdot(p, p.clamp_min(TINY).log() - log_middle)
    return (to_p + torch.linalg.vecdot(look.q, look.logq - log_middle)) / 2


def tv(look: Look) -> Tensor:
    """Total variation 1 - alpha [rows], the chance that a sampled draft is rejected; from cold its gradients vanish."""
    return 1 - look.alpha


def l1(look: Look) -> Tensor:
    """|| p - q ||_1 [rows] over the target's whole vocabulary: twice the total variation."""
    return 2 * tv(look)


def nla(look: Look) -> Tensor:
    """Negative log acceptance -log alpha [rows] (LK losses' alpha form, 2602.23881): the gradient of tv over alpha, which
    trains from cold. Computed from logarithms, so that no overlap is too small to learn from."""
    return -torch.minimum(look.p.clamp_min(TINY).log(), look.logq).logsumexp(-1)


def lk(look: Look, eta: float = 3.0) -> Tensor:
    """lambda * KL + (1 - lambda) * (1 - alpha) [rows], lambda = exp(-eta * alpha) without gradient (LK losses' hybrid,
    2602.23881).

    Far from the target it is KL, which trains from cold; near it, the rejection probability itself.
    """
    weight = (-eta * look.alpha.detach()).exp()
    return weight * kl(look) + (1 - weight) * tv(look)


def ce(look: Look) -> Tensor:
    """Cross-entropy [rows] on the data's own next token (Medusa-1); a token outside the draft vocabulary (-1) gives 0."""
    return -picked(look.logq, look.labels)


def ce_best(look: Look) -> Tensor:
    """Cross-entropy [rows] on the target's likeliest token; outside the draft vocabulary (-1) gives 0."""
    return -picked(look.logq, look.best)


def picked(values: Tensor, ids: Tensor) -> Tensor:
    """values[row, ids[row]] [rows]; 0 where the id is -1."""
    return values.gather(-1, ids.clamp_min(0)[:, None]).squeeze(-1) * (ids >= 0)


def dspark(look: Look) -> Tensor:
    """0.1 CE + 0.9 || p - q ||_1 [rows] (DSpark)."""
    return 0.1 * ce(look) + 0.9 * l1(look)


def e2e_tv(look: Look) -> Tensor:
    """1 - prod_{i <= j} alpha_i [rows]: the chance that a sampled draft of this row does not get past this depth j.

    The mean over g equally weighted depths is AngelSpec's 1 - (1/g) sum_j prod_{i <= j} alpha_i, which weighs depths by
    itself: depth_decay is 1.
    """
    return 1 - look.reach * look.alpha


LOSSES: dict[str, Callable[..., Tensor]] = {
    each.__name__: each for each in (kl, kl_top, rkl, js, tv, l1, nla, lk, ce, ce_best, dspark, e2e_tv)
}


def doubt(sure: Tensor, look: Look) -> Tensor:
    """What a confidence estimate costs [rows]: binary cross-entropy of its logits ``sure`` [rows] on the overlap (DSpark's
    soft label), times the chance that a draft gets here.

    A deeper row stands for a draft whose tokens before were the text's own, so it is seen at serving as often as those
    are accepted. Neither factor has a gradient: nothing but the estimate learns from this.
    """
    label = look.alpha.detach().clamp(0, 1)
    return binary_cross_entropy_with_logits(sure, label, reduction="none") * look.reach.detach()


# -- weights of rows, from what the other depths of the same row do -------------------------------------------------


def dpace(looks: list[Look], places: int) -> list[Tensor]:
    """D-PACE (2605.18810): w_j = sum_{m >= j} prod_{i <= m} ((1 - a) q_i + a), a = 0.5, q_i the head's own probability of
    the data's token.

    A depth's cross-entropy times w_j has the gradient of the (smoothed) expected length of accepted drafts.
    """
    sure = [(1 - SMOOTHING) * picked(look.q, look.labels) + SMOOTHING for look in looks]
    kept = table(sure, looks, places, 1.0).cumprod(1)
    there = table([torch.ones_like(own) for own in sure], looks, places, 0.0)
    return untabled((kept * there).flip(1).cumsum(1).flip(1), looks)


def cat(looks: list[Look], places: int) -> list[Tensor]:
    """PARD-2's confidence-adaptive weights (2605.08632): w_j = prod_{i < j} p(the data's token at depth i), the chance
    that the target's own text gets here. A token that the draft vocabulary lacks has probability 0: no draft gets past it.
    """
    return before([picked(look.p, look.labels) for look in looks], looks, places)


def until_fail(looks: list[Look], places: int) -> list[Tensor]:
    """Accept until fail (Spec-AUF, 2607.01893): 1 up to the row's first depth whose greedy draft is not the data's token,
    that depth included, and 0 behind it."""
    return before([(look.logits.argmax(-1) == look.labels).float() for look in looks], looks, places)


def before(values: list[Tensor], looks: list[Look], places: int) -> list[Tensor]:
    """The product of a row's values at all earlier depths [m], depth by depth."""
    products = table(values, looks, places, 1.0).cumprod(1)
    return untabled(torch.cat([torch.ones_like(products[:, :1]), products[:, :-1]], 1), looks)


def table(values: list[Tensor], looks: list[Look], places: int, missing: float) -> Tensor:
    """Values [m] of every depth in columns [places, depths]; ``missing`` where a row has no such depth."""
    found = torch.full((places, len(looks)), missing, device=looks[0].logits.device)
    for i, (own, look) in enumerate(zip(values, looks, strict=True)):
        found[look.place, i] = own
    return found


def untabled(values: Tensor, looks: list[Look]) -> list[Tensor]:
    """The inverse of ``table``."""
    return [values[look.place, i] for i, look in enumerate(looks)]


WEIGHTS: dict[str, Callable[[list[Look], int], list[Tensor]]] = {"dpace": dpace, "cat": cat, "until_fail": until_fail}


# -- the recipe's choice --------------------------------------------------------------------------------------------


@dataclass
class Objective:
    """The loss of every row and the weight of every row and depth, as a recipe's ``objective`` names them.

    ``loss``: a name in LOSSES, or several with their weights. ``depth_decay``: the weight of depth i is decay ** i, or
    exp(-i / gamma) of ``{"gamma": …}`` (DFlash, DSpark), or (1 + i) ** -power of ``{"power": …}``. ``weights``: a name in
    WEIGHTS. ``temperature``: by it the target's logits and the head's are divided, as serving divides both. ``teacher``:
    "full", or "draft", p renormalised over the draft vocabulary.
    """

    loss: str | dict[str, float] = "lk"
    depth_decay: float | dict[str, float] = 0.8
    weights: str | None = None
    temperature: float = 1.0
    eta: float | None = None
    top_k: int | None = None
    teacher: str = "full"

    def shares(self, depths: int) -> Tensor:
        """The weight of every depth's mean loss [depths], summing to 1."""
        depth = torch.arange(depths, dtype=torch.float32)
        decay = self.depth_decay
        if not isinstance(decay, dict):
            weights = decay**depth
        elif "gamma" in decay:
            weights = (-depth / decay["gamma"]).exp()
        else:
            weights = (1 + depth) ** -decay["power"]
        return weights / weights.sum()

    def costs(self, looks: list[Look], places: int) -> list[Tensor]:
        """What every row of every depth costs [m], unweighted by depth; ``places`` counts the piece's rows.

        Weights of rows have no gradient, and their sum divides nothing: a depth's mean stays over all its taught rows,
        which are known before the forward, so that no cut into pieces, micro-batches and processes changes anything.
        """
        costs = [self.cost(look, self.loss) for look in looks]
        if self.weights is None:
            return costs
        with torch.no_grad():
            weights = WEIGHTS[self.weights](looks, places)
        return [weight * cost for weight, cost in zip(weights, costs, strict=True)]

    def cost(self, look: Look, loss: str | dict[str, float]) -> Tensor:
        """What every row costs by ``loss`` [m]."""
        mix = {loss: 1.0} if isinstance(loss, str) else loss
        options = {"lk": {"eta": self.eta}, "kl_top": {"top_k": self.top_k}}
        given = {name: {key: value for key, value in options.get(name, {}).items() if value is not None} for name in mix}
        return torch.stack([weight * LOSSES[name](look, **given[name]) for name, weight in mix.items()]).sum(0)


def link(looks: list[Look], places: int) -> None:
    """Fill in every look's ``reach`` from the overlaps of the depths before it; ``places`` counts the piece's rows."""
    reach = torch.ones(places, device=looks[0].logits.device)
    for look in looks:
        look.reach = reach[look.place]
        reach = reach.index_put((look.place,), look.reach * look.alpha)
