"""Which rows make which batch: drawn from a seed, grouped by length, and the same after a restart."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .chat import Encoded

CHUNK = 32  # batches that are sorted by length together: enough to save padding, few enough to stay random


@dataclass
class Batch:
    """Rows side by side: ``ids`` int64 and ``mask`` bool, both [rows, time], padded on the right (mask False there)."""

    ids: Tensor
    mask: Tensor
    rows: list[int]


def collate(examples: Sequence[Encoded], rows: list[int], pad_id: int) -> Batch:
    """Put examples ``rows`` side by side. ``pad_id`` may be any token, an end-of-turn too: the mask alone tells padding."""
    width = max((len(examples[row].ids) for row in rows), default=0)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        length = len(examples[row].ids)
        ids[i, :length] = torch.from_numpy(examples[row].ids)
        mask[i, :length] = torch.from_numpy(examples[row].mask)
    return Batch(ids, mask, list(rows))


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
