"""MLP speculator (Wertheimer et al., 2404.19124; foundation-model-stack's fms-extras): a small recurrent network that starts
from the target's last hidden state and reads one token at every step, each step with weights of its own or all with one set.

Trained in two stages, which are a choice of data: on a text corpus first, then on the target's own generations.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from ..target import Features, Target
from .base import Depth, DraftHead, Guess, HeadConfig, Shape, marked

Part = TypeVar("Part", bound=nn.Module)


class MlpSpeculatorOptions(BaseModel):
    """The kind's own part of a recipe."""

    model_config = ConfigDict(extra="forbid")
    inner_dim: int | None = Field(default=None, ge=1, description="width of the state; null: the target's hidden size")
    tie_weights: bool = Field(default=False, description="one set of weights for all depths, the first projection apart")
    scale_input: bool = Field(default=False, description="norm the target's hidden state before it is read")


class ScaleShift(nn.Module):
    """The reference's parameterized layer norm as it is used there: a root-mean-square norm, times a scale, plus a shift.

    Nothing is centred: ``nn.LayerNorm`` computes something else.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * root_mean_square_norm(x) + self.bias


def root_mean_square_norm(x: Tensor) -> Tensor:
    size = x.float().pow(2).mean(-1, keepdim=True)
    return (x * torch.rsqrt(size + 1e-6)).to(x.dtype)


@dataclass
class MlpSpeculatorState:
    """The state [1, inner] below every node of this round's draft; the root's has read the last token of the text."""

    below: dict[int, Tensor] = field(default_factory=dict)


class MlpSpeculatorHead(DraftHead):
    """s_i = GELU(norm_i(P_i s_{i-1} + alpha * E_i(x_{t+1+i}))) with s_{-1} the target's last hidden state (after its final
    norm) at t; head i reads x_{t+2+i} from s_i.

    With E of variance 1 / inner, alpha makes the tokens' share of the sum grow so slowly that by the last of the head's
    depths half of the state's power is still the target's: alpha depends on how many depths there are.
    """

    kind = "mlp_speculator"
    Options = MlpSpeculatorOptions
    emb: Any  # each a list of one module a depth
    proj: Any
    head: Any
    ln: Any

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        tied, depths, inner = self.options.tie_weights, config.depths, self.width(config)
        if tied and depths < 2:
            raise UserError("tie_weights needs two depths at least: set head.depths to 2 or more, or tie_weights to false.")

        def each(count: int, make: Callable[[], Part]) -> list[Part]:
            return [make()] * count if tied else [make() for _ in range(count)]

        first = nn.Linear(config.target.hidden_size, inner, bias=False)
        self.emb = nn.ModuleList(each(depths, lambda: nn.Embedding(config.target.vocab_size, inner)))
        self.proj = nn.ModuleList([first, *each(depths - 1, lambda: nn.Linear(inner, inner, bias=False))])
        self.head = nn.ModuleList(each(depths, lambda: nn.Linear(inner, config.draft_vocab_size, bias=False)))
        self.ln = nn.ModuleList(each(depths, lambda: ScaleShift(inner)))
        kept = 0.5 ** (0.5 / depths)  # of the state's size, at every step: sqrt(1/2) after all of them
        self.alpha = ((1 - kept**2) * inner / 2) ** 0.5 / kept

    @classmethod
    def width(cls, config: HeadConfig) -> int:
        return config.options.get("inner_dim") or config.target.hidden_size

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        for module in (*self.emb, *self.proj, *self.head):
            nn.init.normal_(module.weight, std=self.width(self.config) ** -0.5)

    def start(self, last: Tensor) -> Tensor:
        """s_{-1} from last hidden states [n, hidden]."""
        last = last.to(self.head[0].weight.dtype)
        return root_mean_square_norm(last) * 0.5**0.5 if self.options.scale_input else last

    def step(self, depth: int, state: Tensor, tokens: Tensor) -> Tensor:
        """s_depth [n, inner] from the state before it and the tokens [n] that follow."""
        mixed = self.proj[depth](state) + self.alpha * self.emb[depth](tokens)
        return F.gelu(self.ln[depth](mixed))

    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        tokens, flat = ids.flatten(), marked(rows[0])
        state = self.start(features.last.flatten(0, 1)[flat])
        depths = []
        for depth, own in enumerate(rows):
            going_on = own.flatten()[flat]  # a row taught at a depth is taught at all before it
            flat, state = flat[going_on], state[going_on]
            state = self.stretch(self.step, depth, state, tokens[flat + 1 + depth])
            depths.append(Depth(flat, state, self.head[depth], ahead=1 + depth))
        return depths

    # -- drafting ----------------------------------------------------------------------------------------------

    @property
    def deepest(self) -> int:
        return self.config.depths

    def new_state(self) -> MlpSpeculatorState:
        return MlpSpeculatorState()

    def begin(self, state: MlpSpeculatorState, features: Features, ids: Tensor, target: Target) -> Guess:
        below = self.step(0, self.start(features.last[-1:]), ids[-1:])
        state.below = {0: below}
        return Guess(self.head[0](below), below)

    def deepen(self, state: MlpSpeculatorState, nodes: list[int], tokens: Tensor, shape: Shape, target: Target) -> Guess:
        depth = shape.depths[nodes[0]]
        above = torch.cat([state.below[shape.parents[node - 1]] for node in nodes])
        below = self.step(depth, above, tokens)
        state.below |= {node: below[i : i + 1] for i, node in enumerate(nodes)}
        return Guess(self.head[depth](below), below)
