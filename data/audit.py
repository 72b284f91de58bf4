"""What does this file hold for this target? Counts, lengths, checks, vocabulary, and what its hidden states will cost."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..target import Target
from .batches import collate, epoch_plan, pack
from .chat import CUT, Encoded
from .checks import check_all, check_positions
from .conversations import Reading
from .examples import prepare
from .extract import batches
from .facts import TargetFacts
from .features import PAD, check_lengths, lengths_of
from .precision import DTYPES, bytes_per_token
from .shown import FirstDrops, Shown, pick
from .template import template_of
from .vocab import choose, count_tokens, holding, special_ids

BINS = 24
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
TIMED, ENOUGH_S = 5, 60.0  # batches timed; fewer once that many seconds have passed


@dataclass(frozen=True)
class Audit:
    """``document`` is what --json prints; ``shown`` are conversations to look at."""

    document: dict[str, Any]
    shown: list[Shown]


@dataclass(frozen=True)
class Question:
    """How to read the sources and what to find out about them.

    ``sizes``: draft vocabularies; () chooses some. ``rows``: the rows to show, as ROW or FILE:ROW; () picks a few by ``seed``.
    ``batch_size`` conversations make a batch, which is packed into lines of ``max_length`` tokens.
    """

    max_length: int
    reading: Reading
    taps: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    rows: tuple[str, ...] = ()
    batch_size: int = 8
    seed: int = 0
    only_last: bool = False
    workers: int = 1


def audit(sources: Sequence[str], facts: TargetFacts, question: Question, tally: FirstDrops) -> tuple[Audit, Sequence[Encoded]]:
    """Read and encode the sources and look at them from all sides; the target's weights are not needed.

    Returns the examples too, for ``time_features``. Raises UserError for what cannot be read, for a template without any safe
    span, for sizes that cannot be, and for a row to show that is not there. That no row is kept is a finding, not an error.
    """
    always = special_ids(facts.tokenizer, facts.eos_ids)
    refuse_impossible(facts, question, always)
    checks = check_all(facts)
    examples, table = encoded(sources, facts, question, tally)
    halves = [count_tokens((examples[i] for i in range(first, len(examples), 2)), facts.vocab_size) for first in (0, 1)]
    counts = halves[0] + halves[1]
    lengths = lengths_of(examples)
    supervised, tokens = int(counts.sum()), int(lengths.sum())
    document = {
        **tally.as_json(),
        "reasons": dict(tally.dropped.most_common()),
        "changes": dict(tally.changed.most_common()),
        "dropped": tally.first,
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": supervised / tokens if tokens else None,
        "max_length": question.max_length,
        "lengths": describe_lengths(lengths, tally.changed[CUT]),
        "padding": padding(lengths, question.batch_size, question.max_length, question.seed),
        "target": {"name": facts.name, "depth": facts.depth, "hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size}
        | {"tokenizer_size": len(facts.tokenizer), "eos_ids": sorted(facts.eos_ids), "max_positions": facts.max_positions},
        "checks": [asdict(check) for check in (*checks, check_positions(facts, int(max(lengths, default=0))))],
        "vocabulary": coverage(halves, question.sizes, always),
        "store": store_bytes(tokens, facts, question.taps),
        "extraction": None,
    }
    return Audit(document, pick(table, question.rows, tally, question.seed)), examples


def refuse_impossible(facts: TargetFacts, question: Question, always: set[int]) -> None:
    """Raise UserError, before anything is read, for draft vocabularies and taps that this target cannot have."""
    template_of(facts.tokenizer)
    for size in question.sizes:
        choose(torch.zeros(facts.vocab_size, dtype=torch.int64), size, always)
    deepest = max(question.taps, default=0)
    if deepest > facts.depth:
        raise UserError(f"tap {deepest} is outside the target: {facts.name!r} has {facts.depth} layers, so taps end there.")


def encoded(
    sources: Sequence[str], facts: TargetFacts, question: Question, tally: FirstDrops
) -> tuple[Sequence[Encoded], datasets.Dataset | None]:
    """The examples kept, and the table of all that were read; nothing and None where every row was dropped."""
    try:
        examples = prepare(
            sources,
            facts.tokenizer,
            facts.vocab_size,
            question.max_length,
            tally,
            question.reading,
            question.only_last,
            question.workers,
        )
    except UserError:
        if tally.strict or tally.kept or not tally.read:
            raise
        return [], None
    return examples, examples.table


# -- numbers ---------------------------------------------------------------------------------------------------------------


def describe_lengths(lengths: np.ndarray, cut: int) -> dict[str, Any]:
    """Lengths [rows] in tokens as kept; ``cut`` of the rows were longer. The histogram has one count less than edges."""
    if not len(lengths):
        return {"mean": None, "min": None, "max": None, "quantiles": {}, "cut": 0, "cut_share": None, "histogram": None}
    edges = bin_edges(int(lengths.min()), int(lengths.max()))
    return {
        "mean": float(lengths.mean()),
        "min": int(lengths.min()),
        "max": int(lengths.max()),
        "quantiles": {str(q): float(np.quantile(lengths, q)) for q in QUANTILES},
        "cut": cut,
        "cut_share": cut / len(lengths),
        "histogram": {"edges": edges, "counts": np.histogram(lengths, edges)[0].tolist()},
    }


def bin_edges(low: int, high: int) -> list[int]:
    """Multiples of 1, 2 or 5 times a power of ten, at most BINS + 1 steps, the last one beyond ``high``."""
    steps = (mantissa * 10**power for power in range(12) for mantissa in (1, 2, 5))
    step = next(step for step in steps if high - low < step * BINS)
    return list(range(low // step * step, (high // step + 1) * step + 1, step))


def padding(lengths: np.ndarray, batch_size: int, width: int, seed: int) -> dict[str, Any]:
    """The share of places without a token in an epoch's batches: an example a line, and packed into lines of ``width``."""
    tokens, alone, packed = int(lengths.sum()), 0, 0
    for batch in epoch_plan(lengths.tolist(), batch_size, seed, epoch=0):
        own = {row: int(lengths[row]) for row in batch}
        places = pack(own, width).values()
        alone += len(own) * max(own.values())
        packed += (1 + max(place.line for place in places)) * max(place.tokens.stop for place in places)
    shares = {"alone": 1 - tokens / alone, "packed": 1 - tokens / packed} if tokens else {"alone": None, "packed": None}
    return {"batch_size": batch_size, "width": width, **shares}


