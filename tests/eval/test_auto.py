"""The choice of a form: on given costs, by what decoding with it really accepts, and end to end."""

import itertools

import numpy as np
import pytest
import torch
from scripted import ScriptedHead
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval import auto
from draftsmith.eval.auto import PLAIN, SIZES, Candidate, Costs, choose, dynamic, measured, settle_pace, static, verdict
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.search import Place, search, shares, walk
from draftsmith.eval.settle import settle
from draftsmith.eval.tree import NONE, Auto, Paced, parse, parse_or_search
from draftsmith.eval.verifier import Request, decode
from draftsmith.heads.base import DraftHead, Shape
from draftsmith.heads.growing import Dynamic
from draftsmith.heads.kinds import KINDS
from draftsmith.sampling import GREEDY, Sampling
from draftsmith.target import Target

# -- the choice, on given costs --------------------------------------------------------------------------------


def texts(depths: int = 6, places: int = 600, first: float = 0.5, second: float = 0.15) -> list[list[Place]]:
    """A head whose first choice is right with one chance at every depth, and whose second with another."""
    drawn = np.random.default_rng(0).random((places, depths))
    ranks = np.where(drawn < first, 0, np.where(drawn < first + second, 1, np.where(drawn < first + second + 0.1, 2, -1)))
    return [[Place(tuple(row)) for row in ranks.tolist()]]


def costs(verify: float, begin: float = 0.01, level: float = 0.01, most: int = 64) -> Costs:
    """A token's pass takes one second and every further token ``verify`` more."""
    return Costs(100, 1, {1: 1.0, most + 1: 1 + verify * most}, begin, {1: level, 10: level})


def chosen(given: Costs, most: int = 64, **head: float) -> Candidate:
    walked = texts(**head)  # type: ignore[arg-type]
    known = shares([place for text in walked for place in text], 6, 3)
    return choose(list(static(walked, known, most)), given)[0]


def test_where_tokens_are_free_the_largest_tree_wins() -> None:
    best = chosen(costs(0.0, 0.0, 0.0))
    assert best.form.kind == "tree" and best.form.nodes == 64
    assert chosen(costs(0.0, 0.0, 0.0), most=16).form.nodes == 16


def test_where_every_token_costs_a_short_chain_wins() -> None:
    best = chosen(costs(0.25))
    assert best.form.kind == "chain" and best.form.length in (1, 2)
    longer = chosen(costs(0.1), first=0.8, second=0.01)
    assert longer.form.kind == "chain" and longer.form.length > best.form.length


@pytest.mark.parametrize("given", [costs(0.7), costs(0.0, begin=5.0), costs(0.49)], ids=["target", "head", "hardly"])
def test_where_nothing_pays_nothing_is_drafted(given: Costs) -> None:
    best, table = choose(list(static(texts(), [[0.5, 0.15, 0.1]] * 6, 64)), given)
    assert best is PLAIN and best.form is NONE and best.speedup(given) == 1
    assert "no draft pays" in verdict(best, table, given) and table[0]["form"] in ("none", "chain:1")


def test_a_costly_level_makes_the_tree_shallow_and_wide() -> None:
    cheap, dear = chosen(costs(0.005)), chosen(costs(0.005, level=0.4))
    assert dear.form.length < cheap.form.length and dear.form.kind == "tree"


def test_the_choice_is_the_best() -> None:
    given, walked = costs(0.05), texts()
    tried = list(static(walked, [[0.5, 0.15, 0.1]] * 6, 64))
    best, table = choose(tried, given)
    assert best.speedup(given) == max(each.speedup(given) for each in tried)
    assert choose(tried[::-1], given)[0].speedup(given) == best.speedup(given)
    speeds = [row["speedup"] for row in table]
    assert speeds == sorted(speeds, reverse=True) and {row["form"] for row in table} >= {"none", "chain:1", best.form.name}
    assert best.form.name in verdict(best, table, given)


def test_what_a_pass_costs_by_hand() -> None:
    given = Costs(100, 2, {1: 1.0, 5: 2.0, 9: 2.0}, 0.1, {1: 0.2, 11: 0.4})
    assert given.seconds(0, {}) == 1
    assert given.seconds(2, {}) == pytest.approx(1.5 + 0.1)
    assert given.seconds(8, {1: 3, 6: 0.5}) == pytest.approx(2.0 + 0.1 + 3 * 0.2 + 0.5 * 0.3)


