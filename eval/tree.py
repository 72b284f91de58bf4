"""Which form a draft has: none, a chain, or a static tree."""

import json

from ..errors import UserError
from ..heads.base import Shape

NONE = Shape("none", (), ())
HINT = "write none, chain:5, tree:4x2x1 or a list of paths [[0],[1],[0,0]]"


def chain(length: int) -> Shape:
    """One path of ``length`` tokens."""
    return Shape(f"chain:{length}", tuple(range(length)), (0,) * length)


def full(widths: list[int]) -> Shape:
    """A tree in which every node of depth d has ``widths[d]`` children."""
    paths: list[tuple[int, ...]] = [()]
    level = [()]
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return from_paths(paths[1:], "tree:" + "x".join(map(str, widths)))


def from_paths(paths: list[tuple[int, ...]], name: str) -> Shape:
    """A tree from Medusa's notation: a path (c1, c2) is the c2-th choice (0 is best) below the c1-th choice of the root."""
    if not paths or not all(isinstance(rank, int) and rank >= 0 for path in paths for rank in path):
        raise UserError("a tree is a list of paths, and a path a list of ranks from 0 on: write [[0],[1],[0,0]].")
    ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    index = {path: node for node, path in enumerate([(), *ordered])}
    for path in ordered:
        if not path or path[:-1] not in index or (path[-1] > 0 and (*path[:-1], path[-1] - 1) not in index):
            raise UserError(f"the tree has a path {list(path)} without its parent or its better sibling: add them.")
    return Shape(name, tuple(index[path[:-1]] for path in ordered), tuple(path[-1] for path in ordered))


def parse(text: str) -> Shape:
    """Read ``none``, ``chain:5``, ``tree:4x2x1`` (children per node, by depth) or a JSON list of paths."""
    try:
        if text == "none":
            return NONE
        if text.startswith("chain:"):
            return chain(positive(text.removeprefix("chain:")))
        if text.startswith("tree:"):
            return full([positive(width) for width in text.removeprefix("tree:").split("x")])
        if text.startswith("["):
            return from_paths([tuple(path) for path in json.loads(text)], "tree:paths")
    except (ValueError, TypeError) as error:
        raise UserError(f"--tree {text!r} cannot be read ({error}): {HINT}.") from error
    raise UserError(f"--tree {text!r} is no draft shape: {HINT}.")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is below 1")
    return number
