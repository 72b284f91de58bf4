"""Which static tree fits a head: Medusa's search (Cai et al., 2401.10774) over how often each rank is right at each depth."""

import heapq
from collections.abc import Sequence
from typing import Any

import torch

from ..console import Progress
from ..errors import UserError
from ..heads.base import DraftHead, Shape
from ..sampling import GREEDY, Sampling
from ..target import Target
from .prompts import Prompt
from .tree import NONE, Search, chain, from_paths
from .verifier import generate

SHARE = 4  # one prompt in so many is spent on the search


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


@torch.inference_mode()
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
    ranks = min(ranks, head.config.draft_vocab_size)
    hits, seen = torch.zeros(depths, ranks), torch.zeros(depths, 1)
    shape = chain(depths)
    with Progress("choosing a tree", len(prompts), show=show) as bar:
        for prompt in prompts:
            given = prompt.ids(target)
            text = given + generate(target, None, given, NONE, max_new, sampling, generator=generator).tokens
            ids = torch.tensor(text, device=target.device)
            features = target.features(ids[None], head.config.taps)
            state, first = head.new_state(), 0
            for row in range(len(given) - 1, len(text) - 2):
                read = features.rows((0, slice(first, row + 1)))
                guess, first = head.begin(state, read, ids[first : row + 2], target), row + 1
                for depth, token in enumerate(ids[row + 2 : row + 2 + depths]):
                    if depth:
                        guess = head.deepen(state, [depth], ids[row + 1 + depth, None], shape, target)
                    choices = head.target_ids[guess.logits[0].topk(ranks).indices]
                    hits[depth] += (choices == token).cpu()
                    seen[depth] += 1
            bar.advance()
    return (hits / seen.clamp_min(1)).tolist()


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
