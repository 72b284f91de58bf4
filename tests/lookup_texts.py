"""Texts as a look-up sees them, without a target."""

from typing import Any

import torch

from draftsmith.eval.lookups import LookUp
from draftsmith.eval.proposers import Text
from draftsmith.heads.base import Draft
from draftsmith.sampling import GREEDY
from draftsmith.target import Features

NO_ROWS = Features(torch.zeros(0, 0), torch.zeros(0, 1))


def begun(proposer: LookUp, prompt: list[int], room: int = 100) -> Text:
    """A text of nothing but its prompt."""
    return Text(list(prompt), len(prompt), proposer.begin(prompt), NO_ROWS, room, GREEDY, None)


def drafted(proposer: LookUp, tokens: list[int], room: int = 100) -> list[int]:
    """The draft behind a prompt."""
    return proposer.draft(begun(proposer, tokens, room)).tokens


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens from the root to every node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, draft.shape.parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


def whole(draft: Draft) -> None:
    """Nodes stand behind their parents, by depth, and siblings have ranks from 0 on and tokens of their own."""
    shape: Any = draft.shape
    assert len(draft.tokens) == shape.nodes and list(shape.depths) == sorted(shape.depths)
    for node in range(shape.nodes + 1):
        family = shape.children(node)
        assert [shape.ranks[child - 1] for child in family] == list(range(len(family)))
        assert len({draft.tokens[child - 1] for child in family}) == len(family)
