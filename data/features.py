"""Where a head's inputs come from: today the frozen target itself, run as they are asked for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import UserError
from ..target import Features, Target
from .batches import collate
from .chat import Encoded

PAD = 0  # any id will do: padding stands on the right, where causal attention never looks, and the mask is False there


@dataclass
class FeatureBatch:
    """A batch on the target's device: ``ids`` int64 [batch, time], ``mask`` bool [batch, time] (supervised tokens) and
    ``features`` with taps [batch, time, n_taps * hidden] and last [batch, time, hidden]; zeros on the padding."""

    ids: Tensor
    mask: Tensor
    features: Features


class OnlineFeatures:
    """Hidden states straight from the target. A store of precomputed states offers the same ``batch`` method.

    With ``remember`` each row's states stay in host memory, unpadded and in the target's dtype, from the first time they
    are computed, so that later epochs do not run the target (``remembered_bytes`` tells how much that takes).
    Raises UserError for taps outside the target and for rows longer than its positions.
    """

    def __init__(self, target: Target, examples: Sequence[Encoded], taps: Sequence[int], remember: bool) -> None:
        target.check_taps(taps)
        longest = max((len(example.ids) for example in examples), default=0)
        if longest > target.max_positions:
            raise UserError(
                f"a conversation of {longest} tokens is longer than the {target.max_positions} positions of {target.name!r}: "
                f"set max_length to at most {target.max_positions}."
            )
        self.target = target
        self.examples = examples
        self.taps = tuple(taps)
        self.remember = remember
        self.remembered: dict[int, Features] = {}

    def batch(self, rows: list[int]) -> FeatureBatch:
        """Ids, mask and hidden states of the examples ``rows``; the target runs on those not remembered. Rows may be none."""
        batch = collate(self.examples, rows, PAD)
        known = {row: self.remembered[row] for row in rows if row in self.remembered}
        known |= self._compute([row for row in dict.fromkeys(rows) if row not in known])
        device, dtype = self.target.device, self.target.dtype
        if rows:
            taps = pad_sequence([known[row].taps.to(device) for row in rows], batch_first=True)
            last = pad_sequence([known[row].last.to(device) for row in rows], batch_first=True)
        else:
            taps = torch.zeros(0, 0, len(self.taps) * self.target.hidden_size, dtype=dtype, device=device)
            last = torch.zeros(0, 0, self.target.hidden_size, dtype=dtype, device=device)
        return FeatureBatch(batch.ids.to(device), batch.mask.to(device), Features(taps, last))

    def _compute(self, rows: list[int]) -> dict[int, Features]:
        """Each row's own states [time, ...], without padding."""
        if not rows:
            return {}
        states = self.target.features(collate(self.examples, rows, PAD).ids, self.taps)
        fresh = {row: states.rows((i, slice(len(self.examples[row].ids)))) for i, row in enumerate(rows)}
        if self.remember:  # a copy, or each view would keep its whole padded batch alive
            for row, own in fresh.items():
                self.remembered[row] = Features(own.taps.to("cpu", copy=True), own.last.to("cpu", copy=True))
        return fresh


def remembered_bytes(examples: Sequence[Encoded], target: Target, taps: Sequence[int]) -> int:
    """The bytes of host memory that remembering every example takes: (taps + 1) * hidden * bytes a number * tokens."""
    tokens = sum(len(example.ids) for example in examples)
    return (len(taps) + 1) * target.hidden_size * target.dtype.itemsize * tokens
