"""Losses taken a piece of the rows at a time are those of all rows at once, and never more than a piece is in memory."""

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.data.features import FeatureBatch
from draftsmith.heads.base import Depth, DraftHead, Side
from draftsmith.heads.kinds import KINDS
from draftsmith.target import Target
from draftsmith.train import step
from draftsmith.train.metrics import DepthSums
from draftsmith.train.objectives import LOSSES, WEIGHTS, Objective
from draftsmith.train.step import Judge

DEPTHS, DRAFT = 3, 60
MIX = {"kl": 0.1, "e2e_tv": 1.0}


@pytest.fixture
def head(tiny_target: Target) -> DraftHead:
    """Blocks that train, one lm_head for all depths, and a confidence."""
    torch.manual_seed(0)
    options = KINDS["medusa"].Options.model_validate({"lm_head": "own", "init_lm_head": "random"})
    ids = torch.arange(1, 1 + 2 * DRAFT, 2)
    head: Any = KINDS["medusa"].create(tiny_target, options, None, DEPTHS, ids, confidence=True)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    for lm_head in head.lm_heads:
        lm_head.weight = head.lm_heads[0].weight
    return head


@pytest.fixture
def batch(tiny_target: Target, head: DraftHead) -> FeatureBatch:
    """Three lines, every other token of which is what the head drafts first, so that rows fail at different depths."""
    ids = torch.randint(3, 111, (3, 14), generator=torch.Generator().manual_seed(0))
    everything = torch.ones(3, 14, dtype=torch.bool)
    for t in range(0, 12, 2):
        rows = head.taught(ids, everything, 0)
        first = head.predict(ids, rows, tiny_target.features(ids, []), tiny_target)[0]
        ids[:, t + 2] = head.target_ids[first.logits.argmax(-1)].view(3, 12)[:, t]
    mask = torch.rand(3, 14, generator=torch.Generator().manual_seed(1)) < 0.85
    return FeatureBatch(ids, mask, tiny_target.features(ids, []), None, ids.numel())


def depths_of(head: DraftHead, batch: FeatureBatch, target: Target) -> list[Depth]:
    """The head's own depths, one of them with a cost besides, and a lesson over the target's whole vocabulary."""
    depths = head.predict(batch.ids, head.taught(batch.ids, batch.mask, 0), batch.features, target)
    depths[1].extra = depths[1].states.square().mean(-1)
    first = depths[0]
    side = Depth(first.rows, first.states * 2, target.logits, ahead=0, side=Side(0.5, "kl", whole=True))
    return [*depths, side]


def judge(
    head: DraftHead, batch: FeatureBatch, target: Target, objective: Objective, chunk: int | None
) -> tuple[Tensor, DepthSums, dict[str, Tensor]]:
    """The loss, the sums and the gradients."""
    depths = depths_of(head, batch, target)
    counts = torch.tensor([len(depth.rows) for depth in depths])
    value, sums = Judge(batch, target, objective, counts, chunk)(head, depths)
    named = dict(head.named_parameters())
    return value.detach(), sums, dict(zip(named, torch.autograd.grad(value, list(named.values())), strict=True))


@pytest.mark.parametrize("weights", [None, *WEIGHTS])
@pytest.mark.parametrize("loss", [*LOSSES, MIX], ids=str)
def test_pieces_give_the_loss_and_gradients_of_all_rows_at_once(
    tiny_target: Target, head: DraftHead, batch: FeatureBatch, loss: str | dict[str, float], weights: str | None
) -> None:
    objective = Objective(loss, weights=weights, temperature=0.5)
    whole, whole_sums, whole_slopes = judge(head, batch, tiny_target, objective, 10_000)
    assert whole_sums.rows.min() > 8 and whole_slopes["blocks.1.0.linear.weight"].abs().max() > 0
    for chunk in (1, 3, 7):
        value, sums, slopes = judge(head, batch, tiny_target, objective, chunk)
        torch.testing.assert_close(value, whole, atol=1e-5, rtol=1e-5)
        for name, slope in slopes.items():
            scale = float(whole_slopes[name].abs().max())
            torch.testing.assert_close(slope, whole_slopes[name], atol=1e-5 * scale, rtol=0, msg=f"{chunk} {name}")
        for name in ("right", "prefix", "rows"):
            assert torch.equal(getattr(sums, name), getattr(whole_sums, name)), name
        for name in ("loss", "overlap", "sure", "side"):
            torch.testing.assert_close(getattr(sums, name), getattr(whole_sums, name), atol=1e-4, rtol=1e-5)


