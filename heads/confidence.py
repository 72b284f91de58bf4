"""How sure a head is of a draft: an estimate, per position, of the chance that the target accepts it."""

import torch
from torch import Tensor, nn


class Confidence(nn.Module):
    """One linear map on the state that a draft's logits are read from (DSpark's confidence head).

    It learns the acceptance probability sum_v min(p_v, q_v) as a soft label. ``temperature`` [depths] calibrates it
    afterwards: logits at depth i are divided by temperature[i]; 1 is uncalibrated. It starts at 0, not at random: the
    problem is convex, and the head beside it draws the same random weights with it as without.
    """

    temperature: Tensor

    def __init__(self, width: int, depths: int) -> None:
        super().__init__()
        self.proj: nn.Linear = nn.utils.skip_init(nn.Linear, width, 1)  # type: ignore[assignment]
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)
        self.register_buffer("temperature", torch.ones(depths))

    def forward(self, states: Tensor) -> Tensor:
        """states [n, width] -> logits [n] of being accepted, given that all before it was."""
        return self.proj(states.to(self.proj.weight.dtype)).squeeze(-1)

    def probability(self, states: Tensor, depth: int) -> Tensor:
        """The calibrated chance [n] that a draft at ``depth`` (0-based) is accepted; beyond the last depth, as there."""
        return (self(states) / self.temperature[min(depth, len(self.temperature) - 1)]).sigmoid()
