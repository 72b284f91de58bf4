"""Which form of draft pays on this machine: none, a chain, a static or a dynamic tree, and how large.

What a form costs is measured: the target's pass over n tokens and the head's reading of a level, at the prompts' typical
length. What it gives is counted on texts that the target writes by itself: at every place the head is asked once what it
would draft, and every form is played through on the answers, going on behind what would have been accepted. So nothing is
decoded with a form before it is chosen, and neither are depths taken for independent nor the head's probabilities for right.
Sequoia (Chen et al., 2402.12374) chooses a static tree's size by a measured cost in this way.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..console import note
from ..errors import UserError
from ..heads.base import Draft, DraftHead, Shape
from ..heads.drafting import Drafting, Form, draft_all
from ..heads.growing import Dynamic
from ..sampling import GREEDY, Sampling
from ..target import Target
from .costs import rising
from .prompts import Prompt
from .search import SHARE, Candidates, Place, search, shares, walk
from .tree import NONE, Auto, Paced, chain, fitted, full
from .verifier import laid_out

SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # of the trees that are tried, in tokens
PLACES = 384  # of the texts, all prompts together
ROUNDS = 5  # of every measurement; the median counts
WORTH = 1.02  # the speed-up a form must promise: measured times wobble by as much


def choose_form(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Prompt],
    wish: Auto,
    max_new: int,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
    drawn: bool = False,
    batch: int = 1,
    show: bool = False,
) -> tuple[Form, Sequence[Prompt], dict[str, Any]]:
    """Choose a form on the first quarter of the prompts: the form, the prompts left to measure it on, and what was found.

    ``drawn`` drafts are played through as if they were the likeliest ones, and are never dynamic trees. Raises UserError for
    a single prompt.
    """
    if len(prompts) < 2:
        raise UserError(f"--tree {wish.name} needs two prompts or more, some to choose the form on and others to measure it.")
    spent = max(1, len(prompts) // SHARE)
    depths = min(wish.length, head.deepest or wish.length)
    new = min(max_new, 2 + depths + -(-PLACES // spent))
    grown = None if drawn else Dynamic(wish.nodes, wish.width, depths)
    texts = walk(target, head, prompts[:spent], depths, wish.width, new, sampling, generator, show, grown)
    texts = [[place for place in text if len(place.ranks) == depths] or text for text in texts]
    known = shares([place for text in texts for place in text], depths, wish.width)
    costs = measured(target, head, prompts, max_new, wish.nodes + 1, depths, wish.width, batch, sampling if drawn else None)
    tried = [*static(texts, known, wish.nodes), *(dynamic(texts, wish) if grown else [])]
    best, table = choose(tried, costs)
    found = {
        "prompts": spent,
        "places": sum(map(len, texts)),
        "accuracy": known,
        "costs": asdict(costs),
        "candidates": table,
        "expected_tau": best.tau,
        "expected_speedup": best.speedup(costs),
        "verdict": verdict(best, table, costs),
    }
    note(found["verdict"])
    return best.form, prompts[spent:], found


def settle_pace(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Prompt],
    wish: Paced,
    max_new: int,
    sampled: Sampling | None = None,
    batch: int = 1,
) -> Paced:
    """The adaptive chain with its costs, measured where it has none. ``sampled``: how drafts are drawn. Raises UserError for
    a chain that is longer than the head's."""
    fitted(chain(wish.length), head)
    if wish.costs:
        return wish
    costs = measured(target, head, prompts, max_new, wish.length + 1, wish.length, 1, batch, sampled)
    seconds = [costs.seconds(length, {1: length - 1}) for length in range(wish.length + 1)]
    return Paced(wish.length, tuple(each / seconds[0] for each in seconds))


