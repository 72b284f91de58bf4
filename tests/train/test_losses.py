"""Every loss against its formula written out in float64, its gradient, and what must hold between losses."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.data.features import FeatureBatch
from draftsmith.heads.kinds import KINDS
from draftsmith.recipes import schema
from draftsmith.target import Target
from draftsmith.train.objectives import LOSSES, Look, Objective
from draftsmith.train.step import judged

TOP = 3


def rows(inside: float, seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Six rows over nine draft tokens: logits, p (``inside`` of its mass in the draft vocabulary), labels and best."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 9, generator=generator) * spread
    p = (torch.randn(6, 9, generator=generator) * spread).softmax(-1) * inside
    return logits, p, torch.tensor([0, 3, -1, 8, 2, 2]), torch.tensor([5, -1, 1, 0, 2, 7])


def look(logits: Tensor, p: Tensor, labels: Tensor, best: Tensor) -> Look:
    return Look(logits, p, labels, best, torch.arange(len(logits)))


def overlap(p: Tensor, q: Tensor) -> Tensor:
    return sum((min(a, b) for a, b in zip(p, q, strict=True)), start=q.sum() * 0)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return sum((a * (a / b).log() for a, b in zip(p, q, strict=True)), start=torch.zeros(()))


def lk(p: Tensor, q: Tensor, eta: float = 3.0) -> Tensor:
    weight = math.exp(-eta * float(overlap(p, q).detach()))
    return weight * kl(p / p.sum(), q) + (1 - weight) * (1 - overlap(p, q))


def kl_top(p: Tensor, q: Tensor) -> Tensor:
    top = p.argsort(descending=True)[:TOP]
    share = p[top].sum() / p.sum()
    return share * kl(p[top] / p[top].sum(), q[top])


def js(p: Tensor, q: Tensor) -> Tensor:
    middle = (p / p.sum() + q) / 2
    return (kl(p / p.sum(), middle) + kl(q, middle)) / 2


def hard(q: Tensor, token: int) -> Tensor:
    return -q[token].log() if token >= 0 else q.sum() * 0


FORMULAS: dict[str, Callable[[Tensor, Tensor, int, int], Tensor]] = {
    "kl": lambda p, q, label, best: kl(p / p.sum(), q),
    "kl_top": lambda p, q, label, best: kl_top(p, q),
    "rkl": lambda p, q, label, best: kl(q, p / p.sum()),
    "js": lambda p, q, label, best: js(p, q),
    "tv": lambda p, q, label, best: 1 - overlap(p, q),
    "l1": lambda p, q, label, best: (p - q).abs().sum() + (1 - p.sum()),  # what lies outside differs from q by its whole mass
    "nla": lambda p, q, label, best: -overlap(p, q).log(),
    "lk": lambda p, q, label, best: lk(p, q),
    "ce": lambda p, q, label, best: hard(q, label),
    "ce_best": lambda p, q, label, best: hard(q, best),
    "dspark": lambda p, q, label, best: 0.1 * hard(q, label) + 0.9 * ((p - q).abs().sum() + 1 - p.sum()),
    "e2e_tv": lambda p, q, label, best: 1 - overlap(p, q),  # of one depth
}


@pytest.mark.parametrize("inside", [1.0, 0.7, 1e-3])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_its_formula_and_so_is_its_gradient(loss: str, inside: float) -> None:
    logits, p, labels, best = rows(inside)
    logits.requires_grad_()
    exact = logits.detach().double().requires_grad_()
    ours = LOSSES[loss](look(logits, p, labels, best), **({"top_k": TOP} if loss == "kl_top" else {}))
    q = exact.softmax(-1)
    theirs = torch.stack([FORMULAS[loss](p[i].double(), q[i], int(labels[i]), int(best[i])) for i in range(len(p))])
    torch.testing.assert_close(ours.double(), theirs, atol=2e-6, rtol=1e-5)
    ours.sum().backward()
    theirs.sum().backward()
    assert logits.grad is not None and exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=2e-6, rtol=1e-4)


def test_a_recipe_knows_exactly_these_losses() -> None:
    assert tuple(LOSSES) == schema.LOSSES


@pytest.mark.parametrize("loss", ["kl", "rkl", "js", "tv", "l1", "nla", "lk", "kl_top", "e2e_tv"])
def test_the_targets_own_row_costs_nothing(loss: str) -> None:
    _, p, labels, best = rows(1.0)
    assert LOSSES[loss](look(p.log(), p, labels, best)).abs().max() < 1e-6


@pytest.mark.parametrize("loss", ["tv", "nla", "lk", "l1", "e2e_tv"])
def test_acceptance_counts_what_the_draft_vocabulary_lacks_as_lost(loss: str) -> None:
    """The best head of a vocabulary that holds 0.7 of p still has 0.3 of its drafts rejected."""
    _, p, labels, best = rows(0.7)
    lost = {"tv": 0.3, "e2e_tv": 0.3, "l1": 0.6, "nla": -math.log(0.7), "lk": (1 - math.exp(-3 * 0.7)) * 0.3}
    costs = LOSSES[loss](look((p / 0.7).log(), p, labels, best))
    assert costs.tolist() == pytest.approx([lost[loss]] * 6, abs=1e-5)


def test_the_top_of_the_whole_vocabulary_is_kl() -> None:
    parts = look(*rows(0.6))
    for k in (9, 100):
        torch.testing.assert_close(LOSSES["kl_top"](parts, top_k=k), LOSSES["kl"](parts))


def test_the_top_alone_is_learned() -> None:
    """HASS: gradients are softmax times the top's mass, minus p on the top tokens: nothing else of p has a say."""
    logits, p, labels, best = rows(1.0)
    logits.requires_grad_()
    LOSSES["kl_top"](look(logits, p, labels, best), top_k=TOP).sum().backward()
    top = torch.zeros_like(p).scatter(-1, p.topk(TOP).indices, p.topk(TOP).values)
    torch.testing.assert_close(logits.grad, logits.softmax(-1) * top.sum(-1, keepdim=True) - top)


