"""Dynamic trees and beams against plain re-tellings of them, on heads whose probabilities are known."""

import itertools
from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch
from cases import CASES, DEPTHS, make_head
from scripted import ScriptedHead
from torch import Tensor

from draftsmith.heads.base import Draft, DraftHead, Shape
from draftsmith.heads.drafting import Form, draft
from draftsmith.heads.growing import Beam, Dynamic
from draftsmith.target import Features, Target

VOCAB = 12
Row = Callable[[list[int]], Tensor]
Path = tuple[int, ...]


class Says(Protocol):
    def log_probs(self, path: Path) -> dict[int, float]:
        """Of every token that may follow a drafted path."""
        ...


class Head(ScriptedHead):
    """Says a function of the drafted path, over two thirds of the vocabulary."""

    def __init__(self, row: Row, ids: list[int] | None = None) -> None:
        super().__init__(VOCAB, torch.tensor(ids or [0, 1, 3, 4, 6, 7, 9, 10]))
        self.row = row

    def logits(self, committed: list[int], path: list[int]) -> Tensor:
        return self.row(path)

    def log_probs(self, path: Path) -> dict[int, float]:
        row = self.row(list(path))[self.target_ids].log_softmax(-1)
        return dict(zip(self.target_ids.tolist(), row.tolist(), strict=True))


class Nowhere:
    device = torch.device("cpu")


def random_rows(seed: int, spread: float = 2.0) -> Row:
    def row(path: list[int]) -> Tensor:
        number = sum((token + 1) * 13**place for place, token in enumerate(path))
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed * 10**9 + number)) * spread

    return row


def tied_rows(seed: int) -> Row:
    """Half of a row equally likely, the rest impossible: at every depth many paths are equal."""

    def row(path: list[int]) -> Tensor:
        return torch.where(random_rows(seed)(path) > 0, 0.0, -1e9)

    return row


def flat_rows(path: list[int]) -> Tensor:
    return torch.zeros(VOCAB)


def certain_rows(path: list[int]) -> Tensor:
    """One token of probability 1: a child is as likely as its parent."""
    return torch.full((VOCAB,), -1e9).index_fill(0, torch.tensor(sum(path) % 2 * 3), 0.0)


def written(head: Head, form: Form) -> Draft:
    features = Features(torch.zeros(1, 0), torch.zeros(1, 1))
    target: Any = Nowhere()
    return draft(head, head.new_state(), features, torch.tensor([0, 1]), form, target)


def paths(draft: Draft) -> list[Path]:
    """The tokens from the root down to every node."""
    found: list[Path] = [()]
    for parent, token in zip(draft.shape.parents, draft.tokens, strict=True):
        found.append((*found[parent], token))
    return found[1:]


def score(head: Says, path: Path) -> float:
    return sum(head.log_probs(path[:depth])[token] for depth, token in enumerate(path))


def best_children(head: Says, path: Path, count: int) -> list[Path]:
    row = head.log_probs(path)
    return [(*path, token) for token in sorted(row, key=lambda token: -row[token])[:count]]


def eagle2(head: Says, nodes: int, width: int, length: int) -> set[Path]:
    """The paper's tree with nothing saved: all candidates of all levels, then the best of them."""
    frontier: list[Path] = [()]
    candidates: list[Path] = []
    for _ in range(length):
        level = [child for path in frontier for child in best_children(head, path, width)]
        candidates += level
        frontier = sorted(level, key=lambda path: -score(head, path))[:width]
    return set(sorted(candidates, key=lambda path: -score(head, path))[:nodes])


def beams(head: Says, width: int, length: int) -> list[Path]:
    kept: list[Path] = [()]
    for _ in range(length):
        longer = [(*path, token) for path in kept for token in head.log_probs(path)]
        kept = sorted(longer, key=lambda path: -score(head, path))[:width]
    return kept


FORMS = [(1, 1, 1), (5, 3, 2), (24, 8, 3), (10, 10, 4), (60, 10, 4), (200, 3, 4), (6, 1, 6), (7, 2, 8)]


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize(("nodes", "width", "length"), FORMS)
def test_a_dynamic_tree_is_eagle_2s(nodes: int, width: int, length: int, spread: float) -> None:
    for seed in range(3):
        head = Head(random_rows(seed, spread))
        found = written(head, Dynamic(nodes, width, length))
        wanted = eagle2(head, nodes, width, length)
        assert set(paths(found)) == wanted and len(found.tokens) == len(wanted)
        assert found.q is None and found.shape.name == f"dynamic:{nodes},k={width},depth={length}"
        assert max(head.read, default=1) <= width and len(head.read) < length


@pytest.mark.parametrize("rows", [random_rows(1), tied_rows(1), tied_rows(2), flat_rows, certain_rows])
@pytest.mark.parametrize("form", [*(Dynamic(*form) for form in FORMS), Beam(1, 4), Beam(4, 1), Beam(5, 3), Beam(9, 4)], ids=str)
def test_a_grown_draft_is_a_tree_by_depth_whatever_is_tied(rows: Row, form: Form) -> None:
    """Every node's parent and every node's better siblings come before it, and no sibling says what another says."""
    found = written(Head(rows), form)
    every = paths(found)
    assert len(set(every)) == len(every) and 0 < len(every) <= form.nodes
    assert list(found.shape.depths) == sorted(found.shape.depths) and found.shape.length <= form.length
    for children in found.shape.families:
        ranks = [found.shape.ranks[child - 1] for child in children]
        assert ranks == sorted(set(ranks))
        assert isinstance(form, Beam) or ranks == list(range(len(ranks)))