# -- playing through, against decoding -------------------------------------------------------------------------


class Guessing(ScriptedHead):
    """Puts the text's next token on a rank that follows from what was read, and says with what confidence."""

    def __init__(self, known: list[list[int]]) -> None:
        super().__init__(128, torch.arange(128), taps=[1])
        self.known = known

    def logits(self, committed: list[int], path: list[int]) -> Tensor:
        read = [*committed, *path]
        mixed = torch.Generator().manual_seed(hash(tuple(read)) % 2**31)
        row = torch.randn(128, generator=mixed) * 2
        text = next(text for text in self.known if text[: len(committed)] == committed)
        if text[: len(read)] == read and len(read) < len(text):
            best = row.topk(6).indices
            rank = int(torch.multinomial(torch.tensor([0.5, 0.2, 0.1, 0.05, 0.05, 0.1]), 1, generator=mixed))
            right = text[len(read)]
            row[[int(best[rank]), right]] = row[[right, int(best[rank])]]
        return row


NEW = 30
QUESTIONS = ["What is it?", "Count to three.", "Why", "Say x"]


@pytest.fixture(scope="module")
def walked(lively_target: Target, tiny_target: Target) -> tuple[Target, Guessing, list[list[int]], list[list[Place]]]:
    """The lively target, a head that guesses its texts, the prompts' ids and the walk along what the target writes."""
    target = Target(lively_target.model, tiny_target.tokenizer, "lively")
    target.eos_ids = frozenset()
    asked = [Prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    ids = [prompt.ids(target) for prompt in asked]
    plain = decode(target, None, [Request(own, NEW + 8) for own in ids]).generations
    head = Guessing([[*own[1:], *out.tokens] for own, out in zip(ids, plain, strict=True)])
    found = walk(target, head, asked, 5, 4, NEW, form=Dynamic(32, 4, 5))
    return target, head, ids, found


STATIC = ["chain:1", "chain:3", "chain:5", "tree:3x2x1", "tree:4x1x1x1"]


@pytest.mark.parametrize("form", STATIC)
def test_a_static_form_accepts_what_was_played_through(walked: tuple, form: str) -> None:
    target, head, ids, found = walked
    shape = parse(form)
    assert isinstance(shape, Shape)
    paths = {tuple(path) for path in shape.paths}
    for own, places in zip(ids, found, strict=True):
        (out,) = decode(target, HeadProposer(head, shape), [Request(own, NEW)]).generations
        follows(out.accepted, [auto.along(place.ranks, paths) for place in places], [len(place.ranks) for place in places])


@pytest.mark.parametrize(("size", "length"), list(itertools.product([2, 6, 12, 32], [1, 3, 5])))
def test_a_dynamic_tree_accepts_what_was_played_through(walked: tuple, size: int, length: int) -> None:
    target, head, ids, found = walked
    for own, places in zip(ids, found, strict=True):
        head.read.clear()
        (out,) = decode(target, HeadProposer(head, Dynamic(size, 4, length)), [Request(own, NEW)]).generations
        played = [auto.kept(place.grown, size, length) for place in places]
        visited = follows(out.accepted, [accepted for accepted, _ in played], [len(place.ranks) for place in places])
        read = [width for at in visited for width in auto.widths(places[at].grown, size, 4)[: length - 1] if width]
        assert head.read[: len(read)] == read
        assert all(nodes == min(size, sum(4 ** min(d, 2) for d in range(1, length + 1))) for _, nodes in played if length < 3)


def follows(accepted: list[int], played: list[int], whole: list[int]) -> list[int]:
    """Assert that a decoding accepted what was played through, as long as the text goes on; returns the places it visited."""
    at, visited = 0, []
    for count in accepted:
        if at >= len(played) or whole[at] < 5:
            break
        assert played[at] == count
        visited.append(at)
        at += 1 + count
    assert len(visited) >= 4
    return visited


def test_tokens_per_pass_by_hand() -> None:
    assert auto.through([[2, 0, 0, 1, 0]]) == 5 / 2  # from place 0 to 3, and behind the text
    assert auto.through([[0, 0], [1, 5]]) == 4 / 3
    assert auto.through([]) == auto.through([[]]) == 1


def test_every_size_and_depth_is_a_candidate(walked: tuple) -> None:
    found = walked[3]
    dynamics = list(dynamic(found, Auto(32, 4, 5)))
    assert {(each.form.nodes, each.form.length) for each in dynamics} == set(
        itertools.product([size for size in SIZES if size <= 32], range(1, 6))
    )
    known = shares([place for text in found for place in text], 5, 4)
    statics = list(static(found, known, 12))
    assert {each.form.name for each in statics} >= {f"chain:{n}" for n in range(1, 6)}
    assert max(each.form.nodes for each in statics) == 12
    assert {search(known, 12)} <= {each.form for each in statics}
    growing = [each.tau for each in dynamics if each.form.length == 5]
    assert growing == sorted(growing) or max(growing) == growing[-1]


# -- the measurement, and all of it ----------------------------------------------------------------------------


def prompts(count: int = 4) -> list[Prompt]:
    return [Prompt([{"role": "user", "content": text}]) for text in QUESTIONS[:count]]


def random_head(target: Target, kind: str) -> DraftHead:
    torch.manual_seed(0)
    return KINDS[kind].create(target, KINDS[kind].Options(), None, 3, torch.arange(128)).eval()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "draft_model"])
