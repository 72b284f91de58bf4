"""Suffix decoding: draft the most frequent continuation of the text's end, as far as the match and the counts bear it.

SuffixDecoding (Oliaro et al., 2411.04975) and its implementation in Snowflake's ArcticInference, which vLLM serves as
``suffix``. A token's chance is its count among all tokens that followed the same run; a path's is the product along it. A
match of p tokens is worth a draft of ``factor`` x p tokens; the match whose draft has the largest sum of chances wins. In
place of their trees of bounded depth stands an automaton, so that a match is as long as it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Self

from ..errors import UserError
from ..heads.base import Draft
from .automaton import Automaton
from .lookups import LookUp, chained, form_of, grown
from .proposers import Text
from .tree import Settings, positive

REACH = 64  # tokens of the text's end that are sought in earlier responses
HINT = "write suffix:32, suffix:32,factor=5,min=0.1, suffix:32,memory=1000 (remember responses) or suffix:16,nodes=24 (trees)"


@dataclass
class Found:
    """A draft's tokens, each with its parent (1-based; 0 is the root), and the sum of their paths' chances."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0


class Memory:
    """The latest responses, ``least`` of them or more, but fewer than twice as many: an automaton forgets only as a whole."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.responses: list[list[int]] = []
        self.automaton = Automaton()

    def add(self, response: list[int]) -> None:
        self.responses.append(response)
        fresh = [response]
        if len(self.responses) >= 2 * self.least:
            fresh = self.responses = self.responses[-self.least :]
            self.automaton = Automaton()
        for each in fresh:
            self.automaton.restart()
            self.automaton.extend(each)


class Suffix(LookUp):
    """Chains of at most ``length`` tokens, or with ``nodes`` trees of at most so many.

    ``factor``: drafted tokens for every matched one. ``least``: the least chance of a drafted path. ``memory``: how many
    earlier responses are looked into besides the text itself; its better draft is taken where it beats the text's own.
    """

    name = "suffix"

    def __init__(self, length: int = 32, factor: float = 5.0, least: float = 0.1, memory: int = 0, nodes: int = 0) -> None:
        self.length, self.factor, self.least, self.nodes = length, factor, least, nodes
        self.memory = Memory(memory) if memory else None

    @classmethod
    def read(cls, settings: str) -> Self:
        """Read ``32,factor=5,min=0.1,memory=1000,nodes=24``: the length, and what behind it differs from the defaults."""
        size, *rest = settings.split(",")
        try:
            given = Settings(rest, {"factor", "min", "memory", "nodes"})
            factor = float(given.given.get("factor", 5))
            if not 0 < factor < float("inf"):
                raise ValueError(f"factor is {factor:g} and must be positive")
            least = given.chance("min") or 0.1
            return cls(positive(size or "32"), factor, least, given.count("memory", 0), given.count("nodes", 0))
        except ValueError as error:
            raise UserError(f"suffix:{settings} cannot be read ({error}): {HINT}.") from error

    def described(self) -> dict[str, Any]:
        memory = f",memory={self.memory.least}" if self.memory else ""
        nodes = f",nodes={self.nodes}" if self.nodes else ""
        name = f"suffix:{self.length},factor={self.factor:g},min={self.least:g}{memory}{nodes}"
        stop = {"below": self.least, "by": "the frequency of the path"}
        return form_of(name, self.length, self.nodes or None) | {"stop": stop}

    def begin(self, prompt: list[int]) -> Automaton:
        automaton = Automaton()
        automaton.extend(prompt)
        return automaton

    def draft(self, text: Text) -> Draft:
        own, deepest = text.state, min(self.length, text.room)
        own.extend(text.tokens[own.read :])
        found = self.best(own, own.ends(), deepest)
        if self.memory:
            earlier = self.memory.automaton
            other = self.best(earlier, earlier.matches(text.tokens[-REACH:]), deepest)
            found = other if other.score > found.score else found
        return grown(found.parents, found.tokens, self.name) if self.nodes else chained(found.tokens)

    def best(self, automaton: Automaton, matches: Iterable[tuple[int, int]], deepest: int) -> Found:
        """The draft with the largest score, the one of the longest match among equals. ``matches``: longest first."""
        found = Found()
        for state, length in matches:
            size = min(self.nodes or deepest, int(length * self.factor))
            if size <= found.score:  # a chance is at most 1, and shorter matches draft no more than this one
                break
            other = self.tree(automaton, state, size, deepest) if self.nodes else self.path(automaton, state, size)
            if other.score > found.score:
                found = other
        return found

    def path(self, automaton: Automaton, state: int, size: int) -> Found:
        """The most frequent token each time; the one that came first among equals."""
        tokens, chance, score, count = [], 1.0, 0.0, automaton.count
        while len(tokens) < size and (follow := automaton.follow[state]):
            if len(follow) == 1:
                ((token, state),) = follow.items()
            else:
                total = sum(count[after] for after in follow.values())
                token, state = max(follow.items(), key=lambda item: count[item[1]])
                chance *= count[state] / total
                if chance < self.least:
                    break
            tokens.append(token)
            score += chance
        return Found(tokens, list(range(len(tokens))), score)

    def tree(self, automaton: Automaton, state: int, size: int, deepest: int) -> Found:
        """Always the node with the best path next: the one that was met first among equals."""
        found, count, met = Found(), automaton.count, 0
        heap: list[tuple[float, int, int, int, int, int]] = []  # -chance, when met, state, depth, token, parent
        node, depth, chance = 0, 0, 1.0
        while True:
            follow = automaton.follow[state] if depth < deepest else {}
            total = sum(count[after] for after in follow.values())
            for token, after in follow.items():
                if (own := chance * (count[after] / total)) >= self.least:
                    met += 1
                    heappush(heap, (-own, met, after, depth + 1, token, node))
            if not heap or len(found.tokens) == size:
                return found
            negative, _, state, depth, token, parent = heappop(heap)
            chance = -negative
            found.tokens.append(token)
            found.parents.append(parent)
            found.score += chance
            node = len(found.tokens)

    def finish(self, text: Text) -> None:
        if self.memory:
            self.memory.add(text.tokens[text.prompt :])
