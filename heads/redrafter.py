"""ReDrafter (Apple, 2403.09919): a recurrent state over the drafted tokens beside the target's last hidden state.

Context c is the target's last hidden state at t and stays what it is; state s starts at zero and reads a token a step:
s = SiLU(W e + U s + b), or, without ``rnn``, the plain sum of embeddings. The same weights serve every depth.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from ..target import Features, Target
from .base import Depth, DraftHead, Guess, HeadConfig, Shape, marked
from .medusa import ResidualBlock


class RedrafterOptions(BaseModel):
    """The kind's own part of a recipe. ``exit_dim`` is the width of the residual blocks; null: that of [c, s], twice the
    target's, for which no projection is needed."""

    model_config = ConfigDict(extra="forbid")
    rnn: bool = True
    num_layers: int = Field(default=2, ge=1)
    exit_dim: int | None = Field(default=None, ge=1)
    init_lm_head: Literal["random", "target"] = "target"


@dataclass
class RedrafterState:
    """The context [1, hidden] of the last committed row, and the recurrent state [1, hidden] of every node of this round."""

    context: Tensor | None = None
    recurrent: dict[int, Tensor] = field(default_factory=dict)


class RedrafterHead(DraftHead):
    """[c, s] -> (projection) -> residual blocks -> lm_head over the draft vocabulary; the target's embedding is read."""

    kind = "redrafter"
    Options = RedrafterOptions

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        hidden, width = config.target.hidden_size, self.width(config)
        if width != 2 * hidden:
            self.input_proj = nn.Linear(2 * hidden, width)
        blocks = [ResidualBlock(width) for _ in range(self.options.num_layers)]
        self.lm_head = nn.Sequential(*blocks, nn.Linear(width, config.draft_vocab_size, bias=False))
        if self.options.rnn:
            self.rnn_u = nn.Linear(hidden, hidden)
            self.rnn_w = nn.Linear(hidden, hidden, bias=False)

    @classmethod
    def width(cls, config: HeadConfig) -> int:
        return config.options.get("exit_dim") or 2 * config.target.hidden_size

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        """A warm lm_head reads the context alone, as the target's own does: a fresh head repeats the target's last guess,
        which it must only learn to move on from. The blocks start as identities."""
        if self.options.init_lm_head == "random":
            return
        hidden, width = target.hidden_size, self.width(self.config)
        if width < hidden:
            raise UserError(
                f"init_lm_head: target needs an exit_dim of at least the target's width {hidden}, not {width}: "
                "set head.options.init_lm_head to random."
            )
        if width != 2 * hidden:
            self.input_proj.weight[:hidden].copy_(torch.eye(hidden, 2 * hidden))
            self.input_proj.bias[:hidden].zero_()
        readout = self.lm_head[-1].get_parameter("weight")
        readout[:, hidden:].zero_()
        readout[:, :hidden].copy_(target.output_head.weight[self.target_ids.to(target.device)])

    def advance(self, embeds: Tensor, state: Tensor) -> Tensor:
        """The recurrent state [n, hidden] behind one more token of embedding [n, hidden]."""
        embeds = embeds.to(state.dtype)
        return F.silu(self.rnn_w(embeds) + self.rnn_u(state)) if self.options.rnn else embeds + state

    def exit(self, context: Tensor, state: Tensor) -> Tensor:
        """What logits are read from [n, width]."""
        joined = torch.cat([context.to(state.dtype), state], dim=-1)
        return self.lm_head[:-1](self.input_proj(joined) if self.width(self.config) != joined.shape[-1] else joined)

    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        flat = marked(torch.stack(rows).any(0))  # every row that some depth teaches
        context, after, depths = features.last.flatten(0, 1)[flat], ids, []
        state = torch.zeros(len(flat), target.hidden_size, dtype=next(self.parameters()).dtype, device=ids.device)
        for step, own in enumerate(rows):
            after = F.pad(after[:, 1:], (0, 1))  # x_{t+1+step} at index t
            state = self.stretch(self.advance, target.embed(after.flatten()[flat]), state)
            taught = own.flatten()[flat]
            states = self.stretch(self.exit, context[taught], state[taught])
            depths.append(Depth(flat[taught], states, self.lm_head[-1], ahead=1 + step))
        return depths

    # -- drafting ----------------------------------------------------------------------------------------------

    def new_state(self) -> RedrafterState:
        return RedrafterState()

    def begin(self, state: RedrafterState, features: Features, ids: Tensor, target: Target) -> Guess:
        state.context = features.last[-1:]
        zero = torch.zeros_like(state.context, dtype=next(self.parameters()).dtype)
        state.recurrent = {0: self.advance(target.embed(ids[-1:]), zero)}
        return self.guess(state, [0])

    def deepen(self, state: RedrafterState, nodes: list[int], tokens: Tensor, shape: Shape, target: Target) -> Guess:
        before = torch.cat([state.recurrent[shape.parents[node - 1]] for node in nodes])
        after = self.advance(target.embed(tokens), before)
        state.recurrent |= {node: after[i : i + 1] for i, node in enumerate(nodes)}
        return self.guess(state, nodes)

    def guess(self, state: RedrafterState, nodes: list[int]) -> Guess:
        assert state.context is not None, "begin comes first"
        recurrent = torch.cat([state.recurrent[node] for node in nodes])
        states = self.exit(state.context.expand(len(nodes), -1), recurrent)
        return Guess(self.lm_head[-1](states), states)