# -- choosing --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Median seconds behind ``context`` tokens, for ``batch`` sequences that share a pass.

    ``verify``: the target's pass, by tokens of a sequence. ``begin``: the head reads what is new and says the first token.
    ``level``: it reads one level of a draft and says the next, by nodes of the level.
    """

    context: int
    batch: int
    verify: dict[int, float]
    begin: float
    level: dict[int, float]

    def seconds(self, nodes: float, levels: dict[int, float]) -> float:
        """A pass with a draft of so many nodes. ``levels``: how many levels the head reads for it, by nodes."""
        if not nodes:
            return self.verify[1]
        drafting = self.begin + sum(count * between(self.level, read) for read, count in levels.items())
        return between(self.verify, 1 + nodes) + drafting


def between(measured: dict[int, float], at: float) -> float:
    """A curve at a place where it was not measured."""
    places = sorted(measured)
    return float(np.interp(at, places, [measured[place] for place in places]))


@dataclass(frozen=True)
class Candidate:
    """A form and what it gives: ``tau``, tokens of a draft, and the levels the head reads for one, by nodes."""

    form: Form
    tau: float
    nodes: float
    levels: dict[int, float]

    def speedup(self, costs: Costs) -> float:
        """Over plain decoding on a machine of these costs, behind the prefill."""
        return self.tau * costs.seconds(0, {}) / costs.seconds(self.nodes, self.levels)


PLAIN = Candidate(NONE, 1.0, 0, {})


def choose(candidates: Sequence[Candidate], costs: Costs) -> tuple[Candidate, list[dict[str, Any]]]:
    """The candidate of the highest speed-up, plain decoding where none is worth it, and the best of every kind and size."""
    ranked = sorted([PLAIN, *candidates], key=lambda each: (-each.speedup(costs), each.nodes, each.form.length))
    best = ranked[0] if ranked[0].speedup(costs) >= WORTH else PLAIN
    table: dict[tuple[str, int], dict[str, Any]] = {}
    for each in ranked:
        row = {"form": each.form.name, "length": each.form.length, "tau": each.tau, "mean_nodes": each.nodes}
        timed = {"seconds": costs.seconds(each.nodes, each.levels), "speedup": each.speedup(costs)}
        table.setdefault((each.form.kind, each.form.nodes), row | timed)
    return best, list(table.values())


def verdict(best: Candidate, table: list[dict[str, Any]], costs: Costs) -> str:
    """What was found, in a sentence."""
    most = max(costs.verify)
    passes = f"a pass over {most} tokens takes {costs.verify[most] / costs.verify[1]:.2f} times one token's"
    if best is not PLAIN:
        return f"{best.form.name} promises τ {best.tau:.2f} and a speed-up of {best.speedup(costs):.2f}; {passes}"
    tried = next(row for row in table if row["form"] != "none")
    return f"no draft pays: {tried['form']} promises τ {tried['tau']:.2f} and a speed-up of {tried['speedup']:.2f}; {passes}"


# -- what a form gives -----------------------------------------------------------------------------------------


def static(texts: Sequence[Sequence[Place]], accuracy: list[list[float]], nodes: int) -> Iterator[Candidate]:
    """Every chain, and of every size and depth the tree that Medusa's search grows from the shares of right ranks."""
    lengths = range(1, len(accuracy) + 1)
    for shape in [chain(length) for length in lengths if length <= nodes]:
        yield played(shape, texts)
    for size in (size for size in SIZES if size <= nodes):
        for shape in dict.fromkeys(search(accuracy[:length], size) for length in lengths):
            if not shape.is_chain:
                yield played(shape, texts)


def played(shape: Shape, texts: Sequence[Sequence[Place]]) -> Candidate:
    paths = {tuple(path) for path in shape.paths}
    accepted = [[along(place.ranks, paths) for place in text] for text in texts]
    return Candidate(shape, through(accepted), shape.nodes, dict(Counter(map(len, shape.bearing[1:]))))


def along(ranks: Sequence[int], paths: set[tuple[int, ...]]) -> int:
    """How far a text of these ranks stays within a tree of these paths."""
    depth = 0
    while depth < len(ranks) and tuple(ranks[: depth + 1]) in paths:
        depth += 1
    return depth


def through(accepted: Sequence[Sequence[int]]) -> float:
    """Tokens per pass of decoding texts when so many drafts are accepted at every place; 1 where there is no place."""
    passes = tokens = 0
    for text in accepted:
        at = 0
        while at < len(text):
            passes, at = passes + 1, at + 1 + text[at]
        tokens += at
    return tokens / passes if passes else 1.0


def dynamic(texts: Sequence[Sequence[Place]], wish: Auto) -> Iterator[Candidate]:
    """EAGLE-2's trees of every size and depth, cut from the candidates of the largest."""
    places = [place.grown for text in texts for place in text if place.grown]
    deepest = max((int(grown.depths.max()) for grown in places), default=0)
    for size in (size for size in SIZES if size <= wish.nodes):
        read = [widths(grown, size, wish.width) for grown in places]
        for length in range(1, deepest + 1):
            accepted = [[kept(place.grown, size, length)[0] for place in text if place.grown] for text in texts]
            nodes = statistics.fmean(kept(grown, size, length)[1] for grown in places)
            levels = Counter(width for own in read for width in own[: length - 1] if width)
            mean = {width: count / len(places) for width, count in levels.items()}
            yield Candidate(Dynamic(size, wish.width, length), through(accepted), nodes, mean)


def kept(grown: Candidates, nodes: int, length: int) -> tuple[int, int]:
    """Of a dynamic tree so large and deep: how many of its nodes go along the text, and how many it has."""
    shallow = np.flatnonzero((grown.depths > 0) & (grown.depths <= length))
    best = shallow[np.argsort(-grown.scores[shallow], kind="stable")[:nodes]]
    return int(np.isin(grown.right, best).sum()), len(best)


