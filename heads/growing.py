"""Drafts that take their form from what the head says: EAGLE-2's dynamic tree, and beam search.

Both count a path's log-probability under the head, summed over its tokens in float32, and expand the likeliest paths. Every
choice is the likeliest one and nothing is drawn, so verification needs no draft probabilities.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from .base import Ask, Draft, DraftHead, Guess, Shape

T = TypeVar("T")
Writing = Generator[Ask, Guess, T]  # what is written level by level: it asks for the guess below its nodes, and goes on with it


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree (Li et al., 2406.16858): at every level the ``width`` likeliest candidates are expanded into their
    ``width`` likeliest children each, ``length`` levels deep; the ``nodes`` likeliest of all candidates are the draft.

    A candidate whose path is less likely than ``stop`` is none, save the likeliest first token.
    """

    nodes: int
    width: int = 10
    length: int = 8
    stop: float = 0.0
    kind = "dynamic"

    @property
    def name(self) -> str:
        return f"dynamic:{self.nodes},k={self.width},depth={self.length}" + (f",stop={self.stop:g}" if self.stop else "")

    def cut(self, depth: int) -> "Dynamic":
        """The same with at most ``depth`` levels."""
        return self if depth >= self.length else replace(self, length=depth)


@dataclass(frozen=True)
class Beam:
    """Beam search (ReDrafter, 2403.09919): the ``width`` likeliest paths of ``length`` tokens that such a search finds, put
    together into a tree in which every common beginning stands once."""

    width: int
    length: int
    kind = "dynamic"

    @property
    def name(self) -> str:
        return f"beam:{self.width}x{self.length}"

    @property
    def nodes(self) -> int:
        """As many as there are where the paths share nothing."""
        return self.width * self.length

    def cut(self, depth: int) -> "Beam":
        """The same with paths of at most ``depth`` tokens."""
        return self if depth >= self.length else replace(self, length=depth)


def dynamic(head: DraftHead, guess: Guess, form: Dynamic) -> Writing[Draft]:
    """EAGLE-2's tree behind a root whose children ``guess`` speaks of."""
    grown = yield from grow(head, guess, form)
    everything = np.arange(1, len(grown.scores))
    return grown.draft(np.sort(grown.likeliest(everything, form.nodes)), form.name)


def grow(head: DraftHead, guess: Guess, form: Dynamic) -> Writing["Growth"]:
    """The candidates that a dynamic tree is chosen from.

    Nodes whose descendants cannot be among the ``nodes`` likeliest any more are not expanded: the draft is the same.
    """
    grown = Growth(head, guess)
    lowest = math.log(form.stop) if form.stop else -math.inf
    for depth in range(1, form.length + 1):
        level = grown.add(form.width, lowest)
        frontier = grown.likeliest(level, form.width)
        if len(grown.scores) > form.nodes:
            bound = np.partition(grown.scores[1:], -form.nodes)[-form.nodes]
            frontier = frontier[grown.scores[frontier] > bound]
        if depth == form.length or not len(frontier):
            break
        yield from grown.expand(frontier)
    return grown


def beam(head: DraftHead, guess: Guess, form: Beam) -> Writing[Draft]:
    """The tree of the likeliest paths behind a root whose children ``guess`` speaks of."""
    grown = Growth(head, guess)
    for depth in range(1, form.length + 1):
        beams = grown.likeliest(grown.add(form.width), form.width)
        if depth < form.length:
            yield from grown.expand(beams)
    kept = {0}
    for node in beams.tolist():
        while node not in kept:
            kept.add(node)
            node = int(grown.parents[node])
    return grown.draft(np.array(sorted(kept)[1:]), form.name)


class Growth:
    """The candidates found so far, in the order they were made, and so by depth; number 0 is the root.

    ``scores`` float32: log-probability of the path, never above its parent's. ``tokens`` (target ids), ``parents``
    (candidates), ``ranks`` (among the parent's children). ``frontier``: the candidates whose children ``guess`` speaks of.
    The head knows the expanded candidates alone, as the nodes of ``shape``.
    """

    def __init__(self, head: DraftHead, guess: Guess) -> None:
        self.head, self.guess = head, guess
        self.scores = np.zeros(1, np.float32)
        self.tokens = self.parents = self.ranks = self.frontier = np.zeros(1, np.int64)
        self.shape, self.nodes = Shape("growing", (), ()), {0: 0}  # candidate -> node of the shape

    def add(self, width: int, lowest: float = -math.inf) -> np.ndarray:
        """The ``width`` likeliest children of every node of the frontier, without those below ``lowest``: their numbers."""
        logits = self.guess.logits.float()
        best, ids = logits.topk(min(width, logits.shape[-1]))
        own = (best - logits.logsumexp(-1, keepdim=True)).clamp_max(0).cpu().numpy()  # rounding may lift them above 0
        scores = self.scores[self.frontier][:, None] + own
        kept = scores >= lowest
        kept[0, 0] |= len(self.scores) == 1
        first = len(self.scores)
        self.scores = np.append(self.scores, scores[kept])
        self.tokens = np.append(self.tokens, self.head.target_ids[ids.to(self.head.target_ids.device)].cpu().numpy()[kept])
        rows, ranks = kept.nonzero()
        self.parents = np.append(self.parents, self.frontier[rows])
        self.ranks = np.append(self.ranks, ranks)
        return np.arange(first, len(self.scores))

    def likeliest(self, among: np.ndarray, count: int) -> np.ndarray:
        """The best of some candidates, best first; of equals the one made first, so that parents precede children."""
        return among[np.argsort(-self.scores[among], kind="stable")[:count]]

    def expand(self, frontier: np.ndarray) -> Writing[None]:
        """Have these candidates read, all of one depth."""
        chosen, known = frontier.tolist(), len(self.shape.parents)
        nodes = list(range(known + 1, known + 1 + len(chosen)))
        self.shape = Shape(
            self.shape.name,
            (*self.shape.parents, *(self.nodes[parent] for parent in self.parents[frontier].tolist())),
            (*self.shape.ranks, *self.ranks[frontier].tolist()),
        )
        self.nodes = dict(zip(chosen, nodes, strict=True))
        tokens = torch.as_tensor(self.tokens[frontier], device=self.guess.logits.device)
        self.guess = yield Ask(nodes, tokens, self.shape)
        self.frontier = frontier

    @property
    def depths(self) -> np.ndarray:
        """The depth of every candidate, the root included."""
        found = np.zeros(len(self.scores), np.int64)
        for number, parent in enumerate(self.parents[1:].tolist(), start=1):
            found[number] = found[parent] + 1
        return found

    def follow(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The candidates along a text behind the root, as far as there are any."""
        path = [0]
        for token in tokens:
            found = np.flatnonzero((self.parents == path[-1]) & (self.tokens == token))
            found = found[found > 0]
            if not len(found):
                break
            path.append(int(found[0]))
        return tuple(path[1:])

    def draft(self, kept: np.ndarray, name: str) -> Draft:
        """A draft of these candidates, rising, whose parents are among them."""
        parents = np.searchsorted(np.append(0, kept), self.parents[kept])
        return Draft(self.tokens[kept].tolist(), Shape(name, tuple(parents.tolist()), tuple(self.ranks[kept].tolist())))
