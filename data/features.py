"""Where a head's inputs come from: the frozen target, run as they are asked for, and what was kept of earlier runs."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..console import note
from ..errors import UserError
from ..target import Features, Target
from .batches import Batch, collate
from .chat import Encoded
from .engine import EngineStates
from .examples import Examples
from .manifest import Identity
from .precision import widen
from .store import DamagedRow, KeptRow, Store, StoreWriter, file_bytes

PAD = 0  # any id will do: padding stands on the right, where causal attention never looks, and the mask is False there
LOOK_AGAIN = 30  # seconds between two looks at what other processes have written
BLANK = Encoded(np.zeros(1, np.int32), np.zeros(1, bool))


@dataclass
class FeatureBatch:
    """A batch on the target's device: ``ids`` and ``positions`` int64, ``mask`` bool (supervised tokens), all [lines, time],
    and ``features`` with taps [lines, time, n_taps * hidden] and last [lines, time, hidden]; zeros on the padding.

    ``positions`` restart with each example packed into a line; None: one example a line. ``tokens`` counts what is not padding.
    """

    ids: Tensor
    mask: Tensor
    features: Features
    positions: Tensor | None
    tokens: int


class Source(Protocol):
    """What a training run reads: ``lengths`` int32 [rows], and batches of any rows."""

    lengths: np.ndarray

    @property
    def lost(self) -> int:
        """How many rows could not be read so far."""
        ...

    def batch(self, rows: list[int]) -> FeatureBatch:
        """Ids, mask, positions and hidden states of ``rows``; there may be none."""
        ...

    def expect(self, rows: Iterable[int]) -> None:
        """Rows that will be asked for next, in this order: a hint."""
        ...

    def flush(self) -> None:
        """Have on the disk what is to be found there by a run that resumes."""
        ...


class Shelf(Protocol):
    """Where states are kept between epochs, row by row, without padding: in memory or on disk."""

    def __contains__(self, row: int) -> bool: ...

    def get(self, row: int) -> Features | None: ...

    def put(self, row: int, example: Encoded, features: Features) -> Features:
        """Keep a row; returns its states as ``get`` will, so that the first epoch sees what the later ones see."""
        ...

    def flush(self) -> None:
        """Bring to where it outlives the process what is meant to."""
        ...


class Memory:
    """States in host memory, in the target's dtype."""

    def __init__(self) -> None:
        self.rows: dict[int, Features] = {}

    def __contains__(self, row: int) -> bool:
        return row in self.rows

    def get(self, row: int) -> Features | None:
        return self.rows.get(row)

    def put(self, row: int, example: Encoded, features: Features) -> Features:
        # a copy, or each view would keep its whole padded batch alive
        self.rows[row] = Features(features.taps.to("cpu", copy=True), features.last.to("cpu", copy=True))
        return features

    def flush(self) -> None:
        pass


class Disk:
    """States in a feature store that fills as they are computed, up to ``budget`` bytes of this process's own.

    Several processes fill one store, each under its own ``name``, and read what the others wrote. Raises UserError where the
    directory is a store of other states.
    """

    def __init__(self, directory: Path, identity: Identity, dtype: torch.dtype, budget: float, name: str) -> None:
        self.writer = StoreWriter(directory, identity, name=name)
        self.store = Store(directory, growing=True)
        self.dtype = dtype
        self.left = budget - sum(file.stat().st_size for file in directory.glob(f"{name}-*"))
        self.waiting: set[int] = set()
        self.looked = time.monotonic()

    def __contains__(self, row: int) -> bool:
        return row in self.waiting or row in self.store

    def get(self, row: int) -> Features | None:
        if row in self.waiting:
            self.flush()
        if row not in self.store and time.monotonic() - self.looked > LOOK_AGAIN:
            self._look()
        if row not in self.store:
            return None
        try:
            return self.store.read(row, self.writer.identity.taps, self.dtype)[1]
        except DamagedRow as error:
            note(f"computed again: {error}")
            return None

    def put(self, row: int, example: Encoded, features: Features) -> Features:
        size = file_bytes(len(example.ids), 1, self.writer.identity)
        if row in self.store or size > self.left:
            return widen(KeptRow.of(row, example, features, self.writer.identity).tensors, self.dtype)
        self.left -= size
        self.waiting.add(row)
        return widen(self.writer.add(row, example, features).tensors, self.dtype)

    def flush(self) -> None:
        self.writer.flush()
        self.waiting.clear()
        self._look()

    def _look(self) -> None:
        self.store.refresh()
        self.looked = time.monotonic()


