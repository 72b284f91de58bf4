"""Outputs that are whole or absent, and never replaced unasked."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError


def refuse_existing(out: Path, force: bool) -> None:
    """Raise UserError where ``out`` exists, unless ``force`` allows replacing it. What holds the working directory is safe."""
    refuse_parent(out)
    if out.exists() and not force:
        raise UserError(f"{out} exists: choose another output, or pass --force to replace it.")
    if Path.cwd().is_relative_to(out.resolve()):
        raise UserError(f"{out} holds the working directory and cannot be replaced: choose another output.")


def refuse_parent(out: Path) -> None:
    """Raise UserError where ``out`` cannot be made because a file stands where a directory should."""
    blocking = next((parent for parent in out.parents if parent.exists()), out)
    if blocking != out and not blocking.is_dir():
        raise UserError(f"{out} cannot be made, because {blocking} is a file: choose another output.")


def write_whole(path: Path, texts: Iterable[str]) -> None:
    """Write a file beside ``path`` and give it the name once it is whole and on the disk."""
    new = path.with_name(f".{path.name}.new")  # one name, so that what a kill leaves is written over by the next start
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.writelines(texts)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file, or a directory's list of names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_directory(out: Path, force: bool) -> Iterator[Path]:
    """A directory beside ``out`` to write into; it takes the name ``out`` when the block ends well and vanishes otherwise."""
    refuse_existing(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    partial.chmod(0o755)  # mkdtemp's directories are private
    try:
        yield partial
        put_in_place(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put_in_place(partial: Path, out: Path) -> None:
    """Give a whole directory the name ``out``, in place of what has it, which a kill in between leaves for ``restore``."""
    old = aside(out)
    shutil.rmtree(old, ignore_errors=True)
    if out.is_dir():
        out.rename(old)
    else:
        out.unlink(missing_ok=True)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def restore(out: Path) -> None:
    """Give the directory ``out`` its name back where a kill came just before it would have been replaced."""
    if aside(out).is_dir() and not out.exists():
        aside(out).rename(out)


def aside(out: Path) -> Path:
    return out.with_name(f".{out.name}.old")
