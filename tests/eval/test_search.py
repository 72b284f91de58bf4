"""The search for a head's best static tree: against every tree there is, and on counts that are known."""

import itertools
import json

import pytest
import torch
from scripted import ScriptedHead
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.harness import measure
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.search import accuracy, search, value
from draftsmith.eval.settle import settle
from draftsmith.eval.tree import NONE, parse, parse_or_search
from draftsmith.eval.verifier import generate
from draftsmith.heads.base import Shape
from draftsmith.heads.kinds import KINDS
from draftsmith.sampling import Sampling
from draftsmith.target import Target

QUESTIONS = ["What is it?", "Count to three.", "Why", "Say x"]


def prompts(count: int = 4) -> list[Prompt]:
    return [Prompt([{"role": "user", "content": text}]) for text in QUESTIONS[:count]]


# -- the search ------------------------------------------------------------------------------------------------


def falling(depths: int, ranks: int, seed: int) -> list[list[float]]:
    rows = torch.rand(depths, ranks, generator=torch.Generator().manual_seed(seed)).sort(-1, descending=True).values
    return (rows / rows.sum(-1, keepdim=True) * 0.9).tolist()


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_no_tree_of_the_size_is_better(nodes: int, seed: int) -> None:
    table = falling(2, 3, seed)
    everything = [path for depth in (1, 2) for path in itertools.product(range(3), repeat=depth)]
    trees = [tree for tree in itertools.combinations(everything, nodes) if all(p[:-1] in tree for p in tree if len(p) > 1)]
    best = max(sum(value(table, path) for path in tree) for tree in trees)
    shape = search(table, nodes)
    assert shape.nodes == nodes and shape.name == f"search:{nodes}"
    assert sum(value(table, path) for path in shape.paths) == pytest.approx(best)


def test_the_order_by_hand() -> None:
    table = [[0.5, 0.3, 0.1], [0.5, 0.1, 0.0], [0.4, 0.4, 0.0]]
    order = [[0], [1], [0, 0], [1, 0], [0, 0, 0], [0, 0, 1], [2]]  # 0.5 0.3 0.25 0.15 0.1 0.1 0.1
    for nodes in range(1, 5):
        assert sorted(search(table, nodes).paths) == sorted(order[:nodes])
    assert sorted(search(table, 5).paths) == sorted([*order[:4], [2]])  # of equal ones the shallower


def test_what_was_never_right_is_left_out() -> None:
    assert search([[0.5, 0.0], [0.0, 0.5]], 9).paths == [[0]]
    assert search([[0.5, 0.2], [0.3, 0.0]], 99).paths == [[0], [1], [0, 0], [1, 0]]
    assert search([[0.0, 0.0]], 9).paths == [[0]]  # a draft has a token


# -- the counts ------------------------------------------------------------------------------------------------


class Ranked(ScriptedHead):
    """Knows the texts, and puts the right token of depth d on rank d, or off the list at every third place."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__(128, torch.arange(128), taps=[1])
        self.texts = texts

    def logits(self, committed: list[int], path: list[int]) -> Tensor:
        known = [*committed, *path]
        text = next(text for text in self.texts if text[: len(known)] == known)
        row = -torch.arange(128.0)
        if len(committed) % 3:
            right, depth = (text + [0])[len(known)], len(path)
            row[[depth, right]] = row[[right, depth]]  # logits of rank r are -r
        else:
            row[(text + [0])[len(known)]] = -999.0
        return row


def written(target: Target, asked: list[Prompt], new: int) -> list[list[int]]:
    return [given + generate(target, None, given, NONE, new).tokens for given in (prompt.ids(target) for prompt in asked)]


def test_accuracy_counts_ranks_along_the_targets_own_text(lively_target: Target, tiny_target: Target) -> None:
    target = Target(lively_target.model, tiny_target.tokenizer, "lively")
    target.eos_ids = frozenset()
    asked, new = prompts(2), 7
    texts = written(target, asked, new)
    found = accuracy(target, Ranked([text[1:] for text in texts]), asked, 3, 4, new)
    for depth in range(3):
        # the head has read the tokens behind the first up to x_{t+1}, so t + 1 of them, and speaks of x_{t+2+depth}
        rows = [
            row + 1 for prompt in asked for row in range(len(prompt.ids(target)) - 1, len(prompt.ids(target)) + new - 2 - depth)
        ]
        share = sum(read % 3 > 0 for read in rows) / len(rows)
        assert found[depth] == pytest.approx([share if rank == depth else 0 for rank in range(4)])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "T=1"])
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_search_measures_on_the_other_prompts(tiny_target: Target, kind: str, sampling: Sampling) -> None:
    torch.manual_seed(0)
    head = KINDS[kind].create(tiny_target, KINDS[kind].Options(), None, 3, torch.arange(128)).eval()
    proposer, rest, found = settle(tiny_target, head, parse_or_search("search:6,k=4,depth=4"), prompts(), 8, sampling)
    assert found
    result = measure(tiny_target, proposer, rest, 8, sampling)
    assert result["prompts"] == 3 and found["prompts"] == 1
    table = found["accuracy"]
    assert len(table) == (4 if kind == "eagle3" else 3) and {len(row) for row in table} == {4}
    again = parse(json.dumps(result["draft"]["paths"]))
    assert isinstance(again, Shape) and (again.parents, again.ranks) == (search(table, 6).parents, search(table, 6).ranks)
    assert found["expected_tau"] >= 1 and result["draft"]["name"] == "search:6"
    other = measure(tiny_target, HeadProposer(head, again), prompts()[1:], 8, sampling)
    if sampling.greedy:
        assert other["tau"] == result["tau"] and other["accepted_per_position"] == result["accepted_per_position"]


def test_one_prompt_is_too_few(tiny_target: Target) -> None:
    head = KINDS["medusa"].create(tiny_target, KINDS["medusa"].Options(), None, 3, torch.arange(128)).eval()
    with pytest.raises(UserError, match="search:6,k=10,depth=8 needs two prompts"):
        settle(tiny_target, head, parse_or_search("search:6"), prompts(1), 8)