def test_a_side_lesson_is_counted_by_itself(tiny_target: Target, head: DraftHead, batch: FeatureBatch) -> None:
    _, sums, _ = judge(head, batch, tiny_target, Objective("ce"), 5)
    lesson = depths_of(head, batch, tiny_target)[-1]
    p = tiny_target.model(batch.ids).logits.flatten(0, 1)[lesson.rows]
    cost = torch.nn.functional.kl_div(lesson.logits.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="sum")
    assert sums.side.tolist() == [[pytest.approx(float(cost), rel=1e-4), len(lesson.rows)]]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_share_without_rows_is_zero_in_every_gradient(
    tiny_target: Target, head: DraftHead, batch: FeatureBatch, loss: str
) -> None:
    """As on a process whose part of the global batch is empty: all its parameters take part, with nothing."""
    batch.mask.zero_()
    for chunk in (None, 3):
        value, sums, slopes = judge(head, batch, tiny_target, Objective(loss, weights="dpace"), chunk)
        assert float(value) == 0 and not sums.rows.any() and not sums.sure.any()
        assert all(slope.eq(0).all() for slope in slopes.values())


def test_two_shares_sum_to_the_whole(tiny_target: Target, head: DraftHead, batch: FeatureBatch) -> None:
    """Divided by the global counts, the shares of two processes add up to one process's loss and gradients."""
    objective = Objective("e2e_tv", weights="until_fail", depth_decay=1.0)
    whole, _, slopes = judge(head, batch, tiny_target, objective, None)
    counts = torch.tensor([len(depth.rows) for depth in depths_of(head, batch, tiny_target)])
    total, named = torch.zeros(()), dict(head.named_parameters())
    for lines in (slice(0, 1), slice(1, 3)):
        features = tiny_target.features(batch.ids[lines], [])
        share = FeatureBatch(batch.ids[lines], batch.mask[lines], features, None, batch.ids[lines].numel())
        total = total + Judge(share, tiny_target, objective, counts)(head, depths_of(head, share, tiny_target))[0]
    torch.testing.assert_close(total, whole, atol=1e-5, rtol=1e-5)
    for name, slope in zip(named, torch.autograd.grad(total, list(named.values())), strict=True):
        torch.testing.assert_close(slope, slopes[name], atol=1e-5, rtol=1e-4)


