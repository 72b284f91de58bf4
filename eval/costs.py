"""What a pass of the target costs, by tokens read, sequences and context: measured and fitted, or bounded by a roofline.

Verification dominates a speculating engine's time, and no datasheet tells it: rooflines flatter it by half and more (they are
upper bounds of the speed). So passes are timed as the decoder runs them, drafts laid out and walked included, in interleaved
rounds, and the medians are fitted by a surface that is linear between the measured points and rises as far as their noise
explains that they fall.
"""

import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..console import Progress
from ..errors import UserError
from ..heads.base import Draft
from ..sampling import GREEDY, Sampling
from ..target import Target
from .proposers import Proposer, Text
from .service import DraftCost, Hardware, StepCost
from .tree import NONE, chain
from .verifier import Request, admit, advance, decode

ROUNDS = 9  # of every measurement; the median counts
NOISE = 3  # standard errors by which a point may be moved
FAR = 1000  # steps of the last size beyond a table's edge
FIRST = 2  # rounds that only warm up


class Cost(Protocol):
    """Seconds of a pass in which ``batch`` sequences read ``tokens`` each behind ``context`` cached ones."""

    bound: bool

    def seconds(self, batch: float, tokens: float, context: float = 0) -> float: ...
    def spread(self) -> float: ...
    def beyond(self, batch: float, tokens: float) -> bool: ...


@dataclass(frozen=True)
class Surface:
    """A table fitted as rising as its spread allows and linear between its points; ``values`` [*axes] over rising ``axes``.

    Beyond the points it goes on with the slope at the edge, or a steeper one where it would fall otherwise; below them it is
    constant. Where passes were measured at one batch size alone, tokens stand for sequences: a pass costs what its tokens in
    total cost.
    """

    axes: tuple[tuple[float, ...], ...]  # context, batch, tokens; the last of several points lies far outside the table
    values: list[Any]  # [*axes]
    spreads: tuple[float, ...]
    bound = False

    @classmethod
    def fit(cls, table: Iterable[tuple[tuple[float, ...], float, float]], names: Sequence[str]) -> "Surface":
        """From rows (point, seconds, spread), the coordinates called ``names``; of several rows for one point the median
        counts. Raises UserError for points that fill no grid."""
        found: dict[tuple[float, ...], list[tuple[float, float]]] = {}
        for point, seconds, spread in table:
            found.setdefault(tuple(map(float, point)), []).append((seconds, spread))
        axes = tuple(tuple(sorted(set(axis))) for axis in zip(*found, strict=True))
        values, spreads = (np.full([len(axis) for axis in axes], np.nan) for _ in range(2))
        for point, rows in found.items():
            place = tuple(axis.index(at) for axis, at in zip(axes, point, strict=True))
            values[place], spreads[place] = np.median(rows, axis=0)
        if np.isnan(values).any():
            missing = np.argwhere(np.isnan(values))[0]
            gap = ", ".join(f"{name} {axis[at]:g}" for name, axis, at in zip(names, axes, missing, strict=True))
            raise UserError(f"the costs have no row for {gap}: give every combination of the values that occur.")
        wider = tuple((*axis, axis[-1] + FAR * (axis[-1] - axis[-2])) if len(axis) > 1 else axis for axis in axes)
        return cls(wider, extended(settled(values, spreads)).tolist(), tuple(spreads.flatten().tolist()))

    def seconds(self, batch: float, tokens: float, context: float = 0) -> float:
        if len(self.axes[1]) == 1 and self.axes[1][0] == 1:
            batch, tokens = 1, batch * tokens
        return interpolated(self.values, self.axes, (context, batch, tokens))

    def at(self, batch: float, tokens: float) -> float:
        """As ``seconds``, but one batch size stands for all."""
        return interpolated(self.values, self.axes, (0, batch, tokens))

    def spread(self) -> float:
        """The relative standard error of a typical point."""
        return statistics.median(self.spreads)

    def beyond(self, batch: float, tokens: float) -> bool:
        """Whether a pass is larger than any that was measured."""
        if len(self.axes[1]) == 1 and self.axes[1][0] == 1:
            batch, tokens = 1, batch * tokens
        return batch > measured(self.axes[1])[-1] or tokens > measured(self.axes[2])[-1]


