"""The recipes that travel with the package: what there is, and how one is copied with the files that it names."""

import shutil
from pathlib import Path

from ..errors import UserError
from .schema import shipped

HERE = Path(__file__).parent
COMPANIONS = ("accelerate", "demo")  # folders that a recipe may name files of


def find_shipped(name: str) -> Path:
    """The file of a shipped recipe."""
    known = shipped()
    if name not in known:
        raise UserError(f"there is no shipped recipe {name!r}: choose from {', '.join(known)}.")
    return known[name]


def about(recipe: Path) -> list[str]:
    """The lines of comment on a recipe's top: its command and what it is."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    first = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return [line.removeprefix("#").strip() for line in lines[:first]]


def copy(name: str, folder: Path, force: bool) -> list[Path]:
    """Copy a shipped recipe into ``folder``, with the data and accelerate configs that it names; returns the new files.

    Raises UserError for an unknown name, or where a file exists already and ``force`` is not given.
    """
    recipe = find_shipped(name)
    text = recipe.read_text(encoding="utf-8")
    sources = [recipe]
    for companion in COMPANIONS:
        if f"{companion}/" in text:
            sources += sorted(path for path in (HERE / companion).iterdir() if path.suffix in (".yaml", ".json", ".jsonl"))
    copies = {source: folder / source.relative_to(HERE) for source in sources}
    for path in copies.values():
        if path.exists() and not force:
            raise UserError(f"{path} exists: choose another folder, or pass --force to replace it.")
    for source, path in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
    return list(copies.values())
