"""One batch's losses and metrics: the head's forward, the target's teacher rows, the objective at every depth."""

from typing import Any

import torch
from torch import Tensor

from ..data.features import FeatureBatch
from ..target import Target
from .metrics import DepthSums
from .objectives import Loss

CHUNK = 128  # teacher rows at a time: a whole batch's rows over the whole vocabulary would not fit any cache


class Teacher:
    """The target's distribution at the positions of one batch that are supervised at any depth."""

    def __init__(self, batch: FeatureBatch, target: Target, target_ids: Tensor) -> None:
        following = torch.nn.functional.pad(batch.mask[:, 1:], (0, 1)).flatten()  # x_{s+1} is the assistant's
        wanted = following.nonzero().squeeze(1)
        self.index = torch.full_like(following, -1, dtype=torch.long)
        self.index[wanted] = torch.arange(len(wanted), device=wanted.device)
        last = batch.features.last.flatten(0, 1)[wanted]
        self.p = torch.empty(len(wanted), len(target_ids), device=last.device)
        self.best = torch.empty(len(wanted), dtype=torch.long, device=last.device)
        with torch.no_grad():
            for first in range(0, len(wanted), CHUNK):
                rows = slice(first, first + CHUNK)
                logp = target.logits(last[rows]).float().log_softmax(-1)
                self.best[rows] = logp.argmax(-1)
                self.p[rows] = logp[:, target_ids].exp()

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """p [rows, draft vocab] and the greedy token [rows] at flat positions (batch x time)."""
        index = self.index[positions]
        return self.p[index], self.best[index]


def depth_sums(head: Any, batch: FeatureBatch, target: Target, target_ids: Tensor, loss: Loss) -> tuple[Tensor, DepthSums]:
    """Losses summed over rows [depths], with gradients, and the batch's metrics.

    ``head`` is the (wrapped) draft head. Without supervised rows the losses are sums over nothing, zero but still connected
    to every parameter, so that a rank with nothing to teach takes part in the all-reduce with zero gradients.
    """
    depths = head(batch.ids, batch.mask, batch.features, target, batch.positions)
    teacher = Teacher(batch, target, target_ids)
    to_draft = torch.full((target.vocab_size,), -1, device=target_ids.device).index_copy(
        0, target_ids, torch.arange(len(target_ids), device=target_ids.device)
    )
    ids = batch.ids.flatten()
    sums = DepthSums.zeros(len(depths), ids.device)
    losses = []
    alive = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for i, depth in enumerate(depths):
        logits = depth.logits.float()
        p, best = teacher.at(depth.rows + 1 + i)
        value = loss(logits, p, to_draft[ids[depth.rows + 2 + i]]).sum()
        losses.append(value)
        with torch.no_grad():
            right = target_ids[logits.argmax(-1)] == best
            prefix = right if i == 0 else right & alive[depth.rows]
            alive = torch.zeros_like(alive).index_put((depth.rows,), prefix)
            sums.loss[i], sums.right[i], sums.prefix[i] = value.detach(), right.sum(), prefix.sum()
            sums.rows[i] = len(depth.rows)
    return torch.stack(losses), sums
