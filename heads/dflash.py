"""DFlash (2602.06036): a whole block drafted in one pass, with the target's features as keys and values of every layer.

A block is the token the target just wrote, the anchor, and a mask token for each place behind it. What ties its places
together is pluggable (heads/in_block.py); a causal mask inside the block is JetSpec's (2606.18394).
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from ..console import note
from ..errors import UserError
from ..target import Features, Target
from .base import Depth, DraftHead, Guess, HeadConfig, Shape, Side, counted, marked, move_taps, scores, supervised
from .block_layers import BlockLayer, Piece, attention_over, cut, in_context
from .in_block import InBlock, Independent, Markov, Recurrent, Selector
from .layers import llama_layer_config
from .mask_token import is_faint, mask_token


class DFlashOptions(BaseModel):
    """The kind's own part of a recipe. ``depths`` of the head is the number of places behind the anchor.

    ``in_block``: none (DFlash), markov (DSpark), gru (Domino) or conv (DFlash 2). ``causal`` masks later places of the block
    (JetSpec). ``anchor_predicts`` lets the anchor's place draft the first token, as DSpark and Domino were published, which
    makes the block one shorter.
    """

    model_config = ConfigDict(extra="forbid")
    layers: int = Field(default=5, ge=1)
    in_block: Literal["none", "markov", "gru", "conv"] = "none"
    causal: bool = False
    anchor_predicts: bool = False
    window: int | None = Field(default=None, ge=1, description="context positions that a layer sees; null: all")
    anchors: int = Field(default=512, ge=1, description="blocks taught per line of a batch, drawn anew at every step")
    mask_token: int | None = Field(default=None, ge=0, description="null: an unused token is found")
    mask_embedding: bool = Field(default=False, description="train the mask's embedding instead of reading the target's row")
    rank: int = Field(default=256, ge=1, description="of the correction: Markov bias, GRU's projection, selector's codebooks")
    gated: bool = Field(default=False, description="markov: the state weighs the previous token's parts")
    memory: int = Field(default=1024, ge=1, description="gru: its width")
    group: int = Field(default=16, ge=1, description="conv: channels that share a correction of the kernel")
    candidates: int = Field(default=16, ge=1, description="conv: tokens per place among which the selector chooses")
    base_weight: float = Field(default=0.5, ge=0, description="gru, conv: weight of the uncorrected logits' own lesson")

    @model_validator(mode="after")
    def fits(self) -> Self:
        if self.anchor_predicts and self.in_block not in ("markov", "gru"):
            raise ValueError("anchor_predicts is for in_block markov and gru: no engine drafts so with the others")
        return self


@dataclass
class DFlashState:
    """Keys and values [1, kv_heads, rows, dim] of the committed rows, layer by layer; then this round's block: its places'
    hidden states [depths, hidden], and what every node hands on to its children."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    committed: int = 0
    hidden: Tensor | None = None
    paths: dict[int, Tensor | None] = field(default_factory=dict)


