"""Which rows make which batch: drawn from a seed, grouped by length, and the same after a restart."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .chat import Encoded

CHUNK = 32  # batches that are sorted by length together: enough to save padding, few enough to stay random


@dataclass(frozen=True)
class Place:
    """Where a row stands in a batch: in which line, and at which of its tokens."""

    line: int
    tokens: slice


@dataclass
class Batch:
    """Examples side by side: ``ids`` int64, ``mask`` bool and ``positions`` int64, all [lines, time], padded on the right.

    A line holds one example, or several where they are packed; ``positions`` restart at 0 with each of them, and with the
    padding (mask False). ``places`` tells where each example stands.
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor
    places: dict[int, Place]


def collate(examples: Mapping[int, Encoded] | Sequence[Encoded], rows: list[int], pad_id: int, width: int | None) -> Batch:
    """Put examples ``rows`` side by side, one a line, or packed into lines of at most ``width`` tokens where it is given.

    ``pad_id`` may be any token, an end-of-turn too: the mask alone tells padding.
    """
    own = {row: examples[row] for row in dict.fromkeys(rows)}
    lengths = {row: len(example.ids) for row, example in own.items()}
    places = pack(lengths, width) if width else {row: Place(i, slice(0, n)) for i, (row, n) in enumerate(lengths.items())}
    lines = max((place.line for place in places.values()), default=-1) + 1
    time = max((place.tokens.stop for place in places.values()), default=0)
    ids = torch.full((lines, time), pad_id, dtype=torch.int64)
    mask = torch.zeros(lines, time, dtype=torch.bool)
    positions = torch.arange(time).repeat(lines, 1)
    for row, place in places.items():
        ids[place.line, place.tokens] = torch.tensor(own[row].ids, dtype=torch.int64)
        mask[place.line, place.tokens] = torch.tensor(own[row].mask)
        if width:
            mask[place.line, place.tokens.start] = False  # it has no predecessor in its own sequence
        for start in (place.tokens.start, place.tokens.stop):  # the next example's, or the padding's
            positions[place.line, start:] = torch.arange(time - start)
    return Batch(ids, mask, positions, places)


def pack(lengths: Mapping[int, int], width: int) -> dict[int, Place]:
    """Lay rows of these lengths into few lines of like length, each at most ``width`` tokens.

    Where one row is longer, its length is the width. First-fit, longest first, tells how many lines are needed; the rows
    are then spread over as many evenly, where that fits.
    """
    longest_first = sorted(lengths, key=lambda row: -lengths[row])
    width = max(width, max(lengths.values(), default=0))
    filled: list[int] = []
    first_fit: dict[int, Place] = {}
    for row in longest_first:
        line = next((i for i, used in enumerate(filled) if used + lengths[row] <= width), len(filled))
        filled += [0] * (line == len(filled))
        first_fit[row] = Place(line, slice(filled[line], filled[line] + lengths[row]))
        filled[line] += lengths[row]
    filled = [0] * len(filled)
    even: dict[int, Place] = {}
    for row in longest_first:
        line = filled.index(min(filled))
        even[row] = Place(line, slice(filled[line], filled[line] + lengths[row]))
        filled[line] += lengths[row]
    return even if max(filled, default=0) <= width else first_fit


def epoch_plan(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The global batches of one epoch as row indices; each row comes once, and one batch may be short.

    Depends on the arguments alone, so a run resumes by skipping the batches it has done.
    """
    draw = random.Random(f"{seed}/{epoch}")
    rows = list(range(len(lengths)))
    draw.shuffle(rows)
    batches: list[list[int]] = []
    for chunk in _cut(rows, CHUNK * batch_size):
        chunk.sort(key=lambda row: lengths[row])
        batches += _cut(chunk, batch_size)
    draw.shuffle(batches)
    return batches


def share(batch_rows: list[int], rank: int, world: int, micro_rows: int) -> list[list[int]]:
    """This rank's part of one global batch, cut into micro-batches of at most ``micro_rows`` rows.

    Every rank gets the same number of micro-batches, the last ones empty where its rows are used up: all ranks must meet
    in every all-reduce.
    """
    most = -(-len(batch_rows) // world)  # rows of rank 0
    micro = _cut(batch_rows[rank::world], micro_rows)
    return micro + [[] for _ in range(-(-most // micro_rows) - len(micro))]


def _cut(rows: list[int], size: int) -> list[list[int]]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]
