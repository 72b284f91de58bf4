"""Which form a draft has: none, a chain, a static tree, or one that the head's own probabilities give."""

import json
from dataclasses import dataclass

from ..errors import UserError
from ..heads.base import DraftHead, Shape
from ..heads.drafting import Adaptive, Form
from ..heads.growing import Beam, Dynamic

NONE = Shape("none", (), ())
HINT = "write none, chain:5, chain:8,stop=0.3, tree:4x2x1, a list of paths [[0],[1],[0,0]], dynamic:24,k=10,depth=8 or beam:4x5"
WISHES = "write search:24, search:24,k=10,depth=8, auto, auto:64, chain:8,adapt or chain:8,adapt=0.2"


@dataclass(frozen=True)
class Search:
    """A static tree of so many ``nodes``, still to be chosen for a head by its accuracy, of the ``width`` best ranks at each
    of ``length`` depths."""

    nodes: int
    width: int = 10
    length: int = 8

    @property
    def name(self) -> str:
        return f"search:{self.nodes},k={self.width},depth={self.length}"


@dataclass(frozen=True)
class Paced:
    """A chain of at most ``length`` tokens: how many, follows before every pass from how the drafts before it have fared.

    ``costs``: seconds of a pass with a draft of 0, 1, … ``length`` tokens, in multiples of a pass without; empty where they
    are still to be measured.
    """

    length: int
    costs: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return f"chain:{self.length},adapt"


@dataclass(frozen=True)
class Auto:
    """The form that pays best on this machine, none included, still to be found: of at most ``nodes`` tokens, ``length``
    deep, of the ``width`` best ranks."""

    nodes: int = 64
    width: int = 10
    length: int = 8

    @property
    def name(self) -> str:
        return f"auto:{self.nodes},k={self.width},depth={self.length}"


Wish = Search | Paced | Auto  # what has to be settled for a head, a target and a machine


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


def parse(text: str) -> Form:
    """Read a draft's form, in the notations of ``HINT``: a tree's numbers are the children of each node by depth, a beam's
    its paths and their length, and what stands behind a comma may be left out."""
    if text == "none":
        return NONE
    try:
        if text.startswith("["):
            return from_paths([tuple(path) for path in json.loads(text)], "tree:paths")
        kind, _, rest = text.partition(":")
        size, *settings = rest.split(",")
        if kind == "chain":
            stop = Settings(settings, {"stop"}).chance("stop")
            return Adaptive(positive(size), stop) if stop else chain(positive(size))
        if kind == "dynamic":
            given = Settings(settings, {"k", "depth", "stop"})
            return Dynamic(positive(size), given.count("k", 10), given.count("depth", 8), given.chance("stop"))
        if kind == "tree" and not settings:
            return full([positive(width) for width in size.split("x")])
        if kind == "beam" and not settings:
            width, _, length = size.partition("x")
            return Beam(positive(width), positive(length))
    except (ValueError, TypeError) as error:
        raise UserError(f"--tree {text!r} cannot be read ({error}): {HINT}.") from error
    raise UserError(f"--tree {text!r} is no draft shape: {HINT}.")


def parse_or_search(text: str) -> Form | Wish:
    """Read a form as ``parse`` does, or a wish for one: ``search:24``, ``auto``, ``auto:64`` or ``chain:8,adapt``.

    ``chain:8,adapt=0.2`` needs no measurement: every drafted token costs a fifth of a pass.
    """
    if text == "auto":
        return Auto()
    kind, _, rest = text.partition(":")
    size, *settings = rest.split(",")
    try:
        if kind == "search":
            given = Settings(settings, {"k", "depth"})
            return Search(positive(size), given.count("k", 10), given.count("depth", 8))
        if kind == "auto":
            given = Settings(settings, {"k", "depth"})
            return Auto(positive(size), given.count("k", 10), given.count("depth", 8))
        if kind == "chain" and any(setting.split("=")[0] == "adapt" for setting in settings):
            return paced(positive(size), settings)
    except ValueError as error:
        raise UserError(f"--tree {text!r} cannot be read ({error}): {WISHES}.") from error
    return parse(text)


def paced(length: int, settings: list[str]) -> Paced:
    if settings == ["adapt"]:
        return Paced(length)
    each = Settings(settings, {"adapt"}).chance("adapt")
    return Paced(length, tuple(1 + each * drafted for drafted in range(length + 1)))


class Settings:
    """What stands behind the commas, as name=value; ValueError for a name that is not ``known``."""

    def __init__(self, texts: list[str], known: set[str]) -> None:
        self.given: dict[str, str] = {}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in known:
                raise ValueError(f"{name!r} is no setting of it; there is {', '.join(sorted(known))}")
            self.given[name] = value

    def count(self, name: str, default: int) -> int:
        return positive(self.given[name]) if name in self.given else default

    def chance(self, name: str) -> float:
        """A number above 0 and below 1; 0 where it is not given."""
        number = float(self.given.get(name, 0))
        if name in self.given and not 0 < number < 1:
            raise ValueError(f"{name} is {number:g} and must lie between 0 and 1")
        return number


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is below 1")
    return number


def fitted(form: Form, head: DraftHead | None) -> Form:
    """The form that this head drafts in: a dynamic tree ends at the head's deepest level, anything else that goes deeper is
    refused. Without a head nothing is drafted."""
    if head is None:
        return NONE
    if head.deepest is None or form.length <= head.deepest:
        return form
    if isinstance(form, Dynamic):
        return form.cut(head.deepest)
    raise UserError(f"the draft shape {form.name} is deeper than this {head.kind} head's {head.deepest} depths: shorten it.")
