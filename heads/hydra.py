"""Hydra (Ankner et al., 2402.05109; github.com/zankner/Hydra): Medusa heads that also read the tokens drafted before them.

Hydra++ is ``blocks: 4``, ``prefix: true``, ``dropout: 0.2`` and the teacher's own distribution (the ``kl`` objective).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from ..errors import UserError
from ..target import Features, Target
from .base import Depth, DraftHead, Guess, HeadConfig, Shape, counted, marked
from .layers import causal, llama_layer_config
from .medusa import ResidualBlock
from .warm import norm_scale


class HydraOptions(BaseModel):
    """The kind's own part of a recipe. ``lm_head`` "shared" applies the target's frozen output head to every head's output;
    "own" trains one per head, over the draft vocabulary, from the target's rows."""

    model_config = ConfigDict(extra="forbid")
    blocks: int = Field(default=1, ge=1)
    prefix: bool = Field(default=False, description="run a transformer layer over the target's last hidden states first")
    lm_head: Literal["shared", "own"] = "own"
    dropout: float = Field(default=0.0, ge=0, lt=1, description="in front of every block and of the lm_head")
    feature_weight: float = Field(default=0.0, ge=0, description="of the regression on the target's coming hidden states")
    noise: float = Field(default=0.0, ge=0, description="NEFTune's alpha: noise on what is read in training")


class FirstBlock(nn.Module):
    """Ax + SiLU(Wx + b) from a state and the embeddings behind it, [..., (1 + tokens) * width] -> [..., width].

    At first it passes the state through: W is zero, and A the identity on the state.
    """

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.residual = nn.Linear((1 + tokens) * width, width)
        self.linear = nn.Linear((1 + tokens) * width, width)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        with torch.no_grad():
            self.residual.weight[:, :width].fill_diagonal_(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + F.silu(self.linear(x))


class Prefix(nn.Module):
    """Hydra++'s look back: one Llama layer over the target's last hidden states, and a norm of its own."""

    def __init__(self, layer: dict[str, Any]) -> None:
        super().__init__()
        config = LlamaConfig(**layer)
        config._attn_implementation = "sdpa"
        self.layer = LlamaDecoderLayer(config, layer_idx=0)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)

    @torch.no_grad()
    def pass_through(self, size: float) -> None:
        """Make it give the states back, as far as their own root mean square is ``size``."""
        self.layer.self_attn.o_proj.weight.zero_()
        self.layer.mlp.down_proj.weight.zero_()
        self.norm.weight.fill_(size)

    def forward(self, hidden: Tensor, positions: Tensor, seen: Tensor, cache: DynamicCache | None = None) -> Tensor:
        """hidden [batch, rows, width], positions [batch, rows], seen [batch, 1, rows, cached + rows] -> [batch, rows, width].

        ``cache`` takes the rows' keys and values.
        """
        rotary = self.rotary(hidden, positions)
        return self.norm(self.layer(hidden, attention_mask=seen, position_embeddings=rotary, cache=cache))


@dataclass
class HydraState:
    """``read``: what the head below every node reads, [1, (2 + depth) * hidden]: the last committed row's state, then the
    embeddings along the node's own path. ``cache``: the prefix layer's keys and values of the committed rows alone."""

    read: dict[int, Tensor] = field(default_factory=dict)
    cache: DynamicCache = field(default_factory=DynamicCache)