class LeftOut:
    """Rows whose states cannot be used. Each is named once and takes part without supervision, or stops the run: ``strict``."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.rows: set[int] = set()

    def add(self, row: int, why: str) -> None:
        if self.strict:
            raise UserError(why)
        if row not in self.rows:
            note(f"left out: {why}")
        self.rows.add(row)

    def take_out(self, batch: Batch, known: dict[int, Features], maker: str) -> None:
        """Take the rows whose states are not finite out of a batch: a target may overflow on one text alone."""
        if not known:
            return
        fine = torch.stack([finite(own) for own in known.values()]).tolist()
        for row in [row for row, its_fine in zip(known, fine, strict=True) if not its_fine]:
            self.add(
                row, f"the states of row {row} by {maker} are not finite: remove the row, or run the target in a wider dtype."
            )
            del known[row]
            place = batch.places[row]
            batch.mask[place.line, place.tokens] = False
            batch.ids[place.line, place.tokens] = PAD  # a head reads them too


class OnlineFeatures:
    """Hidden states from the target, and from the ``shelf`` where one is given and holds them already. With an ``engine`` it
    is asked for them in the target's stead; rows that it cannot give take part without supervision.

    ``width``: pack examples into lines of that many tokens; None: one a line. Raises UserError for taps outside the target,
    for examples longer than its positions, and for packing on a target that would let packed examples see each other.
    """

    def __init__(
        self,
        target: Target,
        examples: Sequence[Encoded],
        taps: Sequence[int],
        shelf: Shelf | None = None,
        width: int | None = None,
        engine: EngineStates | None = None,
        strict: bool = False,
    ) -> None:
        target.check_taps(taps)
        self.lengths = lengths_of(examples)
        check_lengths(self.lengths, target)
        check_packing(target, width)
        self.target, self.examples, self.engine = target, examples, engine
        self.taps, self.shelf, self.width = tuple(taps), shelf, width
        self.left_out = LeftOut(strict)

    def batch(self, rows: list[int]) -> FeatureBatch:
        examples = {row: self.examples[row] for row in dict.fromkeys(rows)}
        kept = {row: self.shelf.get(row) for row in examples} if self.shelf else {}
        known = {row: features for row, features in kept.items() if features is not None}
        known |= self._compute({row: example for row, example in examples.items() if row not in known})
        examples = {row: example if row in known else BLANK for row, example in examples.items()}
        batch = collate(examples, rows, PAD, self.width)
        self.left_out.take_out(batch, known, self.target.name)
        return side_by_side(batch, known, self.target, len(self.taps))

    @property
    def lost(self) -> int:
        return len(self.left_out.rows) + (len(self.engine.lost) if self.engine else 0)

    def expect(self, rows: Iterable[int]) -> None:
        if self.engine:
            self.engine.expect(
                (row, self.examples[row]) for row in islice(rows, self.engine.ahead) if not self.shelf or row not in self.shelf
            )

    def flush(self) -> None:
        if self.shelf:
            self.shelf.flush()

    def _compute(self, examples: dict[int, Encoded]) -> dict[int, Features]:
        """Each row's own states [time, ...], without padding."""
        if not examples:
            return {}
        fresh = self.engine.states(examples) if self.engine else self._run(examples, self.width)
        shares_lines = self.width and not self.engine
        spoilt = {row: examples[row] for row, own in fresh.items() if shares_lines and not finite(own)}
        if spoilt:  # through attention one row spoils all that share its line: alone, only it is
            fresh |= self._run(spoilt, None)
        if self.shelf is None:
            return fresh
        return {row: self.shelf.put(row, examples[row], own) if finite(own) else own for row, own in fresh.items()}

    def _run(self, examples: dict[int, Encoded], width: int | None) -> dict[int, Features]:
        batch = collate(examples, list(examples), PAD, width)
        states = self.target.features(batch.ids, self.taps, batch.positions if width else None)
        return {row: states.rows((place.line, place.tokens)) for row, place in batch.places.items()}


