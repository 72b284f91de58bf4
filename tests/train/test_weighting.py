"""How much depths and rows weigh: every rule against the same rule written row by row."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.recipes.schema import load_recipe
from draftsmith.train import objectives
from draftsmith.train.objectives import LOSSES, WEIGHTS, Look, Objective, link

DEPTHS, PLACES, WORDS = 4, 6, 5
ENDS = [4, 2, 4, 3, 1, 4]  # how many depths the row at each place has


@pytest.fixture
def looks() -> list[Look]:
    """Four depths of six rows, some of which end early; labels outside the draft vocabulary among them."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for i in range(DEPTHS):
        place = torch.tensor([t for t, end in enumerate(ENDS) if end > i])
        logits = torch.randn(len(place), WORDS, generator=generator, requires_grad=True)
        p = torch.randn(len(place), WORDS, generator=generator).mul(2).softmax(-1) * 0.8
        labels = torch.randint(-1, WORDS, (len(place),), generator=generator)
        labels[0] = logits[0].argmax()  # at least one row that goes on
        found.append(Look(logits, p, labels, labels, place))
    link(found, PLACES)
    return found


def by_row(looks: list[Look], values: list[Tensor]) -> list[list[float]]:
    """What the depths of each place have, one list a place."""
    found: list[list[float]] = [[] for _ in range(PLACES)]
    for look, own in zip(looks, values, strict=True):
        for place, value in zip(look.place.tolist(), own.tolist(), strict=True):
            found[place].append(value)
    return found


def chance(rows: Tensor, ids: Tensor) -> Tensor:
    return torch.stack([row[i] if i >= 0 else row.sum() * 0 for row, i in zip(rows, ids, strict=True)])


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (0.8, [1, 0.8, 0.64, 0.512]),
        (1.0, [1, 1, 1, 1]),
        ({"gamma": 4.0}, [1, math.exp(-1 / 4), math.exp(-2 / 4), math.exp(-3 / 4)]),
        ({"power": 2.0}, [1, 1 / 4, 1 / 9, 1 / 16]),
    ],
)
def test_depths_weigh_as_the_recipe_says(decay: float | dict[str, float], expected: list[float]) -> None:
    shares = Objective(depth_decay=decay).shares(4).tolist()
    assert shares == pytest.approx([weight / sum(expected) for weight in expected])


def test_dpace_sums_what_comes_through(looks: list[Look]) -> None:
    sure = by_row(looks, [chance(look.logits.softmax(-1), look.labels) for look in looks])
    for row, weights in zip(sure, by_row(looks, WEIGHTS["dpace"](looks, PLACES)), strict=True):
        kept = [math.prod(0.5 * q + 0.5 for q in row[: m + 1]) for m in range(len(row))]
        assert weights == pytest.approx([sum(kept[j:]) for j in range(len(row))], rel=1e-5)


