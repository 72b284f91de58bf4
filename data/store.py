"""The feature store: hidden states of a target on disk, written in whole shards and read row by row.

A store is a directory of safetensors files beside a manifest.json. A shard holds rows back to back: ``ids`` int32 [tokens],
``mask`` bool [tokens], ``taps`` [tokens, n_taps * hidden] and ``last`` [tokens, hidden] in the store's dtype (under int8 with
``taps_scales`` and ``last_scales``); ``offsets`` int64 [rows + 1], ``rows`` int64 [rows] (their numbers in the data) and
``crc`` int64 [rows] (CRC-32 of each row's bytes). Its header says what it belongs to and carries a checksum, so a shard that
has taken its name is whole, and no list is needed to know it: a store can grow, and an interrupted one goes on from the shards
it has.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..console import note
from ..errors import UserError
from ..outputs import sync
from ..target import Features, Target
from .chat import Encoded, EncodedRows
from .manifest import FILE, FORMAT, Identity, Manifest, ShardEntry, StoredTarget, differences, target_differences
from .precision import narrow, widen

SHARD_BYTES = 2**28
SUFFIX = ".safetensors"
INDEX = ("offsets", "rows", "crc")  # a shard's tensors that are not tokens back to back
TOKENS = ("ids", "mask")
ROW_BYTES = 8 * len(INDEX)


class DamagedRow(UserError):
    """A row whose bytes are not those that were written."""


# -- shards ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptRow:
    """A row as a shard keeps it: ``tensors`` [time, ...] on the CPU by name, ids and mask among them."""

    row: int
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, row: int, example: Encoded, features: Features, identity: Identity) -> "KeptRow":
        """Raises UserError for states that are not finite or do not fit the store's dtype."""
        states = narrow(features, identity.dtype, identity.group, f"row {row}")
        tokens = {"ids": torch.tensor(example.ids, dtype=torch.int32), "mask": torch.tensor(example.mask, dtype=torch.bool)}
        return cls(row, tokens | {name: tensor.cpu() for name, tensor in states.items()})

    @property
    def nbytes(self) -> int:
        return ROW_BYTES + sum(tensor.nbytes for tensor in self.tensors.values())


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def checksum(tensors: dict[str, Tensor]) -> int:
    """CRC-32 of a row's tensors, in the order of their names."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(raw(tensors[name]), crc)
    return crc


def digest(tensors: dict[str, Tensor], identity: str) -> str:
    """SHA-256 of a shard: what it belongs to, and its tensors in the order of their names."""
    sha = hashlib.sha256(identity.encode())
    for name in sorted(tensors):
        sha.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        sha.update(raw(tensors[name]))
    return sha.hexdigest()


def write_shard(path: Path, identity: Identity, rows: Sequence[KeptRow]) -> None:
    """Write a shard and give it its name once it is whole and on the disk."""
    lengths = [len(row.tensors["ids"]) for row in rows]
    tensors = {name: torch.cat([row.tensors[name] for row in rows]) for name in rows[0].tensors}
    tensors["offsets"] = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    tensors["rows"] = torch.tensor([row.row for row in rows], dtype=torch.int64)
    tensors["crc"] = torch.tensor([checksum(row.tensors) for row in rows], dtype=torch.int64)
    header = {"format": FORMAT, "identity": identity.digest, "sha256": digest(tensors, identity.digest)}
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial, {"draftsmith": json.dumps(header)})  # one key: the library writes several in any order
    partial.chmod(0o644)
    sync(partial)
    partial.rename(path)
    sync(path.parent)


class Shard:
    """One file of a store, mapped into memory. Raises UserError where it cannot be read or belongs to another store."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path, self.identity = path, identity
        try:
            self.size = path.stat().st_size
            self.file = safe_open(path, "pt")
            header = json.loads((self.file.metadata() or {}).get("draftsmith", "{}"))
            if (header.get("format"), header.get("identity")) != (FORMAT, identity):
                raise UserError(f"{path} is no shard of this store: move it away, or extract the states again.")
            self.sha256: str = header["sha256"]
            self.names = sorted(set(self.file.keys()) - set(INDEX))
            self.offsets, self.rows, self.crc = (self.file.get_tensor(name).numpy() for name in INDEX)
            self._refuse_offsets()
        except FileNotFoundError as error:
            raise UserError(f"{path} is missing: restore a copy, or extract it again.") from error
        except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error}): restore a copy, or extract it again.") from error

    def _refuse_offsets(self) -> None:
        tokens = self.file.get_slice("ids").get_shape()[0]
        if self.offsets[0] != 0 or self.offsets[-1] != tokens or len(self.offsets) != len(self.rows) + 1:
            raise ValueError("its offsets are wrong")
        if (self.lengths < 0).any() or len(self.crc) != len(self.rows):
            raise ValueError("its offsets are wrong")

    @property
    def entry(self) -> ShardEntry:
        tokens, size = int(self.offsets[-1]), self.path.stat().st_size
        return ShardEntry(file=self.path.name, rows=len(self.rows), tokens=tokens, bytes=size, sha256=self.sha256)

    @property
    def lengths(self) -> np.ndarray:
        """The length of every row in tokens: int64 [rows]."""
        return np.diff(self.offsets)

    def tensors(self, place: int, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """A row's tensors, as views of the file: not to be written to. Raises DamagedRow where the file was cut."""
        if self._cut():
            raise DamagedRow(f"row {self.rows[place]} is gone: {self.path} was cut while it was read; restore a copy of it.")
        span = slice(int(self.offsets[place]), int(self.offsets[place + 1]))
        return {name: self.file.get_slice(name)[span] for name in names or self.names}

    def _cut(self) -> bool:
        """Whether the file has shrunk since it was opened: to touch the lost part of a mapped file kills the process."""
        try:
            return self.path.stat().st_size < self.size
        except FileNotFoundError:
            return False  # a mapped file that was deleted keeps its bytes

    def checked(self, place: int) -> dict[str, Tensor]:
        """As ``tensors``. Raises DamagedRow where the bytes are not those that were written."""
        try:
            found = self.tensors(place)
            sound = checksum(found) == int(self.crc[place])
        except (SafetensorError, ValueError, RuntimeError, IndexError):  # damaged offsets reach anywhere
            sound = False
        if not sound:
            raise DamagedRow(f"row {self.rows[place]} is damaged in {self.path}: draftsmith data verify tells what else is.")
        return found

    def sound_digest(self) -> bool:
        """Whether all tensors are those that were written. Reads the whole file."""
        tensors = {name: self.file.get_tensor(name) for name in self.file.keys()}  # noqa: SIM118 (it is no mapping)
        return digest(tensors, self.identity) == self.sha256


# -- reading ---------------------------------------------------------------------------------------------------------------


class Store:
    """A feature store, opened for reading: ``lengths`` int32 [rows of the data], 0 where a row is not here.

    A whole store is checked as it opens: each shard is there with its size, belongs here, and each row comes once. With
    ``growing`` it may still be written, by several processes: it holds the rows of the shards that are whole when it is
    opened or last refreshed, and the first copy of a row that comes twice; files that are no sound shards of it are named and
    left out. Raises UserError.
    """

    def __init__(self, directory: str | Path, growing: bool = False) -> None:
        self.directory = Path(directory)
        self.manifest = Manifest.read(self.directory)
        self.identity = self.manifest.identity
        self.shards: list[Shard] = []
        self.seen: set[Path] = set()
        total = self.identity.data.rows
        self.lengths = np.zeros(total, np.int32)
        self.places = np.full((total, 2), -1, np.int64)  # [rows, (shard, place in it)]
        if growing:
            self.refresh()
        elif self.manifest.shards is None:
            raise UserError(f"{directory} is half-written: run the command that writes it again, and it will go on.")
        else:
            for entry in self.manifest.shards:
                self._take(open_shard(self.directory / entry.file, entry, self.identity.digest))
            self._refuse_missing()

    def __len__(self) -> int:
        """The rows that are here."""
        return int((self.places[:, 0] >= 0).sum())

    def __contains__(self, row: int) -> bool:
        return bool(self.places[row, 0] >= 0)

    def refresh(self) -> None:
        """Take in the shards that were finished since."""
        for path in sorted(set(self.directory.glob(f"[!.]*{SUFFIX}")) - self.seen):
            self.seen.add(path)
            try:
                self._take(Shard(path, self.identity.digest), twice=True)
            except UserError as error:
                note(f"left out: {error}")

    def read(
        self,
        row: int,
        taps: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> tuple[Encoded, Features]:
        """A row's ids and mask, and its states in ``dtype``: ``taps`` in that order (None: all that are stored) and last.

        The states go to ``device`` as they are stored and become ``dtype`` there.
        Raises DamagedRow where its bytes are not those that were written, UserError for taps that are not stored and
        KeyError for a row that is not here.
        """
        shard, place = self._find(row)
        tensors = shard.checked(place)
        if taps is not None and tuple(taps) != self.identity.taps:
            columns = [self._stored(tap) for tap in taps]
            for name in [name for name in ("taps", "taps_scales") if name in tensors]:
                by_tap = tensors[name].unflatten(-1, (len(self.identity.taps), -1))
                tensors[name] = by_tap[:, columns].flatten(-2)
        encoded = _encoded(tensors)
        return encoded, widen({name: tensors[name].to(device) for name in tensors if name not in TOKENS}, dtype)

    @property
    def examples(self) -> "StoredExamples":
        """The rows' ids and masks, read as they are asked for."""
        return StoredExamples(self)

    def example(self, row: int) -> Encoded:
        """A row's ids and mask alone, without the check that ``read`` makes."""
        shard, place = self._find(row)
        return _encoded(shard.tensors(place, TOKENS))

    def check(self, target: Target, taps: Sequence[int]) -> None:
        """Raise UserError unless the store serves these taps of this target and holds all rows.

        The target may run in another dtype than it did when it wrote the states; only then its weights are not compared.
        """
        differ = target_differences(self.identity.target, StoredTarget.of(target))
        if differ:
            maker = self.manifest.about.get("target", "another target")
            raise UserError(
                f"{self.directory} holds states of {maker}, which is not {target.name} as it is here ({'; '.join(differ)}): "
                "extract the states of this target, or train on the other."
            )
        for tap in taps:
            self._stored(tap)
        if self.manifest.part.of > 1:
            raise UserError(
                f"{self.directory} is part {self.manifest.part.index} of {self.manifest.part.of}: join the parts with "
                "draftsmith data merge."
            )

    def _find(self, row: int) -> tuple[Shard, int]:
        if row not in self:
            raise KeyError(row)
        number, place = self.places[row]
        return self.shards[number], int(place)

    def _stored(self, tap: int) -> int:
        """The position of a tap among those stored."""
        if tap not in self.identity.taps:
            held = f"taps {','.join(map(str, self.identity.taps))}" if self.identity.taps else "no taps"
            raise UserError(f"{self.directory} holds {held} and not tap {tap}: extract the states again with it.")
        return self.identity.taps.index(tap)

    def _take(self, shard: Shard, twice: bool = False) -> None:
        """Add a shard's rows; those that are here already are skipped where they may come ``twice``."""
        rows = shard.rows
        inside = (rows >= 0) & (rows < len(self.lengths))
        if not inside.all() or len(np.unique(rows)) < len(rows):
            raise UserError(f"{shard.path} is damaged (its row numbers are wrong): extract it again.")
        fresh = self.places[rows, 0] < 0
        if not twice and not fresh.all():
            row = rows[~fresh][0]
            first = self._find(row)[0].path.name
            raise UserError(f"row {row} stands both in {first} and in {shard.path.name} of {self.directory}: extract it again.")
        self.places[rows[fresh], 0] = len(self.shards)
        self.places[rows[fresh], 1] = np.flatnonzero(fresh)
        self.lengths[rows[fresh]] = shard.lengths[fresh]
        self.shards.append(shard)

    def _refuse_missing(self) -> None:
        own = self.manifest.part.rows(len(self.lengths))
        missing = own[self.places[own, 0] < 0]
        if len(missing):
            raise UserError(
                f"{self.directory} lacks {len(missing)} of its {len(own)} rows (first row {missing[0]}): extract them again."
            )


class StoredExamples(EncodedRows):
    """What a store's rows were made from, by their numbers in the data."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lengths = store.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, row: int) -> Encoded:
        return self.store.example(row)


def open_shard(path: Path, entry: ShardEntry | None, identity: str) -> Shard:
    """A store's shard; with the manifest's ``entry``, it must be the file that was listed. Raises UserError."""
    if entry and path.exists() and path.stat().st_size != entry.bytes:
        size = f"{path.stat().st_size} of its {entry.bytes} bytes"
        raise UserError(f"{path} has {size}: restore a copy, or extract it again.")
    shard = Shard(path, identity)
    if entry and shard.entry != entry:
        raise UserError(f"{path} is not the file that {FILE} lists: restore a copy, or extract it again.")
    return shard


def _encoded(tensors: dict[str, Tensor]) -> Encoded:
    return Encoded(tensors["ids"].numpy().copy(), tensors["mask"].numpy().copy())


# -- writing ---------------------------------------------------------------------------------------------------------------


class StoreWriter:
    """Adds rows to a growing store as they come, in shards of ``shard_bytes``, and makes the store where there is none.

    Several processes may write into one store, each under a ``name`` of its own; a name that comes back goes on behind its
    earlier shards. Rows are on the disk from the ``flush`` that follows them, and readers find them by ``Store.refresh``.
    Raises UserError where the directory is a store of another identity.
    """

    def __init__(
        self,
        directory: str | Path,
        identity: Identity,
        shard_bytes: int = SHARD_BYTES,
        name: str = "shard",
        about: dict[str, Any] | None = None,
    ) -> None:
        self.directory, self.identity, self.shard_bytes, self.name = Path(directory), identity, shard_bytes, name
        self.waiting: list[KeptRow] = []
        self.waiting_bytes = 0
        self.directory.mkdir(parents=True, exist_ok=True)
        if not (self.directory / FILE).exists():
            strangers = [path.name for path in self.directory.iterdir() if not path.name.startswith(".")]
            if strangers:
                raise UserError(f"{directory} holds {min(strangers)} and no store: choose an empty or a new directory.")
            Manifest(identity=identity, about=about or {}).write(self.directory)
        differ = differences(Manifest.read(self.directory).identity, identity)
        if differ:
            raise UserError(f"{directory} is a store of other states ({'; '.join(differ)}): choose another directory.")
        ends = [path.stem.removeprefix(f"{name}-") for path in self.directory.glob(f"{name}-*{SUFFIX}")]
        self.next = max((int(end) for end in ends if end.isdigit()), default=-1) + 1

    def add(self, row: int, example: Encoded, features: Features) -> KeptRow:
        """Keep a row's states, taps [time, n_taps * hidden] and last [time, hidden]; returns it as it will be read.

        Raises UserError if they do not fit.
        """
        kept = KeptRow.of(row, example, features, self.identity)
        self.waiting.append(kept)
        self.waiting_bytes += kept.nbytes
        if self.waiting_bytes >= self.shard_bytes:
            self.flush()
        return kept

    def flush(self) -> None:
        """Write the rows that wait as one shard."""
        if self.waiting:
            write_shard(self.directory / shard_name(self.name, self.next), self.identity, self.waiting)
            self.next += 1
            self.waiting, self.waiting_bytes = [], 0


def shard_name(name: str, number: int) -> str:
    return f"{name}-{number:05d}{SUFFIX}"


def file_bytes(tokens: int, rows: int, identity: Identity) -> int:
    """The bytes of a shard's file, to within the kilobyte of its header."""
    return math.ceil(tokens * identity.bytes_per_token) + rows * ROW_BYTES