def test_every_cost_is_measured(tiny_target: Target, kind: str, batch: int) -> None:
    found = measured(tiny_target, random_head(tiny_target, kind), prompts(), 8, 17, 3, 4, batch)
    assert set(found.verify) == {*range(1, 10), 13, 17} and min(found.verify.values()) > 0
    assert list(found.verify.values()) == sorted(found.verify.values())
    assert found.begin > 0 and set(found.level) == {1, 4} and min(found.level.values()) >= 0
    assert found.batch == batch and 10 < found.context < 64


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)], ids=["greedy", "T=1"])
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_form_is_chosen_on_the_first_quarter(
    tiny_target: Target, capsys: pytest.CaptureFixture, kind: str, sampling: Sampling
) -> None:
    head = random_head(tiny_target, kind)
    proposer, rest, found = settle(tiny_target, head, parse_or_search("auto:6,k=3,depth=4"), prompts(), 8, sampling)
    assert [prompt.messages for prompt in rest] == [prompt.messages for prompt in prompts()[1:]]
    assert found and found["prompts"] == 1 and found["expected_tau"] >= 1
    assert found["verdict"] in capsys.readouterr().err
    assert proposer.length <= (3 if kind == "medusa" else 4)
    asked = [Request(prompt.ids(tiny_target), 8, torch.Generator().manual_seed(0)) for prompt in rest]
    again = [Request(prompt.ids(tiny_target), 8, torch.Generator().manual_seed(0)) for prompt in rest]
    with_it, plain = (decode(tiny_target, each, own, sampling) for each, own in ((proposer, asked), (None, again)))
    assert [own.tokens for own in with_it.generations] == [own.tokens for own in plain.generations]


def test_drawn_drafts_are_no_dynamic_trees(tiny_target: Target) -> None:
    head = random_head(tiny_target, "eagle3")
    *_, found = settle(tiny_target, head, Auto(6, 3, 3), prompts(), 8, Sampling(1.0), drawn=True)
    assert found and {row["form"].split(":")[0] for row in found["candidates"]} <= {"none", "chain", "search"}


def test_an_adaptive_chain_gets_its_costs(tiny_target: Target) -> None:
    found = settle_pace(tiny_target, random_head(tiny_target, "eagle3"), prompts(), Paced(4), 8)
    assert found.name == "chain:4,adapt" and len(found.costs) == 5
    assert found.costs[0] == 1 and min(found.costs) > 0
    with pytest.raises(UserError, match="deeper than this medusa head's 3 depths"):
        settle(tiny_target, random_head(tiny_target, "medusa"), Paced(4), prompts(), 8)
    given = Paced(2, (1.0, 1.5, 2.0))
    assert settle_pace(tiny_target, random_head(tiny_target, "eagle3"), prompts(), given, 8) is given


def test_one_prompt_is_too_few(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="auto:6,k=10,depth=8 needs two prompts"):
        settle(tiny_target, random_head(tiny_target, "medusa"), Auto(6), prompts(1), 8)
