"""Draft shapes: what can be written, what they are, what is refused."""

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.tree import NONE, chain, from_paths, full, parse

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
    ],
)
def test_what_can_be_written(text: str, shape: object) -> None:
    assert parse(text) == shape


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
        "[1,2]", "[[0,0]]", "[[1]]", "[[0],[0,1]]", "[[]]", '[["a"]]', "[[0],[-1]]", "[[0.5]]", "[]", "3",
    ],
)  # fmt: skip
def test_what_is_no_shape_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=r"chain:5|better sibling|ranks from 0"):
        parse(text)