def widths(grown: Candidates, nodes: int, width: int) -> list[int]:
    """How many candidates of every depth are expanded for a dynamic tree so large: those that may have a child in it."""
    found = []
    for depth in range(1, int(grown.depths.max()) + 1):
        level = np.sort(grown.scores[grown.depths == depth])[::-1][:width]
        so_far = np.sort(grown.scores[1:][grown.depths[1:] <= depth])[::-1]
        found.append(int((level > so_far[nodes - 1]).sum()) if len(so_far) >= nodes else len(level))
    return found


# -- what a form costs -----------------------------------------------------------------------------------------


@torch.inference_mode()
def measured(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Prompt],
    max_new: int,
    tokens: int,
    depths: int,
    width: int,
    batch: int = 1,
    sampled: Sampling | None = None,
) -> Costs:
    """Time passes of up to ``tokens`` tokens and drafts of ``depths`` levels, one after the other in every round.

    All stand behind the median prompt and half of its answer; what the tokens are does not matter for their time. Medians
    that fall where more tokens are read are noise: they are fitted by a curve that rises.
    """
    asked = [prompt.ids(target) for prompt in prompts]
    context = int(statistics.median(map(len, asked))) + max_new // 2
    context = max(2 * ROUNDS + 4, min(context, target.max_positions - depths - 2))
    ids = torch.tensor((asked[0] * context)[:context], device=target.device)
    jobs = passes(target, ids, tokens, batch) | drafts(target, head, ids, depths, width, batch, sampled)
    times: dict[Any, list[float]] = {name: [] for name in jobs}
    for round in range(ROUNDS + 1):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            if round:  # the first one warms up
                times[name].append(time.perf_counter() - began)
    median = {name: statistics.median(each) for name, each in times.items()}
    begin, whole = median.pop("begin"), {read: median.pop((read,)) for read in {1, width}}
    level = {read: max(0.0, seconds - begin) / max(1, depths - 1) for read, seconds in whole.items()}
    verify = dict(zip(median, rising(np.array(list(median.values()))).tolist(), strict=True))
    return Costs(context, batch, verify, begin, level)


def passes(target: Target, ids: torch.Tensor, tokens: int, batch: int) -> dict[Any, Callable[[], None]]:
    """Passes of the target behind ``ids``, by the tokens of each of ``batch`` sequences. No two sequences are equally long, as
    in decoding, where that costs even a plain pass a mask."""
    cache = target.new_cache()
    target.prefill(ids, cache, ())
    target.select(cache, [0] * batch, len(ids))  # the same text so many times
    lengths = [max(1, len(ids) - row) for row in range(batch)]
    behind = torch.tensor(lengths, device=target.device)[:, None]

    def verify(count: int) -> Callable[[], None]:
        branches = Draft([0] * (count - 1), full([count - 1]) if count > 1 else NONE)

        def run() -> None:
            rows, depths, seen = laid_out([branches] * batch, [0] * batch, target.device)
            logits, _ = target.verify(rows, behind + depths, seen, lengths, cache, ())
            logits.argmax(-1).tolist()
            target.keep(cache, lengths, [[]] * batch)

        return run

    counts = {*range(1, min(9, tokens) + 1), *(1 + size for size in SIZES if size < tokens), tokens}
    return {count: verify(count) for count in sorted(counts)}


def drafts(
    target: Target, head: DraftHead, ids: torch.Tensor, depths: int, width: int, batch: int, sampled: Sampling | None
) -> dict[Any, Callable[[], None]]:
    """Drafts behind ``ids``: of one token under "begin", and under (n,) of ``depths`` levels of n nodes."""
    features = target.features(ids[None], head.config.taps)
    wide = Dynamic(depths * width**2, width, depths)  # so large that no level is narrower
    forms: dict[Any, Form] = {"begin": chain(1), (1,): chain(depths)}
    if width > 1:
        forms[(width,)] = wide

    def write(form: Form) -> Callable[[], None]:
        states, generator, first = [head.new_state() for _ in range(batch)], torch.Generator().manual_seed(0), 0
        ends = iter(range(len(ids) - 2 * ROUNDS - 2, len(ids), 2))  # two new rows a round
        drawn = None if form is wide else sampled

        def run() -> None:
            nonlocal first
            end = next(ends)
            rows, known = features.rows((0, slice(first, end))), ids[first : end + 1]
            draft_all(head, [Drafting(state, rows, known, form, drawn, generator) for state in states], target)
            first = end

        return run

    return {name: write(form) for name, form in forms.items()}
