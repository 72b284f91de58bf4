"""Look after feature stores: join the parts that several machines wrote, and find what is damaged."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from ..outputs import new_directory
from .manifest import FILE, WHOLE, Manifest, differences
from .store import SUFFIX, DamagedRow, Shard, Store, open_shard, shard_name


def merge(directories: Sequence[Path], out: Path, force: bool = False) -> Manifest:
    """Join all parts of one extraction into the store ``out``: its files are links to theirs, or copies on another disk.

    Raises UserError, naming what is wrong, for stores of different states and for parts that are missing or come twice.
    """
    parts = read_parts(directories)
    files = [shard.path for index in sorted(parts) for shard in parts[index].shards]
    with new_directory(out, force) as partial:
        entries = []
        for number, file in enumerate(files):
            link_or_copy(file, partial / shard_name("shard", number))
            entries.append(Shard(partial / shard_name("shard", number), parts[0].identity.digest).entry)
        manifest = parts[0].manifest.model_copy(update={"part": WHOLE, "shard_bytes": None, "shards": entries})
        manifest.write(partial)
        Store(partial)  # it refuses a row that is missing or comes twice
    return manifest


def read_parts(directories: Sequence[Path]) -> dict[int, Store]:
    """The parts by number: all of them, each once, and of one extraction. Raises UserError."""
    parts: dict[int, Store] = {}
    for directory in directories:
        store = Store(directory)
        first = next(iter(parts.values()), store)
        differ = differences(first.identity, store.identity)
        if differ:
            raise UserError(
                f"{first.directory} and {directory} hold different states ({'; '.join(differ)}): join parts of one extraction."
            )
        part = store.manifest.part
        if part.of != first.manifest.part.of:
            raise UserError(
                f"{first.directory} is one of {first.manifest.part.of} parts and {directory} one of {part.of}: join parts of "
                "one extraction."
            )
        if part.index in parts:
            raise UserError(f"{parts[part.index].directory} and {directory} are both part {part.index}: give each part once.")
        parts[part.index] = store
    of = first.manifest.part.of
    absent = sorted(set(range(of)) - set(parts))
    if absent:
        raise UserError(f"part {absent[0]} of {of} is missing ({len(parts)} are given): give the directory of every part.")
    return parts


def link_or_copy(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, to)


@dataclass
class Findings:
    """What is wrong with a store: damaged shards with their rows, rows that are nowhere or twice, and files of no use."""

    growing: bool = False
    rows: int = 0
    tokens: int = 0
    shards: int = 0
    damaged: list[dict[str, Any]] = field(default_factory=list)
    missing_rows: list[int] = field(default_factory=list)
    doubled_rows: list[int] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not (self.damaged or self.missing_rows or self.doubled_rows)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.sound}

    def sentence(self) -> str:
        """All that is wrong, for the terminal."""
        parts = [f"{shard['shard']}: {shard['why']}" for shard in self.damaged]
        if self.missing_rows:
            parts.append(f"{len(self.missing_rows)} rows are missing ({some(self.missing_rows)})")
        if self.doubled_rows:
            parts.append(f"{len(self.doubled_rows)} rows come twice ({some(self.doubled_rows)})")
        return "; ".join(parts)


def some(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")


def verify(directory: Path, progress: Callable[[int], Any] | None = None) -> Findings:
    """Read every byte of a store and say what is wrong. ``progress`` is called with 1 for every shard.

    A store that still grows may lack rows and hold some twice. Raises UserError where the manifest cannot be read.
    """
    manifest = Manifest.read(directory)
    growing = manifest.shards is None
    listed = {path.name: None for path in sorted(directory.glob(f"[!.]*{SUFFIX}"))} if growing else {}
    listed |= {entry.file: entry for entry in manifest.shards or []}
    findings = Findings(growing=growing)
    times = np.zeros(manifest.identity.data.rows, np.int64)
    for name, entry in listed.items():
        findings.shards += 1
        if progress:
            progress(1)
        try:
            shard = open_shard(directory / name, entry, manifest.identity.digest)
        except UserError as error:
            findings.damaged.append({"shard": name, "rows": [], "why": str(error)})
            continue
        rows, why = faults(shard)
        if why:
            findings.damaged.append({"shard": name, "rows": rows, "why": why})
        times += np.bincount(shard.rows[(shard.rows >= 0) & (shard.rows < len(times))], minlength=len(times))
        findings.tokens += int(shard.lengths.sum())
    findings.rows = int((times > 0).sum())
    if not growing:
        own = manifest.part.rows(len(times))
        findings.missing_rows = own[times[own] == 0].tolist()
        findings.doubled_rows = np.flatnonzero(times > 1).tolist()
    findings.strangers = sorted(path.name for path in directory.iterdir() if path.name not in {FILE, *listed})
    return findings


def faults(shard: Shard) -> tuple[list[int], str]:
    """The damaged rows of a shard, and what is wrong with it in words; "" where it is sound."""
    changed, unfit = [], []
    for place, row in enumerate(shard.rows.tolist()):
        try:
            tensors = shard.checked(place)
        except DamagedRow:
            changed.append(row)
        else:
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values() if tensor.is_floating_point()):
                unfit.append(row)
    words = [f"the checksum of row {some(changed)} differs"] if changed else []
    words += [f"row {some(unfit)} holds NaN or infinity"] if unfit else []
    if not changed and not shard.sound_digest():
        words.append("its checksum differs, outside of the rows")
    return changed + unfit, ", ".join(words)
