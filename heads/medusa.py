"""Medusa-1 (Cai et al., 2401.10774): K heads beside the output head, each a few residual blocks on the last hidden state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from ..target import Features, Target
from .base import Depth, DraftHead, Guess, HeadConfig, Shape


class MedusaOptions(BaseModel):
    """The kind's own part of a recipe. ``lm_head`` "shared" applies the target's frozen output head to every block's
    output; "own" trains one per head, over the draft vocabulary."""

    model_config = ConfigDict(extra="forbid")
    blocks: int = Field(default=1, ge=1)
    lm_head: Literal["shared", "own"] = "own"
    init_lm_head: Literal["random", "target"] = "target"


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b); zero at first, so that a fresh block passes the hidden state through."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


@dataclass
class MedusaState:
    """The last hidden state [1, hidden] of the last committed row: all that is needed, nothing grows."""

    last: Tensor | None = None


class MedusaHead(DraftHead):
    """Head i predicts x_{t+2+i} from the target's last hidden state (after its final norm) at t."""

    kind = "medusa"
    Options = MedusaOptions
    lm_heads: Any  # one a depth, where lm_head is "own"

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width = config.target.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width) for _ in range(self.options.blocks))) for _ in range(config.depths)
        )
        if self.options.lm_head == "own":
            self.lm_heads = nn.ModuleList(nn.Linear(width, config.draft_vocab_size, bias=False) for _ in range(config.depths))
        elif config.draft_vocab_size != config.target.vocab_size:
            raise UserError(
                "a shared lm_head has the target's vocabulary: set head.draft_vocab to null or options.lm_head to own."
            )

    @classmethod
    def default_taps(cls, target: Target) -> list[int]:
        return []

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        if self.options.lm_head == "own" and self.options.init_lm_head == "target":
            rows = target.output_head.weight[self.target_ids.to(target.device)]
            for lm_head in self.lm_heads:
                lm_head.weight.copy_(rows)

    def guess(self, depth: int, last: Tensor, target: Target) -> Guess:
        """Head ``depth`` on last hidden states [n, hidden]."""
        states = self.blocks[depth](last.to(next(self.parameters()).dtype))
        return Guess(self.readout(depth, target)(states), states)

    def readout(self, depth: int, target: Target) -> Callable[[Tensor], Tensor]:
        return self.lm_heads[depth] if self.options.lm_head == "own" else target.logits

    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        depths = []
        for depth, own in enumerate(rows):
            flat = own.flatten().nonzero().squeeze(1)
            last = features.last.flatten(0, 1)[flat].to(next(self.parameters()).dtype)
            depths.append(Depth(flat, self.blocks[depth](last), self.readout(depth, target), ahead=1 + depth))
        return depths

    # -- drafting ----------------------------------------------------------------------------------------------

    @property
    def deepest(self) -> int:
        return self.config.depths

    def new_state(self) -> MedusaState:
        return MedusaState()

    def begin(self, state: MedusaState, features: Features, ids: Tensor, target: Target) -> Guess:
        state.last = features.last[-1:]
        return self.guess(0, state.last, target)

    def deepen(self, state: MedusaState, nodes: list[int], tokens: Tensor, shape: Shape, target: Target) -> Guess:
        assert state.last is not None, "begin comes first"
        guess = self.guess(shape.depths[nodes[0]], state.last, target)
        return Guess(guess.logits.expand(len(nodes), -1), guess.states.expand(len(nodes), -1))