def test_a_sure_teacher_makes_cross_entropy_of_kl_and_of_nla() -> None:
    logits, _, _, best = rows(1.0)
    sure = torch.nn.functional.one_hot(best.clamp_min(0), 9).float()
    parts = look(logits, sure, best, best.clamp_min(0))
    for loss in ("kl", "nla"):
        torch.testing.assert_close(LOSSES[loss](parts), LOSSES["ce_best"](parts))


@pytest.mark.parametrize(("loss", "trains"), [("tv", False), ("nla", True), ("kl", True), ("lk", True)])
def test_what_trains_from_cold(loss: str, trains: bool) -> None:
    """q has all its mass where p has none: total variation's gradient vanishes, the others' does not."""
    logits = torch.tensor([[30.0, 0.0, 0.0]], requires_grad=True)
    one = torch.tensor([1])
    LOSSES[loss](look(logits, torch.tensor([[0.0, 1.0, 0.0]]), one, one)).sum().backward()
    assert logits.grad is not None and (float(logits.grad[0, 1]) < -0.1) == trains


def test_eta_moves_lk_from_kl_to_tv() -> None:
    parts = look(*rows(1.0))
    torch.testing.assert_close(LOSSES["lk"](parts, eta=0.0), LOSSES["kl"](parts))
    torch.testing.assert_close(LOSSES["lk"](parts, eta=1e4), LOSSES["tv"](parts))


# -- as a recipe names them ------------------------------------------------------------------------------------------


def test_a_mix_is_the_weighted_sum_and_dspark_is_one() -> None:
    parts = look(*rows(0.7))
    (mixed,) = Objective({"kl": 0.5, "ce": 2.0}).costs([parts], 6)
    torch.testing.assert_close(mixed, 0.5 * LOSSES["kl"](parts) + 2 * LOSSES["ce"](parts))
    (mixed,) = Objective({"ce": 0.1, "l1": 0.9}).costs([parts], 6)
    torch.testing.assert_close(mixed, LOSSES["dspark"](parts))


def test_the_options_reach_their_losses() -> None:
    parts = look(*rows(0.7))
    for objective, expected in (
        (Objective("lk", eta=10.0), LOSSES["lk"](parts, eta=10.0)),
        (Objective("lk"), LOSSES["lk"](parts, eta=3.0)),
        (Objective({"kl_top": 1.0}, top_k=2), LOSSES["kl_top"](parts, top_k=2)),
    ):
        assert torch.equal(objective.costs([parts], 6)[0], expected)


@pytest.mark.parametrize("loss", ["lk", "ce"])
def test_the_temperature_divides_both_logits_in_loss_and_overlap(tiny_target: Target, loss: str) -> None:
    """At temperature T everything is as if the target and the head had logits T times smaller."""
    torch.manual_seed(0)
    head: Any = KINDS["medusa"].create(tiny_target, KINDS["medusa"].Options(), None, 2, torch.arange(1, 128, 2))
    ids = torch.randint(3, 111, (2, 12))
    batch = FeatureBatch(ids, torch.ones(2, 12, dtype=torch.bool), tiny_target.features(ids, []), None, ids.numel())
    taught = head.taught(batch.ids, batch.mask, 0)
    _, sums = judged(head, batch, tiny_target, Objective(loss, temperature=0.25), taught)
    for i, depth in enumerate(head.predict(ids, taught, batch.features, tiny_target)):
        p = (tiny_target.model(ids).logits.flatten(0, 1)[depth.rows + 1 + i] * 4).softmax(-1)[:, head.target_ids]
        q = (depth.logits * 4).softmax(-1)
        labels = ids.flatten()[depth.rows + 2 + i]
        cost = {
            "lk": sum(float(lk(a, b).detach()) for a, b in zip(p, q, strict=True)),
            "ce": -float(q.log()[labels % 2 == 1, labels[labels % 2 == 1] // 2].sum().detach()),
        }
        assert float(sums.overlap[i]) == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-5)
        assert float(sums.loss[i]) == pytest.approx(cost[loss], rel=1e-5)
