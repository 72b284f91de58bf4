"""Run the target over all examples once and keep its hidden states: an extraction that can be killed at any moment.

What will be in which shard is planned from the examples' lengths alone. Shards take their names one by one in a directory
beside the output, which gives it its name when it is whole; the same command finds that directory and does what is missing.
"""

import fcntl
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ..console import note
from ..errors import UserError
from ..outputs import refuse_existing, sync
from ..target import Features, Target
from .batches import collate
from .chat import Encoded
from .features import PAD, check_lengths, lengths_of
from .manifest import FILE, WHOLE, Identity, Manifest, Part, differences
from .store import SHARD_BYTES, KeptRow, Shard, file_bytes, shard_name, write_shard

CHUNK_ROWS = 4096  # rows that are sorted by length together: little padding, and every shard holds rows from all over
WAITING = 2  # batches whose states may wait for the writer, in the target's memory

UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}

Progress = Callable[[int], Any]


class Given(Protocol):
    """What knows the states of rows without this process running the target; ``ahead``: how many it may be told of early."""

    ahead: int

    def expect(self, rows: Iterable[tuple[int, Encoded]]) -> None: ...

    def states(self, examples: dict[int, Encoded]) -> dict[int, Features]:
        """Every row's taps [time, n_taps * hidden] and last [time, hidden]. Raises UserError."""
        ...


def extract(
    target: Target,
    examples: Sequence[Encoded],
    taps: Sequence[int],
    out: Path,
    dtype: str,
    part: Part = WHOLE,
    batch_tokens: int = 8192,
    shard_bytes: int = SHARD_BYTES,
    about: dict[str, Any] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    given: Given | None = None,
) -> dict[str, Any]:
    """Write the store ``out`` with the states of every example, or go on with one that was interrupted.

    ``given``: where the states come from, if this process is not to run the target: an engine, or files of them.
    ``batch_tokens``: tokens of one target pass, padding included. ``about`` goes into the manifest. ``progress`` is called
    with the number of tokens done. ``force`` replaces ``out`` and discards an interrupted extraction of other states.
    Returns counts, bytes and speed. Raises UserError where the disk is too small, before anything is written, and for a row
    whose states are not finite or do not fit ``dtype``.
    """
    began = time.perf_counter()
    lengths = lengths_of(examples)
    check_lengths(lengths, target)
    identity = Identity.of(target, examples, taps, dtype)
    told = {"target": target.name, **(about or {})}
    manifest = Manifest(identity=identity, part=part, shard_bytes=shard_bytes, about=told)
    planned = plan(lengths, manifest)
    partial = out.parent / f".{out.name}.partial"
    out.parent.mkdir(parents=True, exist_ok=True)
    with alone(out):
        refuse_existing(out, force)
        whole = find_whole(partial, manifest, planned, force)
        sizes = [file_bytes(int(lengths[rows].sum()), len(rows), identity) for rows in planned]
        missing = [number for number in range(len(planned)) if number not in whole]
        refuse_small_disk(out, sum(sizes), sum(sizes[number] for number in missing))
        prepare_partial(partial, manifest, whole)
        tokens = sum(int(lengths[planned[number]].sum()) for number in whole)
        if progress:
            progress(tokens)
        jobs = {partial / shard_name("shard", number): planned[number] for number in missing}
        fresh = fill(target, examples, lengths, manifest, jobs, batch_tokens, progress, given)
        entries = [Shard(partial / shard_name("shard", number), identity.digest).entry for number in range(len(planned))]
        manifest.model_copy(update={"shards": entries}).write(partial)
        put_in_place(partial, out)
    seconds = time.perf_counter() - began
    return {
        "rows": sum(entry.rows for entry in entries),
        "tokens": sum(entry.tokens for entry in entries),
        "bytes": sum(entry.bytes for entry in entries),
        "shards": len(entries),
        "shards_kept": len(whole),
        "seconds": seconds,
        "tokens_per_s": fresh / seconds,
    }


# -- the plan --------------------------------------------------------------------------------------------------------------