@dataclass(frozen=True)
class Roofline:
    """The least seconds that memory traffic and arithmetic allow a dense model: speed-ups from it are upper bounds."""

    hardware: Hardware
    bound = True

    def seconds(self, batch: float, tokens: float, context: float = 0) -> float:
        of = self.hardware
        read = (of.weights + batch * context * of.cache_per_token) / of.bandwidth
        return max(read, 2 * of.parameters * batch * tokens / of.flops) + of.overhead

    def spread(self) -> float:
        return 0.0

    def beyond(self, batch: float, tokens: float) -> bool:
        return False

    def free_tokens(self) -> float:
        """How many tokens a pass may read before arithmetic outweighs the reading of the weights."""
        return self.hardware.weights * self.hardware.flops / (2 * self.hardware.parameters * self.hardware.bandwidth)


def step_surface(rows: Sequence[StepCost]) -> Surface:
    points = (((row.context, row.batch, row.tokens), row.seconds, row.spread) for row in rows)
    return Surface.fit(points, ("context", "batch", "tokens"))


def draft_surface(rows: Sequence[DraftCost]) -> Surface:
    points = (((0, row.batch, row.length), row.seconds, row.spread) for row in rows)
    return Surface.fit(points, ("context", "batch", "length"))


def rising(values: np.ndarray) -> np.ndarray:
    """The array made to rise along every axis: midway (in ratio) between the running maximum from below and the running
    minimum from above, which of all rising arrays has the least largest error."""
    above, below = values, values
    for axis in range(values.ndim):
        above = np.maximum.accumulate(above, axis)
        below = np.flip(np.minimum.accumulate(np.flip(below, axis), axis), axis)
    return np.sqrt(above * below)


def measured(axis: Sequence[float]) -> Sequence[float]:
    """A surface's axis without the point outside the table."""
    return axis[:-1] if len(axis) > 1 else axis


def settled(values: np.ndarray, spreads: np.ndarray) -> np.ndarray:
    """The rising array nearest to the values, as far as their spread explains that they fall: where a larger pass is faster
    beyond the noise, the machine has a better kernel for it, and that stays."""
    near = NOISE * spreads
    return np.clip(rising(values), values * (1 - near), values * (1 + near))


def extended(values: np.ndarray) -> np.ndarray:
    """The array with a far point behind the last of every axis of several points, from where it rises along all axes."""
    for axis, size in enumerate(values.shape):
        if size > 1:
            last = np.take(values, [-1], axis)
            slope = np.maximum(last - np.take(values, [-2], axis), 0)
            for other in range(values.ndim):
                slope = np.maximum.accumulate(slope, other)
            values = np.concatenate([values, last + FAR * slope], axis)
    return values


def interpolated(values: Any, axes: Sequence[Sequence[float]], point: Sequence[float]) -> float:
    """Linear between the nearest points of every axis in turn; ``values`` are nested lists [*axes]."""
    if not axes:
        return values
    axis = axes[0]
    if len(axis) == 1:
        return interpolated(values[0], axes[1:], point[1:])
    left = min(max(bisect_left(axis, point[0]) - 1, 0), len(axis) - 2)
    share = max(0.0, (point[0] - axis[left]) / (axis[left + 1] - axis[left]))
    low = interpolated(values[left], axes[1:], point[1:])
    return low + share * (interpolated(values[left + 1], axes[1:], point[1:]) - low) if share else low


# -- measuring -------------------------------------------------------------------------------------------------


class Scripted:
    """Drafts ``length`` tokens that no one wrote, to be rejected: what a pass costs does not depend on them."""

    name, taps, adapts, drawn = "scripted", (), False, False

    def __init__(self) -> None:
        self.length = 0

    def described(self) -> dict[str, Any]:
        return {"kind": "chain", "name": self.name, "length": self.length, "nodes": self.length, "paths": None, "stop": None}

    def adapted(self, target: Target) -> nullcontext[None]:
        return nullcontext()

    def begin(self, prompt: list[int]) -> None: ...

    def propose(self, texts: list[Text], target: Target) -> list[Draft]:
        shape = chain(self.length) if self.length else NONE
        return [Draft([1 + place % (target.vocab_size - 1) for place in range(self.length)], shape) for _ in texts]

    def learn(self, text: Text, draft: Draft, logits: torch.Tensor) -> None: ...

    def finish(self, text: Text) -> None: ...


