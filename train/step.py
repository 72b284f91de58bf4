"""One batch's loss and metrics: what a head predicts, beside the target's own rows, a piece of the rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..data.features import FeatureBatch
from ..heads.base import Depth, DraftHead
from ..target import Target
from .metrics import DepthSums
from .objectives import Look, Objective, doubt, link

SHARE = 1 / 16  # of the free memory, for the logits of one piece
LEAST = 16  # rows of one piece, if they fit or not
MOST = {"cpu": 128, "cuda": 8192}  # rows of one piece: more fit no cache of a CPU, and fill any GPU


@dataclass
class Judge:
    """What ``DraftHead.forward`` makes of a batch's depths: its loss, a scalar with gradients, and its metrics.

    ``counts`` [maps]: by what the summed loss of every depth and side lesson is divided, its rows in the whole global
    batch. ``chunk``: rows at a time (None: set from the free memory). Gradients are taken piece by piece, so that no more than
    one piece's logits exist at any time; the loss and its gradients are those of all rows at once, but for rounding.
    ``recomputes``: they are taken in the backward pass, which computes every piece again. That is for ZeRO-3, whose parameters
    are there in the passes of their own module alone.
    """

    batch: FeatureBatch
    target: Target
    objective: Objective
    counts: Tensor
    chunk: int | None = None
    recomputes: bool = False

    def __call__(self, head: DraftHead, depths: list[Depth]) -> tuple[Tensor, DepthSums]:
        own = [depth for depth in depths if depth.side is None]
        device = self.batch.ids.device
        sums = DepthSums.zeros(len(own), device, len(depths) - len(own))
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        total = torch.zeros((), device=device)
        learns = torch.is_grad_enabled()
        into = [torch.zeros_like(depth.states) for depth in depths] if learns else []
        slopes: list[Tensor | None] = [None] * len(trained)
        weights = self.weights(depths)
        for cuts in self.pieces(head, depths):
            pieces = [depth.states[cut] for depth, cut in zip(depths, cuts, strict=True)]
            if self.recomputes and learns:
                value, found = checkpoint(self.piece, head, depths, weights, cuts, pieces, use_reentrant=False)
                total = total + value
                sums.add(found)
                continue
            pieces = [piece.detach().requires_grad_(learns) for piece in pieces]
            value, found = self.piece(head, depths, weights, cuts, pieces)
            total = total + value.detach()
            sums.add(found)
            if learns:
                grads = torch.autograd.grad(value, [*pieces, *trained], allow_unused=True)
                for slope, cut, grad in zip(into, cuts, grads[: len(depths)], strict=True):
                    slope[cut] = 0 if grad is None else grad
                for i, (known, grad) in enumerate(zip(slopes, grads[len(depths) :], strict=True)):
                    if grad is not None:
                        slopes[i] = grad.clone() if known is None else known.add_(grad)
                del grads, grad  # an lm_head's are as large as itself: none may wait for the next piece's
        if learns and not self.recomputes:
            total = Known.apply(total, [*into, *slopes], *(depth.states for depth in depths), *trained)
        for depth, weight in zip(depths, weights, strict=True):
            if depth.extra is not None:
                total = total + weight * depth.extra.sum()
        return total, sums

    def weights(self, depths: list[Depth]) -> list[Tensor]:
        """What a row's cost is multiplied by, depth by depth and side lesson by side lesson."""
        shares = iter(self.objective.shares(sum(depth.side is None for depth in depths)).tolist())
        wanted = [next(shares) if depth.side is None else depth.side.weight for depth in depths]
        return [weight / count.clamp_min(1) for weight, count in zip(wanted, self.counts, strict=True)]

    def pieces(self, head: DraftHead, depths: list[Depth]) -> Iterator[list[slice]]:
        """Which slice of every depth's rows belongs to a piece; there is at least one piece, if an empty one."""
        rows = torch.cat([depth.rows for depth in depths]).unique()
        self.chunk = self.chunk or self.fitting(head, depths)
        bounds = [*rows[:: self.chunk].tolist(), self.batch.ids.numel()] if len(rows) else [0, 0]
        ends = torch.tensor(bounds, device=rows.device)
        cuts = [torch.searchsorted(depth.rows, ends).tolist() for depth in depths]
        for i in range(len(bounds) - 1):
            yield [slice(cut[i], cut[i + 1]) for cut in cuts]

    def fitting(self, head: DraftHead, depths: list[Depth]) -> int:
        """How many rows fit into one piece."""
        sizes = [self.target.vocab_size if whole(depth) else len(head.target_ids) for depth in depths]
        return fitting_rows(self.batch.ids.device, row_bytes(self.target.vocab_size, sizes))

    def piece(
        self, head: DraftHead, depths: list[Depth], weights: list[Tensor], cuts: list[slice], states: list[Tensor]
    ) -> tuple[Tensor, DepthSums]:
        """The weighted loss of one piece of the rows, and its metrics."""
        rows = [depth.rows[cut] for depth, cut in zip(depths, cuts, strict=True)]
        places, place = torch.cat(rows).unique(return_inverse=True)
        ahead = torch.cat([own + depth.ahead for own, depth in zip(rows, depths, strict=True)])
        exact = self.objective.teacher == "full" or any(map(whole, depths)) or not torch.is_grad_enabled()
        teacher = Teacher(self.batch, self.target, head.target_ids, ahead, self.objective.temperature, exact)
        looks = [
            self.look(head, depth, own, logits, teacher, where)
            for depth, own, logits, where in zip(
                depths, rows, read_out(depths, states), place.split([len(own) for own in rows]), strict=True
            )
        ]
        own = [look for look, depth in zip(looks, depths, strict=True) if depth.side is None]
        link(own, len(places))
        costs = iter(self.objective.costs(own, len(places)))
        loss = torch.zeros((), device=places.device)
        sums = DepthSums.zeros(len(own), places.device, len(depths) - len(own))
        alive = torch.ones(len(places), dtype=torch.bool, device=places.device)
        i, side = 0, 0
        for depth, state, look, weight in zip(depths, states, looks, weights, strict=True):
            if depth.side is not None:
                cost = self.objective.cost(look, depth.side.loss or self.objective.loss).sum()
                loss = loss + weight * cost
                sums.side[side] += torch.stack([cost.detach(), cost.new_tensor(len(look.place))])
                side += 1
                continue
            cost = next(costs)
            loss = loss + weight * cost.sum()
            alive = sums.count(i, look, cost, alive)
            if head.confidence is not None:
                sure = head.confidence(state.detach()).float()
                loss = loss + weight * doubt(sure, look).sum()
                sums.count_sure(i, look, sure)
            i += 1
        return loss, sums

    def look(self, head: DraftHead, depth: Depth, rows: Tensor, logits: Tensor, teacher: "Teacher", place: Tensor) -> Look:
        p, best = teacher.at(rows + depth.ahead, whole(depth))
        labels = self.batch.ids.flatten()[rows + depth.ahead + 1]
        if not whole(depth):
            labels, best = draft_ids(labels, head.target_ids), draft_ids(best, head.target_ids)
        return Look(warmed(logits, self.objective.temperature), p, labels, best, place)