def test_ranks_are_the_heads_own() -> None:
    head = Head(random_rows(3))
    for form in (Dynamic(24, 6, 3), Beam(6, 3)):
        found = written(head, form)
        for path, rank in zip(paths(found), found.shape.ranks, strict=True):
            assert best_children(head, path[:-1], 8)[rank] == path


@pytest.mark.parametrize("seed", range(5))
def test_no_other_tree_of_the_size_promises_more(seed: int) -> None:
    """Where nothing is cut away beforehand, the sum of the paths' probabilities is the largest of all trees'."""
    head, nodes = Head(random_rows(seed), [1, 5, 7]), 4
    everything = [path for depth in (1, 2) for path in itertools.product([1, 5, 7], repeat=depth)]
    chance = {path: float(torch.tensor(score(head, path)).exp()) for path in everything}
    trees = [
        tree for tree in itertools.combinations(everything, nodes) if all(len(path) == 1 or path[:-1] in tree for path in tree)
    ]
    best = max(sum(chance[path] for path in tree) for tree in trees)
    found = written(head, Dynamic(nodes, 9, 2))
    assert sum(chance[path] for path in paths(found)) == pytest.approx(best, abs=1e-6)


def test_the_head_reads_no_node_that_cannot_matter() -> None:
    """Four equal first tokens fill a tree of four: nothing below them can be likelier."""
    flat = Head(flat_rows)
    assert len(written(flat, Dynamic(4, 4, 5)).tokens) == 4 and flat.read == []
    sure = Head(certain_rows)
    assert written(sure, Dynamic(5, 4, 8)).shape.length == 5 and sure.read == [4, 1, 1, 1]  # five are known from then on


@pytest.mark.parametrize("stop", [0.5, 0.1, 0.02])
def test_a_dynamic_tree_leaves_out_paths_below_its_stop(stop: float) -> None:
    head, free = Head(random_rows(2)), Dynamic(200, 8, 4)
    bound = float(torch.tensor(stop).log())
    kept = {path for path in paths(written(head, free)) if score(head, path) >= bound}
    head.read = []
    found = written(head, Dynamic(200, 8, 4, stop))
    first = best_children(head, (), 1)[0]
    assert set(paths(found)) == kept | {first} and 0 < len(kept) < 200
    assert all(count <= len(kept | {first}) for count in head.read)


@pytest.mark.parametrize(("width", "length"), [(1, 1), (1, 5), (3, 3), (5, 4), (8, 2), (20, 2)])
def test_a_beam_is_the_tree_of_the_best_paths(width: int, length: int) -> None:
    for seed in range(3):
        head = Head(random_rows(seed))
        found = written(head, Beam(width, length))
        wanted = beams(head, width, length)
        assert set(paths(found)) == {path[:end] for path in wanted for end in range(1, length + 1)}
        leaves = [path for node, path in enumerate(paths(found), start=1) if not found.shape.children(node)]
        assert sorted(leaves) == sorted(wanted)  # a common beginning stands once, and no path ends early


def test_beams_that_share_their_beginning_share_its_nodes() -> None:
    def row(path: list[int]) -> Tensor:
        return flat_rows(path) if len(path) == 2 else certain_rows([])

    assert written(Head(row), Beam(4, 3)).shape.parents == (0, 1, 2, 2, 2, 2)


# -- on real heads ---------------------------------------------------------------------------------------------


class Alone:
    """What a real head says behind a path when it drafts that path alone, as a chain from a fresh state."""

    def __init__(self, head: DraftHead, features: Features, ids: Tensor, target: Target) -> None:
        self.head, self.given, self.target = head, (features, ids), target
        self.known: dict[Path, dict[int, float]] = {}

    @torch.no_grad()
    def log_probs(self, path: Path) -> dict[int, float]:
        if path not in self.known:
            shape, state = Shape("alone", tuple(range(len(path))), (0,) * len(path)), self.head.new_state()
            guess = self.head.begin(state, *self.given, self.target)
            for node, token in enumerate(path, start=1):
                guess = self.head.deepen(state, [node], torch.tensor([token]), shape, self.target)
            row = guess.logits[0].float().log_softmax(-1)
            self.known[path] = dict(zip(self.head.target_ids.tolist(), row.tolist(), strict=True))
        return self.known[path]


@pytest.mark.parametrize("case", CASES)
def test_every_kind_says_in_a_growing_tree_what_it_says_along_a_chain(lively_target: Target, case: str) -> None:
    head = make_head(lively_target, case)
    ids = torch.randint(3, 111, (9,), generator=torch.Generator().manual_seed(2))
    with head.adapted(lively_target):
        features = lively_target.features(ids[None], head.config.taps).rows((0, slice(0, len(ids) - 1)))
        alone = Alone(head, features, ids, lively_target)
        found = draft(head, head.new_state(), features, ids, Dynamic(14, 3, DEPTHS), lively_target)
        assert set(paths(found)) == eagle2(alone, 14, 3, DEPTHS)
        found = draft(head, head.new_state(), features, ids, Beam(3, DEPTHS), lively_target)
        assert set(paths(found)) == {path[:end] for path in beams(alone, 3, DEPTHS) for end in range(1, DEPTHS + 1)}


def test_cut_leaves_the_rest_as_it_was() -> None:
    assert Dynamic(24, 8, 6, 0.1).cut(2) == Dynamic(24, 8, 2, 0.1) and Beam(3, 5).cut(2) == Beam(3, 2)
    for form in (Dynamic(24), Beam(3, 5)):
        assert form.cut(8) is form
