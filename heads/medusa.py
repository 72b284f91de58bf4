"""Medusa (Cai et al., 2401.10774): K heads beside the output head, each a few residual blocks on the last hidden state.

Medusa-1 leaves the target as it is. Medusa-2 trains a low-rank adapter on it beside the heads, which then read the adapted
target's states; the target without the adapter teaches both.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from ..target import Features, Target
from .adapters import Adapter, sizes
from .base import Depth, DraftHead, Guess, HeadConfig, Shape, Side, marked

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraOptions(BaseModel):
    """Medusa-2's adapter; the sizes are those of the published configs.

    ``modules``: ends of the names of the target's linear modules that are adapted, or "all-linear". The output head is not
    among them by default: every tied target would be pulled apart, and few engines serve an adapted one. ``base_weight``:
    the weight of keeping the adapted target's own next token, where all heads together weigh 1. ``heads_lr``: the learning
    rate of the heads as a multiple of the recipe's, which is the adapter's.
    """

    model_config = ConfigDict(extra="forbid")
    rank: int = Field(default=32, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    dropout: float = Field(default=0.05, ge=0, lt=1)
    modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = LINEAR
    base_weight: float = Field(default=2.0, ge=0)
    heads_lr: float = Field(default=4.0, gt=0)


class MedusaOptions(BaseModel):
    """The kind's own part of a recipe. ``lm_head`` "shared" applies the target's frozen output head to every block's
    output; "own" trains one per head, over the draft vocabulary. ``lora`` null is Medusa-1."""

    model_config = ConfigDict(extra="forbid")
    blocks: int = Field(default=1, ge=1)
    lm_head: Literal["shared", "own"] = "own"
    init_lm_head: Literal["random", "target"] = "target"
    lora: LoraOptions | None = None


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
    """Head i predicts x_{t+2+i} from the target's last hidden state (after its final norm) at t: with ``lora`` the adapted
    target's, whose next token is a side lesson."""

    kind = "medusa"
    Options = MedusaOptions
    lm_heads: Any  # one a depth, where lm_head is "own"
    adapter: Any  # Medusa-2's

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
        if lora := self.options.lora:
            self.adapter = Adapter(config.layer["adapted"], lora.rank, lora.alpha, lora.dropout)

    @classmethod
    def layer_config(cls, target: Target, options: Any) -> dict[str, Any]:
        """``adapted``: [inputs, outputs] of every adapted module of the target by its name."""
        if not options.lora:
            return {}
        adapted = sizes(target, options.lora.rank, options.lora.modules)
        if options.lm_head == "shared" and any(target.model.get_submodule(name) is target.output_head for name in adapted):
            raise UserError(
                "the heads share the target's output head as it is: leave it out of lora.modules, or set lm_head: own."
            )
        return {"adapted": adapted}

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        if self.options.lm_head == "own" and self.options.init_lm_head == "target":
            rows = target.output_head.weight[self.target_ids.to(target.device)]
            for lm_head in self.lm_heads:
                lm_head.weight.copy_(rows)

    def entered(self, last: Tensor) -> Tensor:
        """The target's states in the heads' own dtype."""
        return last.to(next(self.blocks.parameters()).dtype)

    def guess(self, depth: int, last: Tensor, target: Target) -> Guess:
        """Head ``depth`` on last hidden states [n, hidden]."""
        states = self.blocks[depth](self.entered(last))
        return Guess(self.readout(depth, target)(states), states)

    def readout(self, depth: int, target: Target) -> Callable[[Tensor], Tensor]:
        return self.lm_heads[depth] if self.options.lm_head == "own" else target.logits

    def adapted_logits(self, target: Target, states: Tensor) -> Tensor:
        """What the adapted target's output head says of states [n, hidden]."""
        with self.adapted(target):
            return target.logits(states)

    def taught(self, ids: Tensor, mask: Tensor, seed: int) -> list[Tensor]:
        """With adapters one map more: the rows whose next token is the assistant's, for what the adapted target says of it."""
        following = [F.pad(mask[:, 1:], (0, 1))] if self.adapts else []
        return [*super().taught(ids, mask, seed), *following]

    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        last = self.adapted_last(ids, target, positions) if self.adapts else features.last
        last = last.flatten(0, 1)
        flat = [marked(own) for own in rows]
        heads = [
            Depth(own, self.stretch(self.blocks[depth], self.entered(last[own])), self.readout(depth, target), ahead=1 + depth)
            for depth, own in enumerate(flat[: self.config.depths])
        ]
        kept = [
            Depth(own, last[own], partial(self.adapted_logits, target), 0, side=Side(self.options.lora.base_weight, "kl", True))
            for own in flat[self.config.depths :]
        ]
        return [*heads, *kept]

    def adapted_last(self, ids: Tensor, target: Target, positions: Tensor | None) -> Tensor:
        """The adapted target's last hidden states [batch, time, hidden] with gradients, in the precision that serves them."""
        with self.adapted(target), torch.autocast(target.device.type, enabled=False):
            return target.run(ids, [], positions).last

    # -- the adapted target ------------------------------------------------------------------------------------

    def recompute(self) -> None:
        if self.adapts:
            raise UserError(
                "medusa with lora trains inside the target, which gradient checkpointing does not reach: set "
                "train.gradient_checkpointing to false and lower train.micro_batch_size."
            )
        super().recompute()

    @property
    def adapts(self) -> bool:
        return self.options.lora is not None

    @contextmanager
    def adapted(self, target: Target) -> Iterator[None]:
        """Inside, the target runs with this head's adapter; may be entered again inside itself, and is left by any way out.

        Raises UserError for a target that carries adapters of its own or lies on several devices.
        """
        if not self.adapts:
            yield
            return
        with self.adapter.on(target):
            yield

    def rate(self, name: str) -> float:
        return self.options.lora.heads_lr if self.adapts and not name.startswith("adapter.") else 1.0

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
        return self.guess(shape.depths[nodes[0]], state.last, target).repeated(0, nodes)