def row_bytes(vocab_size: int, sizes: list[int]) -> int:
    """Bytes of a row: its teacher's distribution, and the logits of every depth (``sizes``), a few times over."""
    return 4 * (3 * vocab_size + 8 * sum(sizes))


def fitting_rows(device: torch.device, per_row: int) -> int:
    """How many rows of so many bytes are one piece.

    A power of two, so that the sums are rounded alike from call to call while the free memory wavers.
    """
    fits = max(LEAST, min(int(free_memory(device) * SHARE / per_row), MOST.get(device.type, 1024)))
    return 1 << (fits.bit_length() - 1)


def free_memory(device: torch.device) -> int:
    """Bytes that are free, and on a GPU what torch itself keeps for reuse besides."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def read_out(depths: list[Depth], states: list[Tensor]) -> list[Tensor]:
    """Every depth's logits of its ``states``. Depths with one readout go through it together: its weights are read once."""
    shared: dict[Any, list[int]] = {}
    for i, depth in enumerate(depths):
        shared.setdefault(depth.readout, []).append(i)
    logits = list(states)
    for readout, members in shared.items():
        parts = readout(torch.cat([states[i] for i in members])).split([len(states[i]) for i in members])
        for i, part in zip(members, parts, strict=True):
            logits[i] = part
    return logits


def whole(depth: Depth) -> bool:
    """Whether a depth's logits range over the target's whole vocabulary, however small the head's own is."""
    return depth.side is not None and depth.side.whole


def warmed(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, in float32."""
    return logits.float() if temperature == 1 else logits.float() / temperature


def draft_ids(tokens: Tensor, target_ids: Tensor) -> Tensor:
    """The draft ids of the target's token ids; -1 where the draft vocabulary lacks one."""
    at = torch.searchsorted(target_ids, tokens).clamp_max(len(target_ids) - 1)
    return torch.where(target_ids[at] == tokens, at, -1)


class Teacher:
    """The target's distributions at some flat positions (batch x time): float32 [positions, vocab].

    Not ``exact``: as if the draft vocabulary were all there is, for which the target's other rows are not computed.
    """

    @torch.no_grad()
    def __init__(
        self, batch: FeatureBatch, target: Target, target_ids: Tensor, positions: Tensor, temperature: float, exact: bool = True
    ) -> None:
        self.positions = positions.unique()
        logits = target.logits(batch.features.last.flatten(0, 1)[self.positions], None if exact else target_ids)
        self.p = warmed(logits, temperature).softmax(-1)
        self.best = self.p.argmax(-1) if exact else target_ids[self.p.argmax(-1)]
        self.drafted = self.p[:, target_ids] if self.p.shape[1] > len(target_ids) else self.p

    def at(self, positions: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
        """p over the whole or the draft vocabulary [rows, ids], not renormalised, and the greedy token's id [rows]."""
        index: Any = torch.searchsorted(self.positions, positions)
        if len(index) and (first := int(index[0])) + len(index) == int(index[-1]) + 1:
            index = slice(first, first + len(index))  # rows without a gap, as most are, need no copy of p
        return (self.p if whole else self.drafted)[index], self.best[index]


class Known(torch.autograd.Function):
    """A value whose gradients with respect to its inputs have been computed already: they are handed on once, not copied."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slopes: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.slopes = slopes
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slopes, ctx.slopes = ctx.slopes, None  # the graph lives as long as its loss does, through the optimizer's step
        return None, None, *(None if slope is None else slope.mul_(grad) for slope in slopes)


def judged(
    head: Any, batch: FeatureBatch, target: Target, objective: Objective, rows: list[Tensor], counts: Tensor | None = None
) -> tuple[Tensor, DepthSums]:
    """The loss of a (wrapped) head on a batch and its metrics; ``counts`` None divides by the batch's own rows."""
    counts = torch.stack([own.sum() for own in rows]) if counts is None else counts
    judge = Judge(batch, target, objective, counts)
    return head(judge, batch.ids, rows, batch.features, target, batch.positions)