class StoredFeatures:
    """Ids, masks and hidden states from a store; the target only says what they must fit.

    A row that the store holds damaged is named once and takes part without supervision, or stops the run under ``strict``.
    """

    def __init__(
        self, store: Store, target: Target, taps: Sequence[int], width: int | None = None, strict: bool = False
    ) -> None:
        store.check(target, taps)
        check_packing(target, width)
        self.store, self.target, self.taps = store, target, tuple(taps)
        self.lengths, self.width, self.left_out = store.lengths, width, LeftOut(strict)

    def batch(self, rows: list[int]) -> FeatureBatch:
        read = {row: self._read(row) for row in dict.fromkeys(rows)}
        batch = collate({row: example for row, (example, _) in read.items()}, rows, PAD, self.width)
        known = {row: own for row, (_, own) in read.items() if own}
        self.left_out.take_out(batch, known, str(self.store.directory))
        return side_by_side(batch, known, self.target, len(self.taps))

    @property
    def lost(self) -> int:
        return len(self.left_out.rows)

    def expect(self, rows: Iterable[int]) -> None:
        pass

    def flush(self) -> None:
        pass

    def _read(self, row: int) -> tuple[Encoded, Features | None]:
        try:
            return self.store.read(row, self.taps, self.target.dtype, self.target.device)
        except DamagedRow as error:
            self.left_out.add(row, str(error))
            return BLANK, None


def side_by_side(batch: Batch, known: dict[int, Features], target: Target, n_taps: int) -> FeatureBatch:
    """Lay each row's states where its ids stand in the batch."""
    lines, time = batch.ids.shape
    device, dtype = target.device, target.dtype
    taps = torch.zeros(lines, time, n_taps * target.hidden_size, dtype=dtype, device=device)
    last = torch.zeros(lines, time, target.hidden_size, dtype=dtype, device=device)
    for row, own in known.items():
        place = batch.places[row]
        taps[place.line, place.tokens] = own.taps.to(device, dtype)
        last[place.line, place.tokens] = own.last.to(device, dtype)
    tokens = sum(place.tokens.stop - place.tokens.start for place in batch.places.values())
    ids, mask, positions = (part.to(device) for part in (batch.ids, batch.mask, batch.positions))
    return FeatureBatch(ids, mask, Features(taps, last), positions, tokens)


def finite(features: Features) -> Tensor:
    """Whether a row's states are all finite: a bool scalar."""
    return features.last.isfinite().all() & features.taps.isfinite().all()


def lengths_of(examples: Sequence[Encoded]) -> np.ndarray:
    """The length of every example in tokens: int32 [rows]."""
    if isinstance(examples, Examples):
        return examples.lengths
    return np.array([len(example.ids) for example in examples], np.int32)


def check_lengths(lengths: np.ndarray, target: Target) -> None:
    longest = int(max(lengths, default=0))
    if longest > target.max_positions:
        raise UserError(
            f"a conversation of {longest} tokens is longer than the {target.max_positions} positions of {target.name!r}: "
            f"set max_length to at most {target.max_positions}."
        )


def check_packing(target: Target, width: int | None) -> None:
    if width and not target.keeps_packed_apart():
        raise UserError(
            f"target {target.name!r} lets sequences that share a row see each other: set data.pack to false for it."
        )
