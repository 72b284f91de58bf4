"""Draft shapes: what can be written, what they are, what is refused."""

import re

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.tree import NONE, Auto, Paced, Search, chain, from_paths, full, parse, parse_or_search
from draftsmith.heads.base import Shape
from draftsmith.heads.drafting import Adaptive
from draftsmith.heads.growing import Beam, Dynamic

PATHS = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]


def test_a_chain() -> None:
    shape = chain(3)
    assert (shape.name, shape.parents, shape.ranks, shape.depths) == ("chain:3", (0, 1, 2), (0, 0, 0), (0, 1, 2, 3))
    assert shape.is_chain and [shape.children(node) for node in range(4)] == [(1,), (2,), (3,), ()]


def test_a_full_tree() -> None:
    shape = full([2, 2, 1])
    assert (shape.name, shape.parents, shape.ranks) == (
        "tree:2x2x1",
        (0, 0, 1, 1, 2, 2, 3, 4, 5, 6),
        (0, 1, 0, 1, 0, 1, 0, 0, 0, 0),
    )
    assert shape.depths == (0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
    assert shape.level(2) == [3, 4, 5, 6] and shape.children(2) == (5, 6) and not shape.is_chain


def test_paths_in_any_order_and_twice() -> None:
    shape = from_paths([*reversed(PATHS), (0, 0)], "mine")
    assert (shape.name, shape.parents, shape.ranks) == ("mine", (0, 0, 1, 1, 3), (0, 1, 0, 1, 0))
    assert shape.children(0) == (1, 2) and shape.children(1) == (3, 4)


def test_children_come_best_first_whatever_their_place() -> None:
    shape = type(NONE)("odd", (0, 0, 0), (2, 0, 1))
    assert shape.children(0) == (2, 3, 1)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("none", NONE),
        ("chain:5", chain(5)),
        ("tree:4x2x1", full([4, 2, 1])),
        ("tree:1x1", full([1, 1])),
        ("[[0],[1],[0,0],[0,1],[0,0,0]]", from_paths(PATHS, "tree:paths")),
        ("chain:8,stop=0.3", Adaptive(8, 0.3)),
        ("dynamic:24", Dynamic(24, 10, 8, 0.0)),
        ("dynamic:24,depth=6,k=7,stop=0.05", Dynamic(24, 7, 6, 0.05)),
        ("beam:4x5", Beam(4, 5)),
        ("search:24", Search(24, 10, 8)),
        ("search:24,depth=3,k=4", Search(24, 4, 3)),
        ("auto:64", Auto(64, 10, 8)),
        ("auto:12,depth=3,k=4", Auto(12, 4, 3)),
        ("chain:8,adapt", Paced(8)),
    ],
)
def test_what_can_be_written(text: str, shape: object) -> None:
    found = parse_or_search(text)
    assert found == shape
    assert text.startswith("[") or parse_or_search(found.name) == found


def test_what_is_short_for_something_longer() -> None:
    assert parse_or_search("auto") == Auto(64, 10, 8)
    assert parse_or_search("chain:2,adapt=0.25") == Paced(2, (1.0, 1.25, 1.5))


def test_a_tree_is_written_as_its_paths() -> None:
    for shape in (full([3, 2, 1]), chain(4), from_paths(PATHS, "mine")):
        again = parse(str(shape.paths))
        assert isinstance(again, Shape) and (again.parents, again.ranks) == (shape.parents, shape.ranks)
    assert sorted(full([2, 1]).paths) == [[0], [0, 0], [1], [1, 0]]


def test_the_nodes_a_head_must_read() -> None:
    assert from_paths(PATHS, "mine").bearing == ((0,), (1,), (3,))
    assert full([2, 2]).bearing == ((0,), (1, 2)) and chain(3).bearing == ((0,), (1,), (2,)) and NONE.bearing == ()


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 9])
def test_cut(depth: int) -> None:
    shape = full([2, 2, 1]).cut(depth)
    assert max(shape.depths) == min(depth, 3)
    assert len(shape.parents) == len(shape.ranks) == (0, 2, 6, 10)[min(depth, 3)]
    assert chain(4).cut(depth) == type(NONE)("chain:4", chain(min(depth, 4)).parents, (0,) * min(depth, 4))


@pytest.mark.parametrize(
    "text",
    [
        "", "chain", "chain:", "chain:0", "chain:-1", "chain:x", "tree:", "tree:2x0", "tree:2xa", "tree:2x", "[[0],[0,0]",
        "chain:5,stop", "chain:5,stop=0", "chain:5,stop=1", "chain:5,stop=x", "chain:5,k=3", "dynamic:", "dynamic:0",
        "dynamic:9,k=0", "dynamic:9,nodes=3", "dynamic:9,depth=x", "beam:4", "beam:4x", "beam:4x5x6", "beam:0x2",
        "beam:4x5,k=2", "search:x", "search:9,stop=0.1", "auto:", "auto:0", "auto:9,stop=0.1", "auto,k=3",
        "chain:0,adapt", "chain:5,adapt=0", "chain:5,adapt,stop=0.3", "chain:5,adapt=2", "tree:2x2,k=3", "none,k=3",
        "[1,2]", "[[0,0]]", "[[1]]", "[[0],[0,1]]", "[[]]", '[["a"]]', "[[0],[-1]]", "[[0.5]]", "[]", "3",
    ],
)  # fmt: skip
def test_what_is_no_shape_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=r"chain:5|better sibling|ranks from 0|search:24"):
        parse_or_search(text)


@pytest.mark.parametrize("wish", ["search:24", "auto", "auto:8", "chain:8,adapt"])
def test_a_wish_is_no_form_yet(wish: str) -> None:
    with pytest.raises(UserError, match=re.escape(wish)):
        parse(wish)
