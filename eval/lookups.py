"""What all proposers without weights share: they read no hidden state, and their drafts come from text alone."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

from torch import Tensor

from ..heads.base import Draft, Shape
from ..target import Target
from .proposers import NOTHING, Text
from .tree import chain


class LookUp(ABC):
    """A proposer that drafts for every sequence alone, from its tokens and its state. A kind gives ``draft`` and ``begin``.

    None of its drafts depends on a random number that verification has yet to draw, so that they stay lossless however
    the target's tokens are drawn.
    """

    name: str
    length: int
    taps: Sequence[int] = ()
    adapts = drawn = False

    def adapted(self, target: Target) -> AbstractContextManager[None]:
        return nullcontext()

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """The draft's form, for the report: see ``form_of``."""

    def propose(self, texts: list[Text], target: Target) -> list[Draft]:
        return [self.draft(text) for text in texts]

    @abstractmethod
    def draft(self, text: Text) -> Draft:
        """A draft behind the text's last token, no deeper than its room."""

    @abstractmethod
    def begin(self, prompt: list[int]) -> Any:
        """The state of a new sequence."""

    def learn(self, text: Text, draft: Draft, logits: Tensor) -> None:
        return

    def finish(self, text: Text) -> None:
        return


def form_of(name: str, length: int, nodes: int | None = None) -> dict[str, Any]:
    """A look-up's drafts for the report: chains of at most ``length`` tokens, or trees of so many ``nodes``."""
    kind = "chain" if nodes is None else "tree"
    return {
        "kind": kind,
        "name": name,
        "length": length,
        "nodes": nodes or length,
        "paths": None,
        "stop": None,
        "sampled": False,
    }


def chained(tokens: list[int]) -> Draft:
    """A draft of one path."""
    return Draft(tokens, straight(len(tokens))) if tokens else NOTHING


@lru_cache
def straight(length: int) -> Shape:
    return chain(length)


def merged(paths: Sequence[Sequence[int]], name: str) -> Draft:
    """A draft of several paths as one prefix tree; of siblings the one of the earlier path ranks better."""
    parents: list[int] = []
    tokens: list[int] = []
    at: dict[tuple[int, int], int] = {}
    for path in paths:
        node = 0
        for token in path:
            if (node, token) not in at:
                parents.append(node)
                tokens.append(token)
                at[node, token] = len(tokens)
            node = at[node, token]
    return grown(parents, tokens, name)


def grown(parents: Sequence[int], tokens: Sequence[int], name: str) -> Draft:
    """A draft of nodes in the order they grew: node n (1-based; 0 is the root) holds ``tokens[n-1]`` below ``parents[n-1]``,
    which is older than it; of siblings the older one ranks better."""
    if not tokens:
        return NOTHING
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    order = sorted(range(1, len(depths)), key=depths.__getitem__)
    place = {0: 0} | {node: i for i, node in enumerate(order, start=1)}
    return Draft([tokens[node - 1] for node in order], tree(tuple(place[parents[node - 1]] for node in order), name))


@lru_cache(maxsize=4096)
def tree(parents: tuple[int, ...], name: str) -> Shape:
    """The shape of nodes ordered by depth, siblings in the order of their ranks. Remembered: the same ones come again."""
    born: dict[int, int] = {}
    ranks = []
    for parent in parents:
        ranks.append(born.get(parent, 0))
        born[parent] = ranks[-1] + 1
    return Shape(name, parents, tuple(ranks))
