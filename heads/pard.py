"""PARD (An et al., 2504.18583): a small causal LM turned into a parallel drafter by mask tokens in place of unknown ones.

Depth d of row t reads the real tokens up to x_{t+1} and d mask tokens behind them, and predicts x_{t+2+d}: all depths are one
forward. PARD-2 (2605.08632) adds the target's states to the embeddings: ``features``.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from ..target import Features, Target
from . import own_lm
from .base import Depth, DraftHead, Guess, HeadConfig, Shape, counted, falling, marked
from .layers import causal
from .mask_token import mask_token
from .own_lm import OwnOptions, OwnState


class PardOptions(OwnOptions):
    """``mask_token``: an id that no text uses; null: one is found. Training drops chains (COD): of every row's chain of masks
    the share max(``ratio`` ** d, ``ratio_min``) reaches depth d. ``features``: PARD-2's projection of the taps, times
    ``feature_scale``, added to the embeddings; left out of a line with the chance ``feature_dropout`` in training."""

    mask_token: int | None = Field(default=None, ge=0)
    ratio: float = Field(default=0.7, gt=0, le=1)
    ratio_min: float = Field(default=0.2, ge=0, le=1)
    features: bool = False
    feature_scale: float = Field(default=0.02, gt=0)
    feature_dropout: float = Field(default=0.2, ge=0, lt=1)


@dataclass
class PardState:
    """The LM's keys and values of the committed tokens, and what it said of every depth, a row each."""

    own: OwnState = field(default_factory=OwnState)
    said: Guess | None = None


@dataclass
class Masks:
    """The mask tokens of a training forward, line by line behind the real ones: at depth d of row t, one for each depth 1..d.

    ``line`` and ``slot`` [masks]: where each is, by depth, then by row. ``behind`` [batch, slots]: the position t+1 of the last
    real token that it sees; ``depth`` [batch, slots]: how far behind that it stands. Both are 0 where a line has fewer masks.
    """

    line: Tensor
    slot: Tensor
    behind: Tensor
    depth: Tensor

    @classmethod
    def of(cls, rows: list[Tensor], batch: int, time: int) -> "Masks":
        """Those that ``rows``, flat indices [M] per depth, ask for; depth 0 needs none."""
        flat = torch.cat([rows[0][:0], *rows[1:]])
        depths = torch.cat([rows[0][:0], *(torch.full_like(own, d) for d, own in enumerate(rows[1:], start=1))])
        line = flat // time
        counts = line.bincount(minlength=batch)
        order = line.argsort(stable=True)
        slot = torch.empty_like(line)
        slot[order] = torch.arange(len(line), device=line.device) - (counts.cumsum(0) - counts)[line[order]]
        behind = torch.zeros(batch, int(counts.max()), dtype=torch.long, device=line.device)
        depth = torch.zeros_like(behind)
        behind[line, slot], depth[line, slot] = flat % time + 1, depths
        return cls(line, slot, behind, depth)

    def seen(self, real: Tensor) -> Tensor:
        """Who sees whom among real tokens and masks, bool [batch, time + slots, time + slots], where ``real`` [batch, time,
        time] says it of the real ones: a mask sees what the token sees that it stands behind, and its own chain."""
        beside = (self.behind[:, :, None] == self.behind[:, None]) & (self.depth[:, None] <= self.depth[:, :, None])
        before = real.gather(1, self.behind[:, :, None].expand(-1, -1, real.shape[2]))
        return torch.cat([F.pad(real, (0, beside.shape[2])), torch.cat([before, beside], 2)], 1)


