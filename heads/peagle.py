"""P-EAGLE (2602.01469): EAGLE-3's layers draft all depths in one pass.

Depth 0 of row t is EAGLE-3's. Depth d stands at position t + d and knows nothing of it: where depth 0 reads a token's
embedding and the tapped states, it reads a vector of its own, trained, for each. It sees what row t sees at depth 0, and the
row's shallower depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..target import Features, Target
from .base import Depth, Guess, HeadConfig, Shape, counted, falling, marked
from .eagle3 import Backbone, BackboneOptions
from .layers import causal
from .mask_token import mask_token
from .recurrent import Attention, Cache, Rows, Unrolled, side_by_side, through


class PEagleOptions(BackboneOptions):
    """The kind's own part of a recipe.

    ``mask_token``: an id that no text uses, at which engines find the masks' embedding; null: one is found. ``embedding``
    "own" trains a copy of the target's whole embedding, as published heads do, "target" the masks' alone. Training drops
    chains (COD): of every row's chain the share max(``ratio`` ** d, ``ratio_min``) reaches depth d.
    """

    layers: int = Field(default=4, ge=1)
    mask_token: int | None = Field(default=None, ge=0)
    embedding: Literal["target", "own"] = "target"
    ratio: float = Field(default=0.7, gt=0, le=1)
    ratio_min: float = Field(default=0.2, ge=0, le=1)


@dataclass
class PEagleState:
    """``said``: of every depth behind the last row, a row each."""

    cache: Cache = field(default_factory=Cache)
    said: Guess | None = None


class Chains(Unrolled):
    """Training-time test's attention over fewer rows from depth to depth, each of which was there at the depth before."""

    def __init__(self, layers: int, seen: Tensor) -> None:
        super().__init__(layers, seen)
        self.whole = seen
        self.place = torch.arange(seen.shape[-1], device=seen.device).expand(len(seen), -1)  # of a row at the last depth

    def follow(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Go on with the rows of the map ``own`` [batch, time], a depth deeper.

        Returns which they are, [batch, the most of any line], lines with fewer filled up, and which of those count.
        """
        most = max(1, int(own.sum(1).max()))
        where = own.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        before = self.place.gather(1, where)
        for chain in (*self.keys, *self.values):
            for i in range(1, len(chain)):
                chain[i] = chain[i].gather(2, before[:, None, :, None].expand(-1, chain[i].shape[1], -1, chain[i].shape[3]))
        self.seen = self.whole.gather(2, where[:, None, :, None].expand(-1, -1, -1, self.whole.shape[3]))
        slots = torch.arange(where.shape[1], device=where.device).expand_as(where)
        self.place = torch.zeros_like(self.place).scatter(1, where, slots)
        return where, own.gather(1, where)


class PEagleHead(Backbone):
    """EAGLE-3's modules, a feature that stands for the unknown ones, and an embedding that stands for the unknown tokens'."""

    kind = "peagle"
    Options = PEagleOptions

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width = config.target.hidden_size
        self.mask_token: int = config.layer["pard_token"]
        self.mask_hidden = nn.Parameter(torch.randn(len(config.taps) * width))
        if self.options.embedding == "own":
            self.embed_tokens = nn.Embedding(config.target.vocab_size, width)
        else:
            self.mask_embedding = nn.Parameter(torch.randn(width))

    @classmethod
    def layer_config(cls, target: Target, options: PEagleOptions) -> dict:
        """With the mask token under the name by which engines look for it."""
        return super().layer_config(target, options) | {"pard_token": mask_token(target, options.mask_token)}

    @torch.no_grad()
    def initialize(self, target: Target) -> None:
        super().initialize(target)
        embedded = target.embed(torch.arange(target.vocab_size, device=target.device))
        usual = embedded.float().mean(0)  # the mask token's own row is often one that was never trained
        if self.options.embedding == "own":
            self.embed_tokens.weight.copy_(embedded)
            self.embed_tokens.weight[self.mask_token] = usual
        else:
            self.mask_embedding.copy_(usual)

    def embedded(self, tokens: Tensor, target: Target) -> Tensor:
        """The embeddings [..., hidden] of tokens that are known."""
        if self.options.embedding == "own":
            return self.embed_tokens(tokens)
        return target.embed(tokens).to(self.fc.weight.dtype)

    def masks(self, *shape: int) -> tuple[Tensor, Tensor]:
        """What stands for embeddings and for features at places that are not known, both [*shape, hidden]."""
        embedding = self.embed_tokens.weight[self.mask_token] if self.options.embedding == "own" else self.mask_embedding
        return embedding.expand(*shape, -1), self.fuse(self.mask_hidden).expand(*shape, -1)

    def taught(self, ids: Tensor, mask: Tensor, seed: int) -> list[Tensor]:
        return falling(ids, mask, seed, self.config.depths, self.options.ratio, self.options.ratio_min)

    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        """Every row takes part at depth 0, which the deeper ones see; those hold the taught rows alone."""
        positions = counted(ids, positions)
        chains = Chains(1 + len(self.further), causal(positions))
        after = F.pad(ids[:, 1:], (0, 1))  # x_{t+1} at index t
        known = self.embedded(after, target), self.fuse(features.taps)
        read, chains = self.stretch(self.unrolled, *known, positions, chains)
        depths = []
        for depth, own in enumerate(rows):
            if depth > 0:
                where, own_rows = chains.follow(own)
                place = positions.gather(1, where) + depth
                read, chains = self.stretch(self.unrolled, *self.masks(*where.shape), place, chains)
                read = read[own_rows]
            else:
                read = read[own]
            depths.append(Depth(marked(own), read, self.lm_head, ahead=1 + depth))
        return depths

    def unrolled(self, embeds: Tensor, hidden: Tensor, positions: Tensor, earlier: Chains) -> tuple[Tensor, Chains]:
        """``read`` of a depth's rows, and the attention that remembers them."""
        attention = earlier.fork()
        return self.read(embeds, hidden, positions, attention), attention

    def read(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attention: Attention, asked: Sequence[int] | None = None
    ) -> Tensor:
        """What logits are read from [batch, rows, hidden]; of the ``asked`` rows alone."""
        entered, residual = self.layer.enter(embeds, hidden)
        rotary = self.rotary(entered, positions)
        return self.norm(through([self.layer, *self.further], entered, residual, rotary, attention, asked))

    # -- drafting ----------------------------------------------------------------------------------------------

    @property
    def deepest(self) -> int:
        return self.config.depths

    def new_state(self) -> PEagleState:
        return PEagleState()

    def begin(self, state: PEagleState, features: Features, ids: Tensor, target: Target) -> Guess:
        return self.begin_all([state], [features], [ids], target)[0]

    def begin_all(self, states: list[PEagleState], features: list[Features], ids: list[Tensor], target: Target) -> list[Guess]:
        depths, embeds, hidden, rows = self.config.depths, [], [], []
        masks = self.masks(self.config.depths - 1)
        for state, own, known in zip(states, features, ids, strict=True):
            embeds += [self.embedded(known[1:], target), masks[0]]
            hidden += [self.fuse(own.taps), masks[1]]
            seen, positions = state.cache.behind(len(known) - 1 + depths - 1, known.device)
            rows.append(Rows(state.cache, seen, positions, asked=depths))
        attention, asked = side_by_side(1 + len(self.further), rows)
        positions = torch.cat([own.positions for own in rows], dim=1)
        read = self.read(torch.cat(embeds)[None], torch.cat(hidden)[None], positions, attention, asked)[0]
        said = Guess(self.lm_head(read), read)
        for place, (state, known) in enumerate(zip(states, ids, strict=True)):
            state.cache.committed += len(known) - 1
            state.cache.forget_drafts()
            state.said = said.rows(slice(place * depths, (place + 1) * depths))
        return [state.said.repeated(0, [0]) for state in states if state.said]

    def deepen(self, state: PEagleState, nodes: list[int], tokens: Tensor, shape: Shape, target: Target) -> Guess:
        assert state.said is not None, "begin comes first"
        return state.said.repeated(shape.depths[nodes[0]], nodes)
