"""One batch's loss and metrics: what a head predicts, beside the target's own rows, a piece of the rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from ..data.features import FeatureBatch
from ..heads.base import Depth, DraftHead
from ..target import Target
from .metrics import DepthSums
from .objectives import Look, Objective

SHARE = 1 / 16  # of the free memory, for the logits of one piece
MOST = {"cpu": 128, "cuda": 8192}  # rows of one piece: more fit no cache of a CPU, and fill any GPU


@dataclass
class Judge:
    """What ``DraftHead.forward`` makes of a batch's depths: its loss, a scalar with gradients, and its metrics.

    ``counts`` [maps]: by what the summed loss of every depth and side lesson is divided, its rows in the whole global
    batch. ``chunk``: rows at a time (None: from the free memory). Gradients are taken piece by piece, so that no more than
    one piece's logits exist at any time; the loss and its gradients are those of all rows at once.
    """

    batch: FeatureBatch
    target: Target
    objective: Objective
    counts: Tensor
    chunk: int | None = None

    def __call__(self, head: DraftHead, depths: list[Depth]) -> tuple[Tensor, DepthSums]:
        own = [depth for depth in depths if depth.side is None]
        device = self.batch.ids.device
        sums = DepthSums.zeros(len(own), device)
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        inputs = [*(depth.states for depth in depths), *trained]
        slopes: list[Tensor | None] = [None] * len(inputs)
        total = torch.zeros((), device=device)
        learns = torch.is_grad_enabled()
        into = [torch.zeros_like(depth.states) for depth in depths] if learns else []
        for cuts in self.pieces(depths):
            pieces = [depth.states[cut].detach().requires_grad_(learns) for depth, cut in zip(depths, cuts, strict=True)]
            value, found = self.piece(head, depths, cuts, pieces)
            total = total + value.detach()
            sums.add(found)
            if learns:
                grads = torch.autograd.grad(value, [*pieces, *trained], allow_unused=True)
                for slope, cut, grad in zip(into, cuts, grads, strict=False):
                    slope[cut] = 0 if grad is None else grad
                for i, grad in enumerate(grads[len(depths) :], start=len(depths)):
                    if grad is not None:
                        slopes[i] = grad if slopes[i] is None else slopes[i] + grad
        if learns:
            total = Known.apply(total, [*into, *slopes[len(depths) :]], *inputs)
        for depth, weight in zip(depths, self.weights(depths), strict=True):
            if depth.extra is not None:
                total = total + weight * depth.extra.sum()
        return total, sums

    def weights(self, depths: list[Depth]) -> list[Tensor]:
        """What a row's cost is multiplied by, depth by depth and side lesson by side lesson."""
        shares = iter(self.objective.shares(sum(depth.side is None for depth in depths)).tolist())
        wanted = [next(shares) if depth.side is None else depth.side.weight for depth in depths]
        return [weight / count.clamp_min(1) for weight, count in zip(wanted, self.counts, strict=True)]

    def pieces(self, depths: list[Depth]) -> Iterator[list[slice]]:
        """Which slice of every depth's rows belongs to a piece; there is at least one piece, if an empty one."""
        rows = torch.cat([depth.rows for depth in depths]).unique()
        size = self.chunk or self.fitting(len(depths))
        bounds = [*rows[::size].tolist(), self.batch.ids.numel()] if len(rows) else [0, 0]
        ends = torch.tensor(bounds, device=rows.device)
        cuts = [torch.searchsorted(depth.rows, ends).tolist() for depth in depths]
        for i in range(len(bounds) - 1):
            yield [slice(cut[i], cut[i + 1]) for cut in cuts]

    def fitting(self, depths: int) -> int:
        """How many rows fit: each costs its teacher's row and every depth's logits, a few times over."""
        device = self.batch.ids.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
        per_row = 4 * 4 * self.target.vocab_size * (1 + depths)
        return max(16, min(int(free * SHARE / per_row), MOST.get(device.type, 1024)))

    def piece(self, head: DraftHead, depths: list[Depth], cuts: list[slice], states: list[Tensor]) -> tuple[Tensor, DepthSums]:
        """The weighted loss of one piece of the rows, and its metrics."""
        rows = [depth.rows[cut] for depth, cut in zip(depths, cuts, strict=True)]
        places, place = torch.cat(rows).unique(return_inverse=True)
        ahead = torch.cat([own + depth.ahead for own, depth in zip(rows, depths, strict=True)])
        teacher = Teacher(self.batch, self.target, head.target_ids, ahead)
        looks = [
            self.look(head, depth, own, state, teacher, where)
            for depth, own, state, where in zip(depths, rows, states, place.split([len(own) for own in rows]), strict=True)
        ]
        own = [look for look, depth in zip(looks, depths, strict=True) if depth.side is None]
        costs = iter(self.objective.costs(own, len(places)))
        loss, sums = torch.zeros((), device=places.device), DepthSums.zeros(len(own), places.device)
        alive = torch.ones(len(places), dtype=torch.bool, device=places.device)
        i = 0
        for depth, look, weight in zip(depths, looks, self.weights(depths), strict=True):
            if depth.side is not None:
                loss = loss + weight * self.objective.side_costs(look, depth.side.loss).sum()
                continue
            cost = next(costs)
            loss = loss + weight * cost.sum()
            alive = sums.count(i, look, cost, alive)
            i += 1
        return loss, sums

    def look(self, head: DraftHead, depth: Depth, rows: Tensor, states: Tensor, teacher: "Teacher", place: Tensor) -> Look:
        whole = depth.side is not None and depth.side.whole
        p, best = teacher.at(rows + depth.ahead, whole)
        labels = self.batch.ids.flatten()[rows + depth.ahead + 1]
        if not whole:
            to_draft = torch.full((self.target.vocab_size,), -1, device=labels.device)
            to_draft[head.target_ids] = torch.arange(len(head.target_ids), device=labels.device)
            labels, best = to_draft[labels], to_draft[best]
        return Look(depth.readout(states).float(), p, labels, best, place)


class Teacher:
    """The target's distributions at some flat positions (batch x time): float32 [positions, vocab]."""

    @torch.no_grad()
    def __init__(self, batch: FeatureBatch, target: Target, target_ids: Tensor, positions: Tensor) -> None:
        self.positions = positions.unique()
        self.p = target.logits(batch.features.last.flatten(0, 1)[self.positions]).float().softmax(-1)
        self.drafted = self.p[:, target_ids]
        self.best = self.p.argmax(-1)

    def at(self, positions: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
        """p over the whole or the draft vocabulary [rows, ids], not renormalised, and the greedy token's id [rows]."""
        index = torch.searchsorted(self.positions, positions)
        return (self.p if whole else self.drafted)[index], self.best[index]


class Known(torch.autograd.Function):
    """A value whose gradients with respect to its inputs have been computed already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slopes: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.slopes = slopes
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if slope is None else slope * grad for slope in ctx.slopes)


def judged(
    head: Any, batch: FeatureBatch, target: Target, objective: Objective, rows: list[Tensor], counts: Tensor | None = None
) -> tuple[Tensor, DepthSums]:
    """The loss of a (wrapped) head on a batch and its metrics; ``counts`` None divides by the batch's own rows."""
    counts = torch.stack([own.sum() for own in rows]) if counts is None else counts
    judge = Judge(batch, target, objective, counts)
    return head(judge, batch.ids, rows, batch.features, target, batch.positions)