class DFlashHead(DraftHead):
    """taps -> fc -> norm -> keys and values of every layer; [anchor, mask, ...] -> layers -> norm -> output head.

    The embedding and, with the whole vocabulary, the output head are the target's. A reduced vocabulary has its own rows.
    """

    kind = "dflash"
    Options = DFlashOptions
    layers: Any  # BlockLayer, one after the other

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        layer = Qwen3Config(**config.layer)
        width, source = layer.hidden_size, config.target.hidden_size
        group = self.options.group if self.options.in_block == "conv" else None
        self.fc = nn.Linear(len(config.taps) * source, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, layer.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(layer, group) for _ in range(self.options.layers))
        self.norm = Qwen3RMSNorm(width, layer.rms_norm_eps)
        self.in_block = in_block(config, self.options)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if reduced(config) else None
        self.mask_embedding = nn.Parameter(torch.zeros(width)) if self.options.mask_embedding else None
        self.rotary = Qwen3RotaryEmbedding(layer)
        self.heads_per_key = layer.num_attention_heads // config.layer["num_key_value_heads"]

    @classmethod
    def create(
        cls,
        target: Target,
        options: BaseModel,
        taps: list[int] | None,
        depths: int,
        target_ids: Tensor,
        confidence: bool = False,
    ) -> Self:
        """As every kind's; the mask token and the taps follow from the target where they are not named."""
        options = DFlashOptions.model_validate(options.model_dump())
        options.mask_token = mask_token(target, options.mask_token)
        taps = published_taps(target.depth, options.layers) if taps is None else taps
        return super().create(target, options, taps, depths, target_ids, confidence)

    @classmethod
    def default_taps(cls, target: Target) -> list[int]:
        return published_taps(target.depth, DFlashOptions().layers)

    @classmethod
    def layer_config(cls, target: Target, options: DFlashOptions) -> dict[str, Any]:
        """The target's sizes, RoPE and norm epsilon, every one of them written out: Qwen3's own defaults are others."""
        return {**llama_layer_config(target), "num_hidden_layers": options.layers}

    @classmethod
    def width(cls, config: HeadConfig) -> int:
        options = DFlashOptions.model_validate(config.options)
        return config.target.hidden_size + {"markov": options.rank, "gru": options.memory, "conv": options.rank}.get(
            options.in_block, 0
        )

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        for layer in self.layers:
            for module in (*layer.self_attn.children(), *layer.mlp.children()):
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.02)
        if self.lm_head is not None:
            self.lm_head.weight.copy_(target.output_head.weight[self.target_ids.to(target.device)])
        if target.device.type == "meta":
            return
        if self.mask_embedding is not None:
            self.mask_embedding.copy_(target.embed(torch.tensor(self.options.mask_token, device=target.device)))
        elif is_faint(target, self.options.mask_token):
            note(
                f"the embedding of mask_token {self.options.mask_token} in {target.name} is next to nothing: "
                "head.options.mask_embedding: true trains one."
            )

    # -- the block ---------------------------------------------------------------------------------------------

    @property
    def block(self) -> int:
        """The places of a block, the anchor's among them."""
        return self.config.depths + (0 if self.options.anchor_predicts else 1)

    def context(self, taps: Tensor) -> Tensor:
        """Tapped states [..., n_taps * target hidden] -> what every layer takes keys and values from [..., hidden]."""
        return self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))

    def enter(self, anchors: Tensor, target: Target) -> Tensor:
        """The blocks behind anchor tokens [n], embedded: [n, block, hidden]."""
        first = target.embed(anchors).to(self.fc.weight.dtype)
        mask = self.mask_embedding
        if mask is None:
            mask = target.embed(torch.tensor(self.options.mask_token, device=anchors.device)).to(first.dtype)
        return torch.cat([first[:, None], mask.expand(len(first), self.block - 1, -1)], dim=1)

    def leave(self, hidden: Tensor) -> Tensor:
        """The last layer's blocks [n, block, hidden] -> the hidden states of the depths [n, depths, hidden]."""
        return self.norm(hidden[:, self.block - self.config.depths :])

    def read(self, states: Tensor, depth: int, target: Target) -> Tensor:
        """The logits [n, draft vocab] of states [n, width] at a depth."""
        return self.in_block.correct(self.base(states[:, : self.fc.out_features], target), states, depth)

    def base(self, hidden: Tensor, target: Target) -> Tensor:
        """The backbone's own logits [n, draft vocab] of hidden states [n, hidden]."""
        return target.logits(hidden).to(hidden.dtype) if self.lm_head is None else self.lm_head(hidden)

    def cut(self, line: Tensor, first: Tensor, last: Tensor) -> list[Piece]:
        return cut(line, first, last, self.block, self.heads_per_key, self.options.causal, self.options.window)

    # -- training ----------------------------------------------------------------------------------------------

    def based(self) -> range:
        """The depths whose uncorrected logits have a lesson of their own: all that are corrected."""
        taught = self.in_block.base and self.options.base_weight > 0
        return range(1 if self.options.in_block == "gru" else 0, self.config.depths) if taught else range(0)

    def taught(self, ids: Tensor, mask: Tensor, seed: int) -> list[Tensor]:
        """``options.anchors`` rows of each line, drawn anew with the seed, with all depths that are supervised."""
        maps = supervised(mask, self.config.depths)
        drawn = F.pad(scores(ids, mask, seed)[:, 1:], (0, 1), value=1.0)  # a row's own anchor is x_{t+1}
        drawn = drawn.masked_fill(~maps[0], 2.0)
        if drawn.shape[1] > self.options.anchors:
            most = drawn.kthvalue(self.options.anchors, dim=1, keepdim=True).values
            maps = [own & (drawn <= most) for own in maps]
        return maps + [maps[depth] for depth in self.based()]

    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        """One pass over the blocks of all anchors: each sees the context before its anchor, and itself."""
        positions = counted(ids, positions)
        anchors = torch.stack(rows).any(0)
        line, last = anchors.nonzero(as_tuple=True)
        behind = last[:, None] + 1 + torch.arange(self.config.depths, device=ids.device)
        tokens = F.pad(ids, (0, self.config.depths))[line[:, None], behind]  # what precedes each place's own token
        hidden = self.blocks(line, last, self.enter(tokens[:, 0], target), self.context(features.taps), positions)
        flat, path, depths = marked(anchors), None, []
        for depth in range(self.config.depths):
            states, path = self.in_block.follow(hidden[:, depth], tokens[:, depth], path, target.embed)
            own = marked(rows[depth])
            readout = partial(self.read, depth=depth, target=target)
            depths.append(Depth(own, states[torch.searchsorted(flat, own)], readout, ahead=1 + depth))
        return depths + [self.base_lesson(depths[depth], target) for depth in self.based()]

    def blocks(self, line: Tensor, last: Tensor, hidden: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        """Blocks [n, block, hidden] behind the rows ``last`` [n] of lines -> their depths' hidden states [n, depths, hidden].

        ``context`` [batch, time, hidden], ``positions`` [batch, time].
        """
        place = positions[line, last]
        before = self.rotary(context, positions)
        within = self.rotary(context, place[:, None] + 1 + torch.arange(self.block, device=line.device))
        pieces = self.cut(line, last - place, last)
        for layer in self.layers:
            hidden = self.stretch(in_context, layer, hidden, within, context, before, pieces)
        return self.leave(hidden)

    def base_lesson(self, depth: Depth, target: Target) -> Depth:
        """What the backbone's own logits are taught beside a depth whose logits correct them."""
        hidden = depth.states[:, : self.fc.out_features]
        share = Side(self.options.base_weight / len(self.based()))
        return Depth(depth.rows, hidden, partial(self.base, target=target), depth.ahead, side=share)

    # -- drafting ----------------------------------------------------------------------------------------------

    @property
    def deepest(self) -> int:
        return self.config.depths

    def new_state(self) -> DFlashState:
        return DFlashState()

    def begin(self, state: DFlashState, features: Features, ids: Tensor, target: Target) -> Guess:
        rows, context = len(ids) - 1, self.context(features.taps)[None]
        positions = torch.arange(state.committed, state.committed + rows + self.block, device=ids.device)[None]
        before, within = self.rotary(context, positions[:, :rows]), self.rotary(context, positions[:, rows:])
        added = [layer.self_attn.keys(context, before) for layer in self.layers]
        state.keys = joined(state.keys, [keys for keys, _ in added])
        state.values = joined(state.values, [values for _, values in added])
        state.committed += rows
        start, end = torch.tensor([0], device=ids.device), torch.tensor([state.committed - 1], device=ids.device)
        pieces = self.cut(start, start, end)
        hidden = self.enter(ids[-1:], target)
        for layer, keys, values in zip(self.layers, state.keys, state.values, strict=True):
            hidden = layer(hidden, within, attention_over(keys, values, pieces))
        state.hidden, state.paths = self.leave(hidden)[0], {}
        return self.guess(state, [0], ids[-1:], 0, None, target)

    def deepen(self, state: DFlashState, nodes: list[int], tokens: Tensor, shape: Shape, target: Target) -> Guess:
        handed = [path for node in nodes if (path := state.paths[shape.parents[node - 1]]) is not None]
        path = torch.stack(handed) if handed else None
        return self.guess(state, nodes, tokens, shape.depths[nodes[0]], path, target)

    def guess(
        self, state: DFlashState, nodes: list[int], tokens: Tensor, depth: int, path: Tensor | None, target: Target
    ) -> Guess:
        """What follows the ``tokens`` [n] of nodes at a depth, whose parents left ``path`` [n, ...]."""
        assert state.hidden is not None, "begin comes first"
        hidden = state.hidden[depth].expand(len(nodes), -1)
        states, path = self.in_block.follow(hidden, tokens, path, target.embed)
        state.paths |= {node: None if path is None else path[i] for i, node in enumerate(nodes)}
        return Guess(self.read(states, depth, target), states)


def joined(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    """Keys or values layer by layer, with the new rows behind the old."""
    return [torch.cat(pair, dim=2) for pair in zip(old, new, strict=True)] if old else new


def reduced(config: HeadConfig) -> bool:
    return config.draft_vocab_size != config.target.vocab_size


def published_taps(depth: int, count: int) -> list[int]:
    """Taps behind the layers (counted from 0) that lie evenly from 1 to depth - 3; behind the middle one if one is asked for.

    Distinct and never the last tap or the embedding, also where a target is too short for the rule.
    """
    count = max(1, min(count, depth - 1))
    if count == 1:
        return move_taps([depth // 2 + 1], depth - 1)
    return move_taps([round(1 + i * (depth - 4) / (count - 1)) + 1 for i in range(count)], depth - 1)


def in_block(config: HeadConfig, options: DFlashOptions) -> InBlock:
    """The dependency that the options ask for. Raises UserError where it cannot be had with this vocabulary or width."""
    width, vocab, draft_vocab = config.target.hidden_size, config.target.vocab_size, config.draft_vocab_size
    if options.in_block == "markov":
        return Markov(width, vocab, draft_vocab, options.rank, options.gated)
    if options.in_block == "gru":
        return Recurrent(width, draft_vocab, options.rank, options.memory)
    if options.in_block == "conv":
        if reduced(config):
            raise UserError("in_block conv has the target's vocabulary: set head.draft_vocab to null or in_block to another.")
        if width % options.group:
            raise UserError(
                f"group {options.group} does not divide the hidden size {width}: set head.options.group to a divisor."
            )
        return Selector(width, vocab, options.rank, min(options.candidates, vocab))
    return Independent()