def coverage(halves: list[Tensor], sizes: Sequence[int], always: set[int]) -> dict[str, Any]:
    """How much of the supervised tokens draft vocabularies of these sizes hold; counts [vocab] of every other row and the rest.

    ``coverage`` is of the tokens they are chosen from, ``unseen`` of the second half when chosen from the first, as it is for
    text that a head meets later; None where nothing is supervised.
    """
    counts = halves[0] + halves[1]
    found = []
    for size in sizes or usual_sizes(len(counts), len(always)):
        whole, half = choose(counts, size, always), choose(halves[0], size, always)
        unseen = holding(half.target_ids, halves[1]).coverage if halves[1].any() else None
        found.append({"size": size, "coverage": whole.coverage if counts.any() else None, "unseen": unseen})
    return {"distinct": int((counts > 0).sum()), "always": len(always), "sizes": found}


def usual_sizes(vocab: int, least: int) -> list[int]:
    """Powers of two up to half the vocabulary, the last four of them, that hold what must be in."""
    powers = [2**i for i in range(vocab.bit_length()) if least <= 2**i <= vocab // 2]
    return powers[-4:]


def store_bytes(tokens: int, facts: TargetFacts, taps: Sequence[int]) -> dict[str, Any]:
    """What a feature store of ``tokens`` takes, by dtype."""
    each = {dtype: bytes_per_token(facts.hidden_size, len(taps), dtype) for dtype in DTYPES}
    return {
        "taps": list(taps),
        "bytes_per_token": each,
        "bytes": {dtype: round(size * tokens) for dtype, size in each.items()},
    }


def time_features(
    target: Target, examples: Sequence[Encoded], taps: Sequence[int], batch_tokens: int, done: Callable[[], Any]
) -> dict[str, Any] | None:
    """Tokens per second of the target over a few of the batches of an extraction, short ones and long ones, and what all take.

    Padding is in the time and not in the tokens; the first batch is run once before it counts. ``done`` is called after each
    batch. None where there are no examples.
    """
    lengths = lengths_of(examples)
    check_lengths(lengths, target)
    every = list(batches(np.argsort(lengths, kind="stable"), lengths, batch_tokens))
    chosen = [every[i * len(every) // min(TIMED, len(every))] for i in range(min(TIMED, len(every)))]
    rates: list[float] = []
    begin = time.perf_counter()
    for rows in [*chosen[:1], *chosen]:
        batch = collate(examples, rows, PAD, None)
        start = time.perf_counter()
        states = target.features(batch.ids, taps)
        for part in (states.taps, states.last):
            part.cpu()  # waits for the device, as an extraction must
        rates.append(int(lengths[rows].sum()) / (time.perf_counter() - start))
        done()
        if len(rates) > 1 and time.perf_counter() - begin > ENOUGH_S:
            break
    if not chosen:
        return None
    rate, dtype = median(rates[1:]), str(target.dtype).removeprefix("torch.")
    return {
        "tokens_per_s": rate,
        "seconds": int(lengths.sum()) / rate,
        "batches": len(rates) - 1,
        "batch_tokens": batch_tokens,
        "dtype": dtype,
        "device": str(target.device),
    }
