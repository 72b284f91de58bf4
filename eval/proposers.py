"""What drafts for the verifier: a head in a form, or a look-up that needs no training."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import UserError
from ..heads.base import Draft, DraftHead, Shape
from ..heads.drafting import Adaptive, Drafting, Form, draft_all
from ..heads.growing import Beam, Dynamic
from ..sampling import Sampling
from ..target import Features, Target
from .tree import NONE, fitted

NOTHING = Draft([], NONE)


@dataclass
class Text:
    """One sequence being decoded, as its proposer sees it.

    ``tokens``: the prompt and all that was emitted; the target has read all but the last. ``prompt``: how many of them are
    the prompt's. ``state``: what the proposer's ``begin`` returned. ``fresh``: the target's rows of the tokens it has read
    since the last draft, the last but one among them. ``room``: the deepest draft that still fits into the context.
    ``sampling`` and ``generator``: how the target's tokens are drawn.
    """

    tokens: list[int]
    prompt: int
    state: Any
    fresh: Features
    room: int
    sampling: Sampling
    generator: torch.Generator | None


class Proposer(Protocol):
    """One proposer drafts for many sequences; what it knows of one is in the sequence's state.

    ``name``: as reports call it. ``taps``: what the target's passes shall tap for it. ``length``: its deepest draft.
    ``adapts``: whether it changes the target inside ``adapted``. ``drawn``: whether its drafts are drawn at random.
    """

    @property
    def name(self) -> str: ...
    @property
    def taps(self) -> Sequence[int]: ...
    @property
    def length(self) -> int: ...
    @property
    def adapts(self) -> bool: ...
    @property
    def drawn(self) -> bool: ...

    def described(self) -> dict[str, Any]:
        """The draft's form: kind, name, length and nodes at most, a static tree's paths, what stops it early."""
        ...

    def adapted(self, target: Target) -> AbstractContextManager[None]:
        """Inside, the target is the one whose text the drafts keep."""
        ...

    def begin(self, prompt: list[int]) -> Any:
        """The state of a new sequence."""
        ...

    def propose(self, texts: list[Text], target: Target) -> list[Draft]:
        """A draft for each of the sequences, ``NOTHING`` where there is none; never deeper than the text's ``room``."""
        ...

    def learn(self, text: Text, draft: Draft, logits: Tensor) -> None:
        """Take in what the target says behind every node of ``draft.aside``: logits [nodes, V]."""
        ...

    def finish(self, text: Text) -> None:
        """The sequence has ended."""
        ...


class HeadProposer:
    """A draft head that drafts in ``form``. ``drawn``: drafts are drawn from the head instead of taking the likeliest."""

    def __init__(self, head: DraftHead, form: Form, drawn: bool = False) -> None:
        if drawn and isinstance(form, Dynamic | Beam):
            raise UserError(
                f"{form.name} takes the head's likeliest tokens: leave out --sampled-drafts or draft a chain or tree."
            )
        self.head, self.form, self.drawn = head, fitted(form, head), drawn

    @property
    def name(self) -> str:
        return self.head.kind

    @property
    def taps(self) -> Sequence[int]:
        return self.head.config.taps

    @property
    def length(self) -> int:
        return self.form.length

    @property
    def adapts(self) -> bool:
        return self.head.adapts

    def adapted(self, target: Target) -> AbstractContextManager[None]:
        return self.head.adapted(target)

    def described(self) -> dict[str, Any]:
        form = self.form
        stop = form.stop if isinstance(form, Adaptive | Dynamic) else 0
        by = "the confidence head" if isinstance(form, Adaptive) and self.head.confidence else "the draft's own probability"
        return {
            "kind": form.kind,
            "name": form.name,
            "length": form.length,
            "nodes": form.nodes,
            "paths": form.paths if isinstance(form, Shape) else None,
            "stop": {"below": stop, "by": by} if stop else None,
            "sampled": self.drawn,
        }

    def begin(self, prompt: list[int]) -> Any:
        return self.head.new_state()

    def propose(self, texts: list[Text], target: Target) -> list[Draft]:
        drafts = [NOTHING] * len(texts)
        asked = [place for place, text in enumerate(texts) if self.form.cut(text.room).length]
        if asked:
            written = draft_all(self.head, [self.drafting(texts[place], target) for place in asked], target)
            for place, draft in zip(asked, written, strict=True):
                drafts[place] = draft
        return drafts

    def drafting(self, text: Text, target: Target) -> Drafting:
        known = torch.tensor(text.tokens[-len(text.fresh.last) - 1 :], device=target.device)
        drawn = text.sampling if self.drawn else None
        return Drafting(text.state, text.fresh, known, self.form.cut(text.room), drawn, text.generator)

    def learn(self, text: Text, draft: Draft, logits: Tensor) -> None: ...

    def finish(self, text: Text) -> None: ...
