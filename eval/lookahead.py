"""Lookahead decoding: the target itself guesses ahead in every pass, and what it guessed is drafted when it fits.

Fu et al., 2402.02057, and github.com/hao-ai-lab/LookaheadDecoding. Beside the draft each pass reads a window of W columns and
N - 1 levels. Level 0 is a guess at the text ahead, column 0 being the last token itself; what the target says behind column i
of one level is column i of the next, one token further. A column with what is said behind its last level is an n-gram: it
goes into a pool. Then level 0 falls off, and the window moves on by as many tokens as the text grew. The draft is all
n-grams of the pool that begin with the last token, in one tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, Self

from torch import Tensor

from ..errors import UserError
from ..heads.base import Draft, Shape
from .lookups import LookUp, form_of, merged, tree
from .proposers import Text
from .tree import Settings, positive

HINT = "write lookahead:5x4 (window x n-gram), lookahead:5x4,guesses=5 or lookahead:5x4,prompt=no"


@dataclass
class Pool:
    """The latest ``most`` n-grams of every first token: first token -> the others, the latest one last."""

    most: int
    grams: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)

    def add(self, gram: Sequence[int]) -> None:
        own, rest = self.grams.setdefault(gram[0], {}), tuple(gram[1:])
        own.pop(rest, None)
        own[rest] = None
        if len(own) > self.most:
            del own[next(iter(own))]

    def behind(self, token: int) -> list[tuple[int, ...]]:
        """What may follow a token, the latest first."""
        return list(reversed(self.grams.get(token, {})))


@dataclass
class Window:
    """One text's window. ``levels``: the token of every column, and ``found`` what the target said behind the last level
    (None where nothing was asked). ``at``: the text's length when they were read. ``pooled``: the tokens of the text whose
    n-grams are in the pool."""

    pool: Pool
    levels: list[list[int]]
    found: list[int] = field(default_factory=list)
    at: int = 0
    pooled: int = 0
    random: Random = field(default_factory=lambda: Random(0))


class Lookahead(LookUp):
    """A window of ``width`` columns for n-grams of ``size`` tokens, of which at most ``guesses`` are drafted at once.

    ``from_text``: the pool also takes the n-grams of the prompt and of the text as it grows.
    """

    name = "lookahead"

    def __init__(self, width: int = 5, size: int = 4, guesses: int = 5, from_text: bool = True) -> None:
        if width < 2 or size < 3:
            raise UserError(f"lookahead:{width}x{size} has no window: give 2 columns and n-grams of 3 tokens, or more.")
        self.width, self.size, self.guesses, self.from_text = width, size, guesses, from_text
        self.length = size - 1

    @classmethod
    def read(cls, settings: str) -> Self:
        """Read ``5x4,guesses=5,prompt=yes``: columns and the n-gram's tokens; all of it may be left out."""
        size, *rest = settings.split(",")
        try:
            given = Settings(rest, {"guesses", "prompt"})
            from_text = given.given.get("prompt", "yes")
            if from_text not in ("yes", "no"):
                raise ValueError(f"prompt is {from_text!r} and must be yes or no")
            width, _, gram = (size or "5x4").partition("x")
            return cls(positive(width), positive(gram), given.count("guesses", 5), from_text == "yes")
        except ValueError as error:
            raise UserError(f"lookahead:{settings} cannot be read ({error}): {HINT}.") from error

    def described(self) -> dict[str, Any]:
        prompt = "" if self.from_text else ",prompt=no"
        name = f"lookahead:{self.width}x{self.size},guesses={self.guesses}{prompt}"
        return form_of(name, self.length, self.guesses * self.length)

    def begin(self, prompt: list[int]) -> Window:
        window = Window(Pool(self.guesses), [[]])
        self.pad(window, prompt)
        self.take(window, prompt)
        return window

    def take(self, window: Window, tokens: list[int]) -> None:
        """Put the n-grams of the text that are new into the pool."""
        if self.from_text:
            for end in range(max(window.pooled + 1, self.size), len(tokens) + 1):
                window.pool.add(tokens[end - self.size : end])
            window.pooled = len(tokens)

    def draft(self, text: Text) -> Draft:
        window, tokens = text.state, text.tokens
        self.take(window, tokens)
        paths = [path[: text.room] for path in window.pool.behind(tokens[-1])]
        draft = merged(paths, self.name)
        if text.room < self.width + self.size - 3:  # the window's deepest node would not fit
            return draft
        if window.found:
            self.move(window, tokens)
        window.levels[0][0], window.at = tokens[-1], len(tokens)
        shape, places = laid(self.width, len(window.levels))
        return Draft(draft.tokens, draft.shape, aside=Draft([window.levels[j][i] for j, i in places], shape))

    def move(self, window: Window, tokens: list[int]) -> None:
        """Put what was found on top, and move to the text's new end. While the window fills, no level falls off."""
        grown = len(tokens) - window.at
        levels = [*window.levels, window.found]
        if len(levels) == self.size:  # below level 1 lies the text's next token, so that it is one column ahead already
            levels, grown = levels[1:], grown - 1
        window.levels = [level[grown:] for level in levels]
        self.pad(window, tokens)

    def pad(self, window: Window, tokens: list[int]) -> None:
        """Columns of which nothing is known yet hold random tokens of the text."""
        for level in window.levels:
            level += window.random.choices(tokens, k=self.width - len(level))

    def learn(self, text: Text, draft: Draft, logits: Tensor) -> None:
        window = text.state
        top = len(window.levels) - 1
        nodes = {column: n for n, (level, column) in enumerate(laid(self.width, top + 1)[1]) if level == top}
        said = dict(zip(nodes, logits[list(nodes.values())].argmax(-1).tolist(), strict=True))
        window.found = [said.get(column, text.tokens[-1]) for column in range(self.width)]
        if len(window.levels) == self.size - 1:
            for gram in zip(*window.levels, window.found, strict=True):
                window.pool.add(gram)


@lru_cache
def laid(width: int, levels: int) -> tuple[Shape, list[tuple[int, int]]]:
    """The window below the last token as a tree, and the level and column of every node, by depth: column i of level j is
    i + j deep. It reads level 0 up to its column, then its column up to its level."""
    places = [(j, i) for j in range(levels) for i in range(width) if (j, i) != (0, 0)]
    places.sort(key=sum)
    node = {place: n for n, place in enumerate([(0, 0), *places])}
    parents = tuple(node[(j - 1, i) if j else (j, i - 1)] for j, i in places)
    return tree(parents, "window"), places
