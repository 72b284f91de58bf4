"""The losses by hand, what a depth is taught, and what training reports."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from draftsmith.data.features import FeatureBatch
from draftsmith.heads.base import Depth, DraftHead
from draftsmith.heads.kinds import KINDS
from draftsmith.target import Target
from draftsmith.train.calibration import BINS
from draftsmith.train.metrics import DepthSums
from draftsmith.train.objectives import LOSSES, Look, Objective, ce, kl, lk
from draftsmith.train.step import judged

P = torch.tensor([[0.5, 0.2, 0.1]])  # the target's row on a draft vocabulary of three: 0.2 of its mass lies outside
Q = torch.tensor([[0.6, 0.3, 0.1]])
NO_LABEL = torch.tensor([-1])


def look(logits: Tensor, p: Tensor, labels: Tensor) -> Look:
    return Look(logits, p, labels, labels, torch.arange(len(logits)))


def test_kl_by_hand() -> None:
    inside = [0.625, 0.25, 0.125]
    expected = sum(a * math.log(a / b) for a, b in zip(inside, [0.6, 0.3, 0.1], strict=True))
    assert float(kl(look(Q.log() + 5, P, NO_LABEL))) == pytest.approx(expected, abs=1e-6)
    assert float(kl(look(torch.tensor([inside]).log(), P, NO_LABEL))) == pytest.approx(0, abs=1e-6)


def test_lk_by_hand() -> None:
    alpha = 0.5 + 0.2 + 0.1  # min(p, q) with p's full mass: what lies outside the draft vocabulary is lost
    weight = math.exp(-3 * alpha)
    expected = weight * float(kl(look(Q.log(), P, NO_LABEL))) + (1 - weight) * (1 - alpha)
    assert float(lk(look(Q.log(), P, NO_LABEL))) == pytest.approx(expected, abs=1e-6)
    assert float(lk(look((P / P.sum()).log(), P, NO_LABEL))) == pytest.approx((1 - weight) * 0.2, abs=1e-6)


def test_ce_by_hand() -> None:
    losses = ce(look(Q.log().expand(3, -1), P, torch.tensor([1, 2, -1])))
    assert losses.tolist() == pytest.approx([-math.log(0.3), -math.log(0.1), 0], abs=1e-6)


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), logits)[0]


def test_the_gradient_of_kl_is_the_soft_cross_entropys() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 9, generator=generator, requires_grad=True)
    p = torch.rand(5, 9, generator=generator)
    p = p / p.sum(-1, keepdim=True) * 0.7
    soft = -(p / p.sum(-1, keepdim=True) * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(gradient(kl(look(logits, p, NO_LABEL)), logits), gradient(soft, logits))


def test_the_weight_of_lk_has_no_gradient() -> None:
    logits = torch.tensor([[0.55, 0.3, 0.15]]).log().requires_grad_()  # q above p everywhere
    alpha = torch.minimum(P, logits.softmax(-1)).sum(-1)
    weight = math.exp(-3 * 0.8)
    expected = weight * gradient(kl(look(logits, P, NO_LABEL)), logits) - (1 - weight) * gradient(alpha, logits)
    torch.testing.assert_close(gradient(lk(look(logits, P, NO_LABEL)), logits), expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_survive_a_teacher_that_is_sure_or_elsewhere(loss: str) -> None:
    """A one-hot row, a row with no mass in the draft vocabulary, logits far apart, and no rows at all."""
    p = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    logits = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [500.0, -500.0, -500.0]], requires_grad=True)
    value = LOSSES[loss](look(logits, p, torch.tensor([0, -1, 2])))
    assert value.shape == (3,) and value.isfinite().all() and gradient(value, logits).isfinite().all()
    none = LOSSES[loss](look(logits[:0], p[:0], torch.zeros(0, dtype=torch.long)))
    assert none.shape == (0,) and gradient(none, logits).eq(0).all()


# -- one step --------------------------------------------------------------------------------------------------

TARGET_IDS = torch.arange(1, 128, 2)


@pytest.fixture
def step_parts(tiny_target: Target) -> tuple[DraftHead, FeatureBatch]:
    torch.manual_seed(0)
    head = KINDS["medusa"].create(tiny_target, KINDS["medusa"].Options(), None, 3, TARGET_IDS)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    ids = torch.randint(3, 111, (2, 12))
    mask = torch.rand(2, 12) < 0.8
    return head, FeatureBatch(ids, mask, tiny_target.features(ids, []), None, ids.numel())


def lesson(head: DraftHead, batch: FeatureBatch, target: Target, loss: str = "kl") -> tuple[Tensor, DepthSums]:
    """The loss summed over the rows of all depths, and the sums."""
    rows = head.taught(batch.ids, batch.mask, 0)
    return judged(head, batch, target, Objective(loss, depth_decay=1.0), rows, torch.ones(len(rows)))


def test_every_depth_is_taught_by_the_targets_row_at_its_own_position(
    tiny_target: Target, step_parts: tuple[DraftHead, FeatureBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Depth i of row t learns from the target's distribution at t + 1 + i, and from the data's token at t + 2 + i."""
    head, batch = step_parts
    seen: list[Look] = []

    def spy(look: Look) -> Tensor:
        seen.append(look)
        return look.logits.sum(-1)

    monkeypatch.setitem(LOSSES, "spy", spy)
    lesson(head, batch, tiny_target, "spy")
    target_rows = tiny_target.model(batch.ids).logits.softmax(-1)
    depths = head.predict(batch.ids, head.taught(batch.ids, batch.mask, 0), batch.features, tiny_target)
    for i, (depth, look) in enumerate(zip(depths, seen, strict=True)):
        torch.testing.assert_close(look.logits, depth.logits)
        assert look.logits.dtype == look.p.dtype == torch.float32
        assert len(depth.rows) > 3
        for row, (place, label) in enumerate(zip(depth.rows.tolist(), look.labels.tolist(), strict=True)):
            b, t = divmod(place, 12)
            torch.testing.assert_close(look.p[row], target_rows[b, t + 1 + i, TARGET_IDS])
            token = int(batch.ids[b, t + 2 + i])
            assert label == (token // 2 if token % 2 else -1)


def test_the_sums_count_jointly_and_misses_outside_the_vocabulary(
    tiny_target: Target, step_parts: tuple[DraftHead, FeatureBatch]
) -> None:
    head, batch = step_parts
    loss, sums = lesson(head, batch, tiny_target)
    best = tiny_target.model(batch.ids).logits.argmax(-1).flatten()
    right: list[set[int]] = []
    depths = head.predict(batch.ids, head.taught(batch.ids, batch.mask, 0), batch.features, tiny_target)
    for i, depth in enumerate(depths):
        drafts = TARGET_IDS[depth.logits.argmax(-1)]
        right.append({int(r) for r, d in zip(depth.rows, drafts, strict=True) if d == best[r + 1 + i]})
    assert sums.right.tolist() == [len(own) for own in right]
    assert sums.prefix.tolist() == [len(right[0]), len(right[0] & right[1]), len(right[0] & right[1] & right[2])]
    assert sums.rows.tolist() == [len(depth.rows) for depth in depths]
    torch.testing.assert_close(sums.loss.sum().float() / 3, loss)


def scripted(target: Target, drafts: list[list[int]], target_ids: Tensor) -> DraftHead:
    """A head whose drafts are written down: [depths][rows] target ids at rows 0, 1, …"""
    head: Any = KINDS["medusa"].create(target, KINDS["medusa"].Options(), None, len(drafts), target_ids)
    head.predict = lambda *_: [
        Depth(torch.arange(len(row)), one_hot(torch.tensor(row), 128).float()[:, target_ids], lambda states: states, 1 + i)
        for i, row in enumerate(drafts)
    ]
    return head


def test_tau_sim_is_joint_and_never_a_product(tiny_target: Target) -> None:
    """Four rows, two depths, each right half of the time: never together 1.5, always together 2, as a product 1.75."""
    ids = torch.randint(3, 111, (1, 12), generator=torch.Generator().manual_seed(0))
    batch = FeatureBatch(ids, torch.ones(1, 12, dtype=torch.bool), tiny_target.features(ids, []), None, ids.numel())
    best = tiny_target.model(ids).logits.argmax(-1)[0].tolist()
    first = [best[1], best[2], 0, 0]
    apart, together = [0, 0, best[4], best[5]], [best[2], best[3], 0, 0]
    assert 0 not in best
    for second, tau in ((apart, 1.5), (together, 2.0)):
        _, sums = lesson(scripted(tiny_target, [first, second], torch.arange(128)), batch, tiny_target)
        report = sums.report(torch.ones(2) / 2)
        assert report["accuracy_0"] == report["accuracy_1"] == 0.5
        assert report["tau_sim"] == pytest.approx(tau)


def test_a_teachers_token_outside_the_draft_vocabulary_is_a_miss(tiny_target: Target) -> None:
    ids = torch.randint(3, 111, (1, 12), generator=torch.Generator().manual_seed(0))
    batch = FeatureBatch(ids, torch.ones(1, 12, dtype=torch.bool), tiny_target.features(ids, []), None, ids.numel())
    best = tiny_target.model(ids).logits.argmax(-1)[0].tolist()
    without = torch.tensor([i for i in range(128) if i != best[1]])
    _, sums = lesson(scripted(tiny_target, [[best[1], best[2]]], without), batch, tiny_target)
    assert sums.rows.tolist() == [2] and sums.right.tolist() == [float(best[2] != best[1])]


# -- the report ------------------------------------------------------------------------------------------------


def test_the_report_by_hand() -> None:
    sums = DepthSums.zeros(2, torch.device("cpu"))
    batches = (([4, 3], [3, 1], [3, 1], [2, 1], [4, 2]), ([2, 1], [1, 2], [1, 0], [3, 0], [4, 2]))
    for parts in batches:  # loss, right, prefix, overlap, rows
        own: list[Any] = [torch.tensor(part, dtype=torch.float64) for part in parts]
        sums.add(DepthSums(*own, *[torch.zeros(2, BINS, 3), torch.tensor([[3.0, 2.0]])]))
    report = sums.report(torch.tensor([1.0, 0.5]) / 1.5)
    assert report == {
        "loss": pytest.approx((6 / 8 + 0.5 * 4 / 4) / 1.5), "accuracy_0": 0.5, "accuracy_1": 0.75,
        "overlap_0": 5 / 8, "overlap_1": 1 / 4, "side_0": 1.5,
        "tau_sim": pytest.approx(1 + 4 / 8 + 1 / 4),
    }  # fmt: skip


def test_a_report_of_nothing_is_finite() -> None:
    report = DepthSums.zeros(2, torch.device("cpu")).report(torch.ones(2) / 2)
    assert report == {"loss": 0, "accuracy_0": 0, "accuracy_1": 0, "overlap_0": 0, "overlap_1": 0, "tau_sim": 1}