class PardHead(DraftHead):
    """A causal LM of its own whose masks' outputs are the drafts behind the first; it writes ``depths`` tokens at once."""

    kind = "pard"
    Options = PardOptions

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.lm = own_lm.build(config, self.options)
        self.mask_token: int = config.layer["pard_token"]
        if self.options.features:
            if not config.taps:
                raise UserError("head.options.features reads the target's states, and head.taps names none: name them.")
            inputs = len(config.taps) * config.target.hidden_size
            self.target_proj = nn.Linear(inputs, own_lm.width(config), bias=False)

    @classmethod
    def layer_config(cls, target: Target, options: PardOptions) -> dict[str, Any]:
        """The LM's config with PARD's own two keys; an LM that has them keeps its mask token."""
        config = own_lm.plan(target, options)
        wished = config.get("pard_token") if options.mask_token is None else options.mask_token
        return config | {"pard_token": mask_token(target, wished), "spd_type": "pard"}

    @classmethod
    def width(cls, config: HeadConfig) -> int:
        return own_lm.width(config)

    def initialize(self, target: Target) -> None:
        if not self.target_ids.is_meta:  # a dry run has no weights
            self.lm = own_lm.filled(self.config, self.options, target)

    def taught(self, ids: Tensor, mask: Tensor, seed: int) -> list[Tensor]:
        return falling(ids, mask, seed, self.config.depths, self.options.ratio, self.options.ratio_min)

    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        (batch, time), flats = ids.shape, [marked(own) for own in rows]
        positions = counted(ids, positions)
        masks = Masks.of(flats, batch, time)
        where = torch.cat([positions, positions.gather(1, masks.behind) + masks.depth], 1)
        read: Tensor = torch.cat([ids, torch.full_like(masks.behind, self.mask_token)], 1)
        if self.options.features:
            before = F.pad(features.taps, (0, 0, 1, 0)) * (F.pad(positions, (0, 1)) > 0)[..., None]  # of the token before
            index = torch.cat([counted(ids, None), masks.behind], 1)
            read = self.informed(read, before.gather(1, index[..., None].expand(-1, -1, before.shape[2])))
        mask = own_lm.mask_of(self.lm, masks.seen(causal(positions)[:, 0]), where, where)
        states = own_lm.hidden(self.lm, read, where, mask)
        first = states[flats[0] // time, flats[0] % time + 1]
        others = states[masks.line, time + masks.slot].split([len(flat) for flat in flats[1:]])
        readout = partial(own_lm.logits, self.lm)
        return [Depth(flats[d], own, readout, ahead=1 + d) for d, own in enumerate((first, *others))]

    def informed(self, ids: Tensor, taps: Tensor) -> Tensor:
        """Embeddings [batch, rows, width] of ids and, added to each, the last target states [..., taps] known before it."""
        known = self.options.feature_scale * self.target_proj(taps.to(self.target_proj.weight.dtype))
        if self.training:
            known = known * (torch.rand(len(ids), 1, 1, device=ids.device) >= self.options.feature_dropout)
        return own_lm.bare(self.lm).get_input_embeddings()(ids) + known

    def recompute(self) -> None:
        own_lm.recompute(self.lm)

    def merged(self) -> DraftHead:
        return own_lm.merged(self)

    # -- drafting ----------------------------------------------------------------------------------------------

    @property
    def deepest(self) -> int:
        return self.config.depths

    def new_state(self) -> PardState:
        return PardState()

    def begin(self, state: PardState, features: Features, ids: Tensor, target: Target) -> Guess:
        own, behind = state.own, self.config.depths - 1
        new = own.unread(ids)
        read: Tensor = torch.cat([new, new.new_full((behind,), self.mask_token)])[None]
        positions = own.following(read[0]).clamp_max(target.max_positions - 1)  # what stands beyond is never asked for
        if self.options.features:
            taps = F.pad(features.taps, (0, 0, len(new) - len(features.taps), 0))  # before a text's first token there is none
            read = self.informed(read, torch.cat([taps, taps[-1:].expand(behind, -1)])[None])
        states = own_lm.hidden(self.lm, read, positions, cache=own.cache)[0, -1 - behind :]
        state.said = Guess(own_lm.logits(self.lm, states), states)
        own.cache.crop(-behind)
        own.committed += len(new)
        return state.said.repeated(0, [0])

    def deepen(self, state: PardState, nodes: list[int], tokens: Tensor, shape: Shape, target: Target) -> Guess:
        assert state.said is not None, "begin comes first"
        return state.said.repeated(shape.depths[nodes[0]], nodes)
