"""What a diagnosis looks at, what it says of one cause, and how sure a number is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ..data.chat import Encoded
from ..heads.base import DraftHead
from ..target import Target
from .walk import Text, Walked, walk_all

DRAWS = 200  # of a bootstrap over texts
One = TypeVar("One")
Other = TypeVar("Other")


@dataclass(frozen=True)
class Part:
    """One cause. ``share``: the tokens per target pass that it costs, never below 0 (None: the experiment does not apply);
    ``interval``: of the difference that was measured, 95 %.

    ``fault``: what the run learnt from is shown to differ from what a server feeds or the target writes, or the run is too
    short to judge. A fault ranks first, whatever it costs. ``next_step`` is what to do about the part.
    """

    name: str
    says: str
    share: float | None = None
    interval: tuple[float, float] | None = None
    fault: bool = False
    evidence: dict[str, Any] = field(default_factory=dict)
    next_step: str = ""


@dataclass(frozen=True)
class Case:
    """All that the experiments look at.

    ``texts``: the target's greedy replies to the prompts as a server renders them, of at most ``max_new`` tokens; ``own``:
    their walks, one for one. ``asked``: the same prompts as the recipe's target renders them, empty where that is the target
    that serves. ``unseen``: replies of the run's held-out data as they stand there. ``taught``: some training rows,
    ``recorded`` by the store that the run read, or encoded anew. ``home``: walks on the target's replies to the run's own
    held-out prompts, where the prompts are others. ``mix``: the training rows' share of each category. ``hot``: walks on
    replies drawn at ``temperature``, empty at 0. ``curve``: the rows of metrics.jsonl.
    """

    target: Target
    head: DraftHead
    length: int
    texts: list[Text]
    own: list[Walked]
    max_new: int = 64
    asked: list[list[int]] = field(default_factory=list)
    unseen: list[Text] = field(default_factory=list)
    taught: list[Encoded] = field(default_factory=list)
    recorded: bool = False
    home: list[Walked] = field(default_factory=list)
    mix: dict[str, float] = field(default_factory=dict)
    temperature: float = 0.0
    hot: list[Walked] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)
    show: bool = False

    def walked(self, texts: Sequence[Text], title: str) -> list[Walked]:
        return walk_all(self.target, self.head, texts, self.length, title=title, show=self.show)


def interval(found: Sequence[One], measure: Callable[[list[One]], float]) -> tuple[float, float]:
    """The 95 % interval of a measure of texts, by bootstrap over the texts."""
    return between(found, [None], lambda drawn, _: measure(drawn))


def between(
    ours: Sequence[One], theirs: Sequence[Other], measure: Callable[[list[One], list[Other]], float]
) -> tuple[float, float]:
    """The same of a measure of two sets of texts, each resampled by itself."""
    rng = np.random.default_rng(0)

    def drawn(found: Sequence[Any]) -> list[Any]:
        return [found[i] for i in rng.integers(max(len(found), 1), size=len(found))]

    low, high = np.quantile([measure(drawn(ours), drawn(theirs)) for _ in range(DRAWS)], [0.025, 0.975])
    return float(low), float(high)
