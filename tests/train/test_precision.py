"""bfloat16 is what a step computes in; what it learns stays float32, in memory and in checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from workplace import SIX_STEPS, build, curve, recipe_in

from draftsmith.train.loop import train
from draftsmith.train.prepare import prepare, start

BF16 = ["train.precision=bf16", "train.batch_size=4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_target) -> Path:
    return build(tmp_path_factory.mktemp("precision"), tiny_target, *SIX_STEPS, rows=21)


def floats(tensors) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()}


def test_parameters_gradients_and_optimizer_stay_float32_under_bf16(place):
    recipe = recipe_in(place, "unused", *BF16)
    run = prepare(recipe, start(recipe), place / "unused")
    computed, gradients = set(), set()
    head = run.accelerator.unwrap_model(run.head)
    head.fc.register_forward_hook(lambda _, __, out: computed.add(out.dtype))
    for parameter in head.parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: gradients.add(own.grad.dtype))
    run.advance(1, [0, 1, 2, 3])
    assert computed == {torch.bfloat16}
    assert floats(head.state_dict().values()) == gradients == {torch.float32}
    states = run.optimizer.state_dict()["state"].values()
    assert states and floats(tensor for state in states for tensor in state.values()) == {torch.float32}


def test_checkpoints_and_heads_of_a_bf16_run_hold_float32(place):
    train(recipe_in(place, "bf16", *BF16, "train.max_steps=2", "train.checkpoint_every=2"))
    run = place / "bf16"
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    for file in (*checkpoint.rglob("*.safetensors"), run / "head" / "model.safetensors"):
        assert floats(load_file(file).values()) == {torch.float32}
    state = torch.load(checkpoint / "optimizer.bin", weights_only=True)["state"]
    assert state and floats(tensor for each in state.values() for tensor in each.values()) == {torch.float32}
    assert curve(run)
