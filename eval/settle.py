"""From a head and what is wished of its drafts to a proposer; some wishes take measurements, and prompts of their own."""

from collections.abc import Sequence
from typing import Any

import torch

from ..heads.base import DraftHead
from ..heads.drafting import Form
from ..sampling import GREEDY, Sampling
from ..target import Target
from .adaptive import drafting
from .auto import choose_form, settle_pace
from .prompts import Prompt
from .proposers import HeadProposer, Proposer
from .search import spend
from .tree import Auto, Paced, Search, Wish


def settle(
    target: Target,
    head: DraftHead,
    wish: Form | Wish,
    prompts: Sequence[Prompt],
    max_new: int,
    sampling: Sampling = GREEDY,
    drawn: bool = False,
    batch: int = 1,
    seed: int = 0,
    show: bool = False,
) -> tuple[Proposer, Sequence[Prompt], dict[str, Any] | None]:
    """The proposer, the prompts that are left to measure it on, and what was found on the way (None: nothing was sought).

    A static form is taken as it is; ``search`` and ``auto`` spend the first quarter of the prompts.
    """
    generator = torch.Generator().manual_seed(seed)
    with head.adapted(target):
        if isinstance(wish, Search):
            form, rest, found = spend(target, head, prompts, wish, max_new, sampling, generator, show)
        elif isinstance(wish, Auto):
            form, rest, found = choose_form(target, head, prompts, wish, max_new, sampling, generator, drawn, batch, show)
        elif isinstance(wish, Paced):
            form = settle_pace(target, head, prompts, wish, max_new, sampling if drawn else None, batch)
            rest, found = prompts, None
        else:
            return HeadProposer(head, wish, drawn), prompts, None
    return drafting(head, form, drawn), rest, found
