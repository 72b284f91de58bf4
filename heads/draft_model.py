"""A plain draft model: a small causal LM of the target's tokenizer, distilled on the target (Leviathan et al., 2211.17192;
distilled: Zhou et al., 2310.08461)."""

from functools import partial
from typing import Any

from torch import Tensor

from ..target import Features, Target
from . import own_lm
from .base import Depth, DraftHead, Guess, HeadConfig, Shape, marked
from .layers import causal
from .own_lm import OwnOptions, OwnState


class DraftModelHead(DraftHead):
    """Depth i of row t is the LM's next token behind x_{t+1+i}: it reads tokens alone, the data's own in training."""

    kind = "draft_model"
    Options = OwnOptions

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.lm = own_lm.build(config, self.options)

    @classmethod
    def layer_config(cls, target: Target, options: OwnOptions) -> dict[str, Any]:
        """The LM's config, without what makes an LM a PARD drafter."""
        return {key: value for key, value in own_lm.plan(target, options).items() if key not in ("pard_token", "spd_type")}

    @classmethod
    def width(cls, config: HeadConfig) -> int:
        return own_lm.width(config)

    def initialize(self, target: Target) -> None:
        if not self.target_ids.is_meta:  # a dry run has no weights
            self.lm = own_lm.filled(self.config, self.options, target)

    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        mask = None
        if positions is not None:
            mask = own_lm.mask_of(self.lm, causal(positions)[:, 0], positions, positions)
        states = own_lm.hidden(self.lm, ids, positions, mask).flatten(0, 1)
        readout = partial(own_lm.logits, self.lm)
        flats = enumerate(map(marked, rows))
        return [Depth(flat, states[flat + 1 + depth], readout, ahead=1 + depth) for depth, flat in flats]

    def recompute(self) -> None:
        own_lm.recompute(self.lm)

    def merged(self) -> DraftHead:
        return own_lm.merged(self)

    # -- drafting ----------------------------------------------------------------------------------------------

    def new_state(self) -> OwnState:
        return OwnState()

    def begin(self, state: OwnState, features: Features, ids: Tensor, target: Target) -> Guess:
        state.forget_drafts()
        new = state.unread(ids)
        states = own_lm.hidden(self.lm, new[None], state.following(new), cache=state.cache)[0, -1:]
        state.committed += len(new)
        return Guess(own_lm.logits(self.lm, states), states)

    def deepen(self, state: OwnState, nodes: list[int], tokens: Tensor, shape: Shape, target: Target) -> Guess:
        states = own_lm.read_nodes(self.lm, state, nodes, tokens, shape)
        return Guess(own_lm.logits(self.lm, states), states)