@torch.inference_mode()
def measure_steps(
    target: Target,
    batches: Sequence[int],
    tokens: Sequence[int],
    context: int,
    sampling: Sampling = GREEDY,
    rounds: int = ROUNDS,
    show: bool = False,
) -> list[StepCost]:
    """Time one pass for every batch size and number of tokens read by each sequence, behind ``context`` tokens, or as many as
    the target's context leaves. No two sequences are equally long, as in decoding, where that costs a mask.

    The whole pass is timed, its draft laid out, verified and walked. Every round times each number of tokens once, forward
    and backward in turn, so that a machine that slows down slows them all. Raises UserError where the target's context is
    too short.
    """
    longest = target.max_positions - max(tokens) - 1
    if longest < 1:
        raise UserError(f"the context of {target.name} is too short to time passes of {max(tokens)} tokens: time fewer.")
    context = min(context, longest)
    words = [1 + place % (target.vocab_size - 1) for place in range(context)]
    table = []
    with Progress("timing the target", len(batches) * rounds, show=show) as bar:
        for batch in batches:
            proposer, running, cache = Scripted(), [], target.new_cache()
            for row in range(batch):
                generator = torch.Generator().manual_seed(row)
                request = Request(words[: max(context - row, 1)], target.max_positions, generator)
                new, own = admit(target, proposer, row, request, sampling)
                cache = target.join(cache, own) if running else own
                running.append(new)
            seconds: dict[int, list[float]] = {count: [] for count in tokens}
            for turn in range(-FIRST, rounds):
                for count in tokens if turn % 2 else list(tokens)[::-1]:
                    proposer.length = count - 1
                    passed = advance(target, proposer, running, cache, sampling, None, batch)
                    seconds[count].append(passed.total - passed.draft)
                    for each in running:
                        del each.text.tokens[each.text.prompt + 1 :]
                    target.select(cache, range(batch), context)
                bar.advance(turn >= 0)
            table += [
                StepCost(tokens=count, batch=batch, context=context, **median(times[FIRST:]))
                for count, times in seconds.items()
            ]
    return table


def measure_drafts(
    target: Target,
    proposer: Proposer,
    requests: Sequence[Request],
    batches: Sequence[int],
    sampling: Sampling = GREEDY,
) -> list[DraftCost]:
    """Time a proposer's drafting for every batch size, on the requests' own texts: the mean, since a hit costs more than a miss
    and the first draft of a text more than any other. Passes that are not full do not count."""
    table = []
    with proposer.adapted(target):
        for batch in batches:
            asked = [requests[place % len(requests)] for place in range(batch)]
            passes = decode(target, proposer, asked, sampling, batch).passes
            times = [each.draft for each in passes if each.active == batch]
            if times:
                cost = {"seconds": statistics.fmean(times), "spread": scatter(times) / len(times) ** 0.5}
                table.append(DraftCost(batch=batch, length=max(proposer.length, 1), **cost))
    return table


def measure_prefill(target: Target, prompts: Sequence[list[int]]) -> list[float]:
    """Seconds that reading each prompt takes by itself; the first is read once beforehand."""
    found = []
    for prompt in [prompts[0], *prompts]:
        began = time.perf_counter()
        target.prefill(torch.tensor(prompt, device=target.device), target.new_cache(), [])
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        found.append(time.perf_counter() - began)
    return found[1:]


def median(times: Sequence[float]) -> dict[str, float]:
    """The median of some seconds and its relative standard error, by the quartiles (of a normal distribution)."""
    return {"seconds": statistics.median(times), "spread": 1.2533 * scatter(times) / len(times) ** 0.5}


def scatter(times: Sequence[float]) -> float:
    """The relative standard deviation, by the quartiles; 0 for a single time."""
    if len(times) < 2:
        return 0.0
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75])
    return float((high - low) / 1.349 / middle)