class HydraHead(DraftHead):
    """Head i predicts x_{t+2+i} from the target's last hidden state (after its final norm, or behind the prefix layer) at t
    and the embeddings of x_{t+1} .. x_{t+1+i}."""

    kind = "hydra"
    Options = HydraOptions
    blocks: Any  # a list of blocks a depth
    lm_heads: Any  # one a depth, where lm_head is "own"

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width = config.target.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList([FirstBlock(width, depth + 1), *(ResidualBlock(width) for _ in range(self.options.blocks - 1))])
            for depth in range(config.depths)
        )
        self.dropout = nn.Dropout(self.options.dropout)
        self.prefix = Prefix(config.layer) if self.options.prefix else None
        if self.options.lm_head == "own":
            self.lm_heads = nn.ModuleList(nn.Linear(width, config.draft_vocab_size) for _ in range(config.depths))
        elif config.draft_vocab_size != config.target.vocab_size:
            raise UserError(
                "a shared lm_head has the target's vocabulary: set head.draft_vocab to null or options.lm_head to own."
            )

    @classmethod
    def layer_config(cls, target: Target, options: HydraOptions) -> dict[str, Any]:
        return llama_layer_config(target) if options.prefix else {}

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        """A fresh head says what the target says one token earlier: all in front of the target's own rows passes through."""
        if self.prefix is not None:
            self.prefix.pass_through(state_size(target))
        if self.options.lm_head == "own":
            ids = self.target_ids.to(target.device)
            bias = getattr(target.output_head, "bias", None)
            for lm_head in self.lm_heads:
                lm_head.weight.copy_(target.output_head.weight[ids])
                lm_head.bias.copy_(torch.zeros(len(ids)) if bias is None else bias[ids])

    def readout(self, depth: int, target: Target) -> Callable[[Tensor], Tensor]:
        return self.lm_heads[depth] if self.options.lm_head == "own" else target.logits

    def hidden(self, depth: int, x: Tensor) -> Tensor:
        """What head ``depth`` makes of a state and the embeddings behind it: [n, (2 + depth) * hidden] -> [n, hidden]."""
        for block in self.blocks[depth]:
            x = block(self.dropout(x))
        return x

    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        positions = counted(ids, positions)
        dtype = next(self.parameters()).dtype
        last, embeds = features.last.to(dtype), target.embed(ids).to(dtype)
        if self.training and self.options.noise:
            lengths = taught_lengths(rows[0], positions)
            embeds = neftune(embeds, self.options.noise, lengths)
            last = last if self.prefix is not None else neftune(last, self.options.noise, lengths)
        state = last if self.prefix is None else self.stretch(self.prefix, last, positions, causal(positions))
        state, embeds, coming = state.flatten(0, 1), embeds.flatten(0, 1), features.last.flatten(0, 1).detach()
        depths = []
        for depth, own in enumerate(rows):
            flat = marked(own)
            read = torch.cat([state[flat], *(embeds[flat + 1 + k] for k in range(depth + 1))], dim=-1)
            hidden = self.stretch(self.hidden, depth, read)
            extra = None
            if self.options.feature_weight:
                away = F.smooth_l1_loss(hidden.float(), coming[flat + 1 + depth].float(), reduction="none")
                extra = self.options.feature_weight * away.mean(-1)
            depths.append(Depth(flat, self.dropout(hidden), self.readout(depth, target), ahead=1 + depth, extra=extra))
        return depths

    # -- drafting ----------------------------------------------------------------------------------------------

    @property
    def deepest(self) -> int:
        return self.config.depths

    def new_state(self) -> HydraState:
        return HydraState()

    def begin(self, state: HydraState, features: Features, ids: Tensor, target: Target) -> Guess:
        dtype = next(self.parameters()).dtype
        last = features.last.to(dtype)
        if self.prefix is not None:
            rows, committed = len(last), state.cache.get_seq_length()
            positions = torch.arange(committed, committed + rows, device=ids.device)[None]
            seen = torch.ones(rows, committed + rows, dtype=torch.bool, device=ids.device).tril(committed)
            last = self.prefix(last[None], positions, seen[None, None], state.cache)[0]
        state.read = {0: torch.cat([last[-1:], target.embed(ids[-1:]).to(dtype)], dim=-1)}
        return self.guess(0, state.read[0], target)

    def deepen(self, state: HydraState, nodes: list[int], tokens: Tensor, shape: Shape, target: Target) -> Guess:
        above = torch.cat([state.read[shape.parents[node - 1]] for node in nodes])
        read = torch.cat([above, target.embed(tokens).to(above.dtype)], dim=-1)
        state.read |= {node: read[i : i + 1] for i, node in enumerate(nodes)}
        return self.guess(shape.depths[nodes[0]], read, target)

    def guess(self, depth: int, read: Tensor, target: Target) -> Guess:
        states = self.hidden(depth, read)
        return Guess(self.readout(depth, target)(states), states)


def state_size(target: Target) -> float:
    """The root mean square that the target's final norm gives its states: that of the norm's own scale."""
    return 1.0 if target.final_norm is None else float(norm_scale(target.final_norm, target).pow(2).mean().sqrt())


def taught_lengths(taught: Tensor, positions: Tensor) -> Tensor:
    """How long the sequence of every position is [batch, time], up to the last token that depth 0 teaches (``taught``).

    Padding is not counted so, and neither is what else is packed into a line.
    """
    sequence = (positions == 0).cumsum(1)
    ends = torch.where(taught, positions + 3, 1)  # row t teaches x_{t+2}: up to there, t + 3 tokens
    longest = ends.new_zeros(len(ends), ends.shape[1] + 1).scatter_reduce(1, sequence, ends, "amax")
    return longest.gather(1, sequence)


def neftune(x: Tensor, alpha: float, lengths: Tensor) -> Tensor:
    """x [batch, time, width] with uniform noise in ±alpha / sqrt(length * width) (Jain et al., 2310.05914)."""
    return x + (2 * torch.rand_like(x) - 1) * (alpha / (lengths[..., None] * x.shape[-1]).sqrt()).to(x.dtype)