def plan(lengths: np.ndarray, manifest: Manifest) -> list[np.ndarray]:
    """The rows of every shard, in the order in which they are computed: by length within chunks.

    Depends on its arguments alone. Raises UserError where the part has no rows.
    """
    rows = manifest.part.rows(len(lengths))
    if not len(rows):
        raise UserError(
            f"part {manifest.part.index} of {manifest.part.of} has no rows, for there are only {len(lengths)}: use fewer parts."
        )
    chunks = [rows[first : first + CHUNK_ROWS] for first in range(0, len(rows), CHUNK_ROWS)]
    order = np.concatenate([chunk[np.argsort(lengths[chunk], kind="stable")] for chunk in chunks])
    ends = np.cumsum([file_bytes(int(lengths[row]), 1, manifest.identity) for row in order])
    _, starts = np.unique((ends - 1) // manifest.shard_bytes, return_index=True)
    return np.split(order, starts[1:])


def batches(rows: np.ndarray, lengths: np.ndarray, batch_tokens: int) -> Iterator[list[int]]:
    """Cut rows, as they stand, into batches of at most ``batch_tokens`` with padding; a longer row is a batch of its own."""
    batch: list[int] = []
    widest = 0
    for row in rows.tolist():
        widest = max(widest, int(lengths[row]))
        if batch and widest * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, widest = [], int(lengths[row])
        batch.append(row)
    if batch:
        yield batch


def refuse_small_disk(out: Path, total: int, missing: int) -> None:
    """Say how many bytes the store takes, and raise UserError where the disk has not room for those that are missing."""
    free = shutil.disk_usage(out.parent).free
    kept = f", {readable(total - missing)} of them written before" if missing < total else ""
    note(f"{out} takes {readable(total)}{kept}; {readable(free)} are free")
    if missing > free:
        raise UserError(
            f"{out} needs {readable(missing)} and its disk has {readable(free)} free: make room, choose dtype int8 or fewer "
            "taps, or spread the rows over machines with --num-shards."
        )


def readable(size: int) -> str:
    """A size in bytes, to three digits."""
    unit = next((unit for unit in UNITS if size >= UNITS[unit]), "kB")
    return f"{float(f'{size / UNITS[unit]:.3g}'):g} {unit}"


# -- the directory beside the output ---------------------------------------------------------------------------------------


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep other processes from writing ``out`` until the block ends; the system lets go of it where a process dies."""
    path = out.parent / f".{out.name}.lock"
    busy = f"another process is writing {out}: wait for it, or choose another output."
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(busy) from error
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            raise UserError(busy)  # it was done, and removed its lock, just now
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def find_whole(partial: Path, manifest: Manifest, planned: list[np.ndarray], force: bool) -> set[int]:
    """The numbers of the planned shards that an earlier run of this extraction has written.

    Raises UserError where an extraction of something else was interrupted there; ``force`` discards it.
    """
    if not (partial / FILE).exists():
        return set()
    try:
        before = Manifest.read(partial)
    except UserError:
        if force:
            return set()
        raise
    own = manifest.model_copy(update={name: getattr(before, name) for name in ("draftsmith", "about", "shards")})
    differ = differences(before, own)
    if differ and not force:
        raise UserError(
            f"{partial} holds an unfinished extraction of other states ({'; '.join(differ)}): run that one to its end, choose "
            "another output, or pass --force to discard it."
        )
    return set() if differ else {number for number, rows in enumerate(planned) if is_whole(partial, number, rows, manifest)}


def is_whole(partial: Path, number: int, rows: np.ndarray, manifest: Manifest) -> bool:
    try:
        return np.array_equal(Shard(partial / shard_name("shard", number), manifest.identity.digest).rows, rows)
    except UserError:
        return False


def prepare_partial(partial: Path, manifest: Manifest, whole: set[int]) -> None:
    """Make the directory, or clear it of all that is no whole shard of this extraction."""
    partial.mkdir(exist_ok=True)
    kept = {FILE, *(shard_name("shard", number) for number in whole)}  # without a manifest they would count for nothing
    for path in partial.iterdir():
        if path.name not in kept:
            path.unlink()
    manifest.write(partial)


def put_in_place(partial: Path, out: Path) -> None:
    """Give the whole store its name, in place of what has it now."""
    replaced = out.parent / f".{out.name}.replaced"
    if out.exists():
        out.rename(replaced)
    partial.rename(out)
    sync(out.parent)
    if replaced.is_dir():
        shutil.rmtree(replaced)
    else:
        replaced.unlink(missing_ok=True)


# -- the work --------------------------------------------------------------------------------------------------------------


def fill(
    target: Target,
    examples: Sequence[Encoded],
    lengths: np.ndarray,
    manifest: Manifest,
    jobs: dict[Path, np.ndarray],
    batch_tokens: int,
    progress: Progress | None,
    given: Given | None = None,
) -> int:
    """Write every shard of ``jobs``, a path and its rows; returns the tokens computed.

    The target runs here without a pause. A thread of its own takes the states off the device, packs and writes them.
    """
    side = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None
    waiting: deque[Future] = deque()
    done, fetched = 0, 0
    order = np.concatenate([np.zeros(0, np.int64), *jobs.values()])
    with ThreadPoolExecutor(1) as writer:
        for path, rows in jobs.items():
            shard: list[KeptRow] = []
            for batch in batches(rows, lengths, batch_tokens):
                encoded = {row: examples[row] for row in batch}
                if given:
                    given.expect((int(row), examples[int(row)]) for row in order[fetched : fetched + given.ahead])
                    states = given.states(encoded)
                    fetched += len(batch)
                else:
                    padded = target.features(collate(encoded, batch, PAD, None).ids, manifest.identity.taps)
                    lines = enumerate(encoded.items())
                    states = {row: padded.rows((i, slice(len(example.ids)))) for i, (row, example) in lines}
                ready = torch.cuda.current_stream(target.device).record_event() if side else None
                waiting.append(writer.submit(keep, shard, encoded, states, manifest.identity, side, ready))
                done += sum(int(lengths[row]) for row in batch)
                while len(waiting) > WAITING:
                    waiting.popleft().result()
                if progress:
                    progress(sum(int(lengths[row]) for row in batch))
            waiting.append(writer.submit(finish, path, manifest.identity, shard, len(rows)))
        for future in waiting:
            future.result()
    return done


def keep(
    shard: list[KeptRow],
    encoded: dict[int, Encoded],
    states: dict[int, Features],
    identity: Identity,
    side: torch.cuda.Stream | None,
    ready: Any,
) -> None:
    """Add a batch's rows to the shard. On a GPU in a stream beside the target's, once the states are ``ready``."""
    with torch.cuda.stream(side):  # None changes nothing
        if side and ready:
            side.wait_event(ready)
        for row, example in encoded.items():
            shard.append(KeptRow.of(row, example, states[row], identity))


def finish(path: Path, identity: Identity, shard: list[KeptRow], rows: int) -> None:
    """Write the shard, unless one of its batches failed: that error is on its way to the caller."""
    if len(shard) == rows:
        write_shard(path, identity, shard)
        shard.clear()