class Widest(TorchDispatchMode):
    """Records the most rows that any tensor as wide as a vocabulary has, in forward and backward."""

    def __init__(self, widths: set[int], weights: set[torch.Size]) -> None:
        super().__init__()
        self.widths, self.weights, self.rows = widths, weights, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, list | tuple) else (found,):
            wide = isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[-1] in self.widths
            if wide and tensor.shape not in self.weights:  # an lm_head transposed, or its gradient
                self.rows = max(self.rows, tensor.numel() // tensor.shape[-1])
        return found


@pytest.mark.parametrize("loss", LOSSES)
def test_no_more_than_a_piece_is_ever_read_out(tiny_target: Target, head: DraftHead, batch: FeatureBatch, loss: str) -> None:
    rows = len(depths_of(head, batch, tiny_target)[0].rows)
    hidden = tiny_target.hidden_size
    for chunk in (1, 3, 7):
        vocabularies = {DRAFT, tiny_target.vocab_size}
        with Widest(vocabularies, {torch.Size((hidden, size)) for size in vocabularies}) as widest:
            judge(head, batch, tiny_target, Objective(loss), chunk)
        # a piece's rows lie in up to three lines, and in each the teacher's go on DEPTHS behind them
        assert chunk <= widest.rows <= chunk + min(chunk, 3) * DEPTHS < rows


def test_depths_with_one_readout_are_read_out_together(tiny_target: Target, head: DraftHead, batch: FeatureBatch) -> None:
    depths = depths_of(head, batch, tiny_target)
    calls: list[int] = []
    first = depths[0].readout

    def shared(states: Tensor) -> Tensor:
        calls.append(len(states))
        return first(states)

    for depth in depths[:2]:
        depth.readout = shared
    apart = [depth.logits for depth in depths]
    calls.clear()
    together = step.read_out(depths, [depth.states for depth in depths])
    assert calls == [len(depths[0].rows) + len(depths[1].rows)]
    for one, other in zip(apart, together, strict=True):
        torch.testing.assert_close(one, other)


# -- how large a piece is --------------------------------------------------------------------------------------------


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``free(bytes)`` makes this machine, or its GPU, have that much memory left."""

    def set_free(size: float) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=size))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (size, 2 * size))

    yield set_free


def fitting(device: str, vocabulary: int, draft: int, depths: int, sides: int = 0) -> int:
    """The rows of one piece for a head of these sizes; only sizes are asked for."""
    sized: Any = types.SimpleNamespace
    empty = torch.zeros(0)
    found = [Depth(empty, empty, lambda states: states, 1 + i) for i in range(depths)]
    found += [Depth(empty, empty, lambda states: states, 0, side=Side(1.0, whole=True)) for _ in range(sides)]
    batch = sized(ids=sized(device=torch.device(device)))
    judge = Judge(batch, sized(vocab_size=vocabulary), Objective(), torch.ones(depths))
    return judge.fitting(sized(target_ids=range(draft)), found)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("vocabulary", "draft", "depths", "sides"), [(49152, 4096, 3, 0), (128256, 32000, 7, 0), (151936, 151936, 8, 1)]
)
def test_a_piece_takes_its_share_of_the_free_memory(
    free: Any, device: str, vocabulary: int, draft: int, depths: int, sides: int
) -> None:
    seen = []
    for gigabytes in (0.01, 1, 4, 16, 64, 256, 16384):
        free(gigabytes * 2**30)
        rows = fitting(device, vocabulary, draft, depths, sides)
        bytes_of_logits = 4 * rows * (vocabulary + depths * draft + sides * vocabulary)
        assert rows == step.LEAST or bytes_of_logits < gigabytes * 2**30 * step.SHARE
        seen.append(rows)
    assert seen == sorted(seen) and seen[0] == step.LEAST and seen[-1] == step.MOST[device]
    assert all(rows & (rows - 1) == 0 for rows in seen), "a power of two: rounding stays while the memory wavers"


def test_what_torch_keeps_for_reuse_is_free(free: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free(2**30)
    before = fitting("cuda", 128256, 32000, 4)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 24 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 8 * 2**30)
    assert fitting("cuda", 128256, 32000, 4) > before
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 24 * 2**30)
    assert fitting("cuda", 128256, 32000, 4) == before


def test_deeper_and_wider_heads_get_smaller_pieces(free: Any) -> None:
    free(80 * 2**30)
    base = fitting("cuda", 128256, 32000, 4)
    assert base > fitting("cuda", 128256, 128256, 4) > fitting("cuda", 128256, 128256, 16)
    assert base > fitting("cuda", 128256, 32000, 4, sides=2)


def test_a_gapless_teacher_is_read_in_place(head: DraftHead, batch: FeatureBatch, tiny_target: Target) -> None:
    """Its rows are copied only where some are left out."""
    teacher = step.Teacher(batch, tiny_target, head.target_ids, torch.arange(2, 9), 1.0)
    whole, best = teacher.at(torch.arange(3, 7), True)
    assert whole.untyped_storage().data_ptr() == teacher.p.untyped_storage().data_ptr()
    assert torch.equal(whole, teacher.p[1:5]) and torch.equal(best, teacher.best[1:5])
    apart, _ = teacher.at(torch.tensor([3, 6]), True)
    assert torch.equal(apart, teacher.p[[1, 4]])
    assert len(teacher.at(torch.arange(0), True)[0]) == 0


def test_gradients_are_handed_on_without_a_copy() -> None:
    """As large as an lm_head, they would otherwise wait beside the optimizer's step as long as the loss is held."""
    weight, slopes = torch.ones(3, requires_grad=True), [torch.tensor([1.0, 2.0, 3.0])]
    where = slopes[0].data_ptr()
    loss = step.Known.apply(torch.zeros(()), slopes, weight)
    del slopes
    (loss * 2).backward()
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 4.0, 6.0] and weight.grad.data_ptr() == where


def test_memory_grows_with_the_vocabulary_as_recorded() -> None:
    """docs/results/memory.json is within its limit, and the page says its figures."""
    root = Path(__file__).resolve().parents[2]
    found = json.loads((root / "docs" / "results" / "memory.json").read_text())
    page = (root / "docs" / "objectives.md").read_text()
    growth = found["growth"]
    assert found["within"] and growth["ratio"] < found["limit"] == 1.3
    assert growth["peak_MB"] == found["pieces"][-1]["peak_MB"] - found["pieces"][0]["peak_MB"]
    all_rows = found["all"][-1]["peak_MB"] - found["all"][0]["peak_MB"]
    for said in (growth["peak_MB"], growth["chunk_free_MB"], all_rows):
        assert f"{said / 1e3:.2f} GB" in page
    assert f"{growth['ratio']:.2f} times" in page
