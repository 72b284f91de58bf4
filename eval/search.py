"""Which static tree fits a head: Medusa's search (Cai et al., 2401.10774) over how often each rank is right at each depth."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..console import Progress
from ..errors import UserError
from ..heads.base import DraftHead, Shape
from ..heads.drafting import written
from ..heads.growing import Dynamic, grow
from ..sampling import GREEDY, Sampling
from ..target import Target
from .prompts import Prompt
from .tree import NONE, Search, chain, from_paths
from .verifier import generate

SHARE = 4  # one prompt in so many is spent on the search
MISS = -1  # the rank of a token that was not among the head's choices


def spend(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Prompt],
    form: Search,
    max_new: int,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
    show: bool = False,
) -> tuple[Shape, Sequence[Prompt], dict[str, Any]]:
    """Choose a tree on the first quarter of the prompts: the tree, the prompts that are left to measure it on, and what was
    found. Raises UserError for a single prompt, which cannot do both."""
    if len(prompts) < 2:
        raise UserError(f"--tree {form.name} needs two prompts or more, some to choose the tree on and others to measure it.")
    spent = max(1, len(prompts) // SHARE)
    depths = min(form.length, head.deepest or form.length)
    found = accuracy(target, head, prompts[:spent], depths, form.width, max_new, sampling, generator, show)
    shape = search(found, form.nodes)
    expected = 1 + sum(value(found, path) for path in shape.paths)
    return shape, prompts[spent:], {"prompts": spent, "accuracy": found, "expected_tau": expected}


def accuracy(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Prompt],
    depths: int,
    ranks: int,
    max_new: int,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
    show: bool = False,
) -> list[list[float]]:
    """``[depth][rank]``: how often the target's token was the head's rank-th choice, at every place of texts that the target
    writes by itself, given that all drafts before it were right."""
    texts = walk(target, head, prompts, depths, ranks, max_new, sampling, generator, show)
    return shares([place for text in texts for place in text], depths, min(ranks, head.config.draft_vocab_size))


def shares(places: Sequence["Place"], depths: int, ranks: int) -> list[list[float]]:
    """``[depth][rank]``: of the places whose text goes that far, the share with the token on that rank."""
    found = []
    for depth in range(depths):
        own = [place.ranks[depth] for place in places if len(place.ranks) > depth]
        found.append([own.count(rank) / max(1, len(own)) for rank in range(ranks)])
    return found


@dataclass(frozen=True)
class Place:
    """A place of a text. ``ranks``: for every depth the rank that the head gave the text's token, all before it right, or
    MISS; fewer at the end of the text. ``grown``: the candidates for a dynamic tree, and which of them are the text's."""

    ranks: tuple[int, ...]
    grown: "Candidates | None" = None


@dataclass(frozen=True)
class Candidates:
    """``scores`` float32 and ``depths`` of a dynamic tree's candidates, the root first; ``right``: the numbers of those that
    go along the text, the root left out."""

    scores: np.ndarray
    depths: np.ndarray
    right: tuple[int, ...]


@torch.inference_mode()
def walk(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Prompt],
    depths: int,
    ranks: int,
    max_new: int,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
    show: bool = False,
    form: Dynamic | None = None,
) -> list[list[Place]]:
    """Let the target write texts, and ask the head at every place of them what it would have drafted, in ``form`` too."""
    shape, texts = chain(depths), []
    ranks = min(ranks, head.config.draft_vocab_size)
    with Progress("choosing a draft", len(prompts), show=show) as bar:
        for prompt in prompts:
            given = prompt.ids(target)
            text = given + generate(target, None, given, NONE, max_new, sampling, generator=generator).tokens
            ids = torch.tensor(text, device=target.device)
            features = target.features(ids[None], head.config.taps)
            places, first = [], 0
            state, branching = head.new_state(), head.new_state()
            for row in range(len(given) - 1, len(text) - 2):
                read, known = features.rows((0, slice(first, row + 1))), ids[first : row + 2]
                following, first = ids[row + 2 : row + 2 + depths], row + 1
                grown = None
                if form:
                    growing = grow(head, head.begin(branching, read, known, target), form)
                    (tree,) = written(head, [growing], [branching], target)
                    grown = Candidates(tree.scores, tree.depths, tree.follow(following.tolist()))
                guess, own = head.begin(state, read, known, target), []
                for depth, token in enumerate(following):
                    if depth:
                        guess = head.deepen(state, [depth], following[depth - 1, None], shape, target)
                    choices = head.target_ids[guess.logits[0].topk(ranks).indices]
                    own.append(next(iter((choices == token).nonzero().flatten().tolist()), MISS))
                places.append(Place(tuple(own), grown))
            texts.append(places)
            bar.advance()
    return texts


def search(accuracy: list[list[float]], nodes: int) -> Shape:
    """Grow a tree by the path most likely to be accepted, a node's next sibling or its first child, until it has so many
    nodes or every other path was never right. A path's chance is the product of ``accuracy[depth][rank]`` along it."""
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, int, tuple[int, ...]]] = [(-value(accuracy, (0,)), 1, (0,))]
    while waiting and len(paths) < nodes and (waiting[0][0] < 0 or not paths):
        _, _, path = heapq.heappop(waiting)
        paths.append(path)
        for near in ((*path[:-1], path[-1] + 1), (*path, 0)):
            if len(near) <= len(accuracy) and near[-1] < len(accuracy[0]):
                heapq.heappush(waiting, (-value(accuracy, near), len(near), near))
    return from_paths(paths, f"search:{nodes}")


def value(accuracy: list[list[float]], path: Sequence[int]) -> float:
    """The chance that a path is accepted."""
    chance = 1.0
    for depth, rank in enumerate(path):
        chance *= accuracy[depth][rank]
    return chance
