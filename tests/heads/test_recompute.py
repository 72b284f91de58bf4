"""Gradient checkpointing and compiling: the same loss and gradients, less that waits for the backward pass, few graphs."""

from weakref import WeakSet

import pytest
import torch
from cases import CASES, make_head
from torch import Tensor

from draftsmith.data.features import FeatureBatch
from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.target import Target
from draftsmith.train.objectives import Objective
from draftsmith.train.step import judged

INSIDE = {"medusa-2", "medusa-2-shared"}  # they train in the target


def a_batch(target: Target, taps: list[int], time: int = 40) -> FeatureBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 111, (4, time), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, :2] = False
    return FeatureBatch(ids, mask, target.features(ids, taps), None, ids.numel())


def learned(head: DraftHead, target: Target) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch and the gradients."""
    batch = a_batch(target, head.config.taps)
    torch.manual_seed(5)  # of dropout and noise
    loss, _ = judged(head, batch, target, Objective(), head.taught(batch.ids, batch.mask, 7))
    loss.backward()
    return loss.item(), {name: own.grad for name, own in head.named_parameters() if own.grad is not None}


class Held:
    """A tensor that autograd holds; gone once no graph holds it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept(head: DraftHead, target: Target) -> int:
    """The bytes that the forward over a batch leaves for the backward pass, parameters apart."""
    batch, own = a_batch(target, head.config.taps), {parameter.data_ptr() for parameter in head.parameters()}
    alive: WeakSet[Held] = WeakSet()

    def keep(tensor: Tensor) -> Held:
        held = Held(tensor)
        alive.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.tensor):
        depths = head.predict(batch.ids, head.taught(batch.ids, batch.mask, 7), batch.features, target)
    assert depths
    storages = [held.tensor.untyped_storage() for held in alive]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in own}.values())


@pytest.mark.parametrize("case", [case for case in CASES if case not in INSIDE])
def test_recomputing_changes_no_number_and_keeps_less(tiny_target, case):
    plain, again = (make_head(tiny_target, case).train() for _ in range(2))
    again.recompute()
    loss, grads = learned(plain, tiny_target)
    loss_again, grads_again = learned(again, tiny_target)
    assert loss_again == loss and grads_again.keys() == grads.keys()
    for name, grad in grads.items():
        assert torch.equal(grads_again[name], grad), name
    assert kept(again, tiny_target) < 0.9 * kept(plain, tiny_target)


@pytest.mark.parametrize("case", sorted(INSIDE))
def test_a_head_that_trains_inside_the_target_refuses(tiny_target, case):
    with pytest.raises(UserError, match="train.gradient_checkpointing to false"):
        make_head(tiny_target, case).recompute()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["medusa-shared", "eagle3", "mlp-speculator"])
def test_compiling_changes_no_number_beyond_rounding_and_ends(tiny_target, case):
    """At most a graph for each depth, and none for further shapes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, fast = (make_head(tiny_target, case).train() for _ in range(2))
    fast.compile_stretches()
    (loss, grads), (loss_fast, grads_fast) = learned(plain, tiny_target), learned(fast, tiny_target)
    assert loss_fast == pytest.approx(loss, rel=1e-5) and grads_fast.keys() == grads.keys()
    for name, grad in grads.items():
        assert (grads_fast[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-9, name
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= fast.config.depths
    for time in (20, 25, 30, 38):
        batch = a_batch(tiny_target, fast.config.taps, time)
        judged(fast, batch, tiny_target, Objective(), fast.taught(batch.ids, batch.mask, 7))[0].backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