def test_dpace_is_the_gradient_of_the_expected_length(looks: list[Look], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without smoothing, cross-entropies times their weights have the gradient of - sum_m prod_{i <= m} q_i."""
    monkeypatch.setattr(objectives, "SMOOTHING", 0.0)
    for look in looks:
        look.labels = look.labels.clamp_min(0)
    logits = [look.logits for look in looks]
    ours = torch.autograd.grad(torch.cat(Objective("ce", weights="dpace").costs(looks, PLACES)).sum(), logits)
    length = torch.zeros(())
    for t, end in enumerate(ENDS):
        kept = torch.ones(())
        for look in looks[:end]:
            row = look.place.tolist().index(t)
            kept = kept * look.logits[row].softmax(-1)[look.labels[row]]
            length = length + kept
    for mine, theirs in zip(ours, torch.autograd.grad(-length, logits), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_cat_weighs_the_chance_that_the_targets_text_gets_here(looks: list[Look]) -> None:
    p = by_row(looks, [chance(look.p, look.labels) for look in looks])
    for row, weights in zip(p, by_row(looks, WEIGHTS["cat"](looks, PLACES)), strict=True):
        assert weights == pytest.approx([math.prod(row[:j]) for j in range(len(row))])


def test_until_fail_keeps_the_first_failure_and_nothing_behind_it(looks: list[Look]) -> None:
    hits = by_row(looks, [(look.logits.argmax(-1) == look.labels).float() for look in looks])
    found = by_row(looks, WEIGHTS["until_fail"](looks, PLACES))
    assert found == [[float(all(row[:j])) for j in range(len(row))] for row in hits]
    assert {len(row) - sum(row) for row in found} > {0}, "some rows fail early, some do not"


def test_end_to_end_tv_is_the_chance_of_not_getting_past(looks: list[Look]) -> None:
    """AngelSpec: the mean over depths is 1 - (1/g) sum_j prod_{i <= j} alpha_i, gradient included."""
    logits = [look.logits for look in looks]
    costs = Objective("e2e_tv", depth_decay=1.0).costs(looks, PLACES)
    for t, mine in enumerate(by_row(looks, costs)):
        alphas = [
            torch.minimum(look.p, look.logits.softmax(-1)).sum(-1)[look.place.tolist().index(t)] for look in looks[: ENDS[t]]
        ]
        passed = [math.prod(map(float, alphas[: j + 1])) for j in range(len(alphas))]
        assert mine == pytest.approx([1 - chance for chance in passed], abs=1e-6)
    total = torch.zeros(())
    for t in range(PLACES):
        passed = torch.ones(())
        for look in looks[: ENDS[t]]:
            row = look.place.tolist().index(t)
            passed = passed * torch.minimum(look.p[row], look.logits[row].softmax(-1)).sum()
            total = total + 1 - passed
    ours = torch.autograd.grad(torch.cat(costs).sum(), logits)
    for mine, theirs in zip(ours, torch.autograd.grad(total, logits), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_multiply_and_have_no_gradient(looks: list[Look], loss: str, weights: str) -> None:
    logits = [look.logits for look in looks]
    fixed = [weight.clone() for weight in WEIGHTS[weights](looks, PLACES)]
    plain = Objective(loss).costs(looks, PLACES)
    weighted = Objective(loss, weights=weights).costs(looks, PLACES)
    for cost, weight, product in zip(plain, fixed, weighted, strict=True):
        torch.testing.assert_close(product, weight.detach() * cost)
    total = torch.cat([weight.detach() * cost for weight, cost in zip(fixed, plain, strict=True)]).sum()
    expected = torch.autograd.grad(total, logits, retain_graph=True)
    for mine, theirs in zip(torch.autograd.grad(torch.cat(weighted).sum(), logits), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# -- as a recipe names them ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "decay"),
    [
        ("loss=kl", 0.8),
        ("weights=dpace", 1.0),
        ("loss={e2e_tv: 1, ce: 0.1}", 1.0),
        ("depth_decay=0.6", 0.6),
        ("depth_decay={gamma: 4}", {"gamma": 4.0}),
    ],
)
def test_depths_decay_unless_something_else_weighs_them(change: str, decay: float | dict) -> None:
    recipe = load_recipe("demo", [f"objective.{change}"])
    assert recipe.objective.depth_decay == decay
    assert Objective(**recipe.objective.model_dump()).shares(3).sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("loss=hinge", "objective.loss: 'hinge' is no loss; the losses are kl, kl_top,"),
        ("loss={}", "objective.loss: name a loss, or map losses to weights"),
        ("loss=[kl]", "objective.loss: name a loss, or map losses to weights"),
        ("loss={kl: 0}", "objective.loss: the weight of kl must be a number above 0, not 0"),
        ("loss={kl: much}", "objective.loss: the weight of kl must be a number above 0, not 'much'"),
        ("depth_decay=1.5", "objective.depth_decay: write a number above 0 and up to 1, or {gamma: g}"),
        ("depth_decay={gama: 4}", "objective.depth_decay: write a number above 0 and up to 1, or {gamma: g}"),
        ("depth_decay={gamma: -4}", "objective.depth_decay: write a number above 0 and up to 1, or {gamma: g}"),
        ("weights=pace", "objective.weights: Input should be 'dpace', 'cat' or 'until_fail'"),
        ("temperature=0", "objective.temperature: Input should be greater than 0"),
        ("top_k=10", "top_k is read by the loss kl_top alone: name kl_top in objective.loss, or take top_k out"),
        ("weight=cat", "unknown key objective.weight: the nearest right key is objective.weights"),
    ],
)
def test_a_wrong_objective_is_one_plain_sentence(change: str, says: str) -> None:
    with pytest.raises(UserError) as told:
        load_recipe("demo", [f"objective.{change}"])
    assert says in str(told.value) and str(told.value).count("\n") == 0


@pytest.mark.parametrize("change", ["loss=ce", "loss={kl: 1, dspark: 0.5}", "weights=dpace", "weights=until_fail"])
def test_what_asks_for_the_datas_tokens_cannot_learn_from_rollouts(change: str) -> None:
    with pytest.raises(UserError, match="learns from the target's distribution, not (ce|dspark|dpace|until_fail)"):
        load_recipe("demo", [f"objective.{change}", "train.on_policy=0.5"])
    load_recipe("demo", ["objective.loss={kl: 1, ce_best: 0.1}", "objective.weights=cat", "train.on_policy=0.5"])


def test_the_page_names_every_choice() -> None:
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text()
    for name in [*LOSSES, *WEIGHTS, *load_recipe("demo").objective.model_dump()]:
        assert f"`{name}`" in page or f"{name}:" in page, name
