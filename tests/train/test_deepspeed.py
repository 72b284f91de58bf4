"""DeepSpeed's ZeRO-2 and ZeRO-3 on two CPU processes: the curve of one, resume to the bit, no step where a loss is spoilt."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from workplace import PLAIN, SIX_STEPS, build, command, curve, finished, launch, on_cpu, recipe_in, same_weights, several, uncut

from draftsmith.errors import UserError
from draftsmith.train.deepspeed import check_deepspeed
from draftsmith.train.prepare import start

TESTS = Path(__file__).parents[1]
EVERY_STEP = ["train.checkpoint_every=1", "train.keep_checkpoints=9"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_target) -> Path:
    pytest.importorskip("deepspeed", reason="make deepspeed-check installs it")
    return build(tmp_path_factory.mktemp("deepspeed"), tiny_target, *SIX_STEPS, rows=21)


@pytest.fixture(scope="module", params=["zero2", "zero3"])
def run(request, place) -> Path:
    """A run by the shipped file, as ``make deepspeed-check`` starts it."""
    train_by(request.param, place, request.param)
    return place / request.param


def train_by(stage: str, place: Path, out: str, *changes: str, resume: bool = False, spoilt: int = 0) -> str:
    """Train in two processes by recipes/accelerate/``stage``.yaml; the loss of step ``spoilt`` is infinite on one of them."""
    launcher = [*several(2, stage), str(TESTS / "deepspeed_on_cpus.py")]
    full = [*command(place, launcher, out, *EVERY_STEP, *changes), *(["--resume"] if resume else [])]
    return finished(full, on_cpu() | {"ACCELERATE_USE_CPU": "false", "DS_ACCELERATOR": "cpu", "SPOILT": str(spoilt)})


@pytest.mark.slow
def test_a_run_has_the_curve_of_one_process_and_leaves_whole_heads(place, run):
    if not (place / "whole").exists():
        launch(place, PLAIN, "whole")
    for part in ("train", "held_out"):
        for ours, theirs in zip(uncut(place / "whole", part), uncut(run, part), strict=True):
            assert theirs == pytest.approx(ours, rel=1e-4)
    step = run / "checkpoints" / "step-6"
    shards = list(step.rglob("zero_pp_rank_*_optim_states.pt"))
    assert len(shards) == 2, "DeepSpeed sharded the optimizer"
    ours, theirs = (load_file(head / "model.safetensors") for head in (place / "whole" / "head", run / "head"))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in ours.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in theirs.items()
    }


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(place, run):
    again = place / f"{run.name}-again"
    shutil.copytree(run, again)
    for step in (5, 6):
        shutil.rmtree(again / "checkpoints" / f"step-{step}")
    assert "going on from" in train_by(run.name, place, again.name, resume=True)
    last = Path("checkpoints") / "step-6" / "head"
    assert same_weights(run / last, again / last) and curve(run) == curve(again)


@pytest.mark.slow
def test_no_process_takes_a_step_whose_loss_is_infinite_on_one(place, run):
    out = place / f"{run.name}-spoilt"
    said = train_by(run.name, place, out.name, "train.nonfinite=skip", spoilt=4)
    assert "step 4 is skipped: its loss is not finite" in said
    assert [json.loads(line)["step"] for line in (out / "faults.jsonl").read_text().splitlines()] == [4]
    heads = [out / "checkpoints" / f"step-{step}" / "head" for step in (3, 4, 5)]
    assert same_weights(heads[0], run / "checkpoints" / "step-3" / "head"), "what came before was sound"
    assert same_weights(*heads[:2]) and not same_weights(*heads[1:])


@pytest.mark.slow
def test_bf16_is_autocast_over_float32_weights(place, run):
    train_by(run.name, place, f"{run.name}-bf16", "train.precision=bf16")
    if not (place / "bf16").exists():
        launch(place, PLAIN, "bf16", "train.precision=bf16")
    losses = [[row["loss"] for row in curve(place / out)] for out in ("bf16", f"{run.name}-bf16", run.name)]
    assert losses[1] == pytest.approx(losses[0], rel=5e-3) and losses[1] != pytest.approx(losses[2], rel=1e-5)
    tensors = load_file(place / f"{run.name}-bf16" / "head" / "model.safetensors").values()
    assert all(tensor.dtype.itemsize >= 4 for tensor in tensors)


def test_what_it_cannot_do_is_refused(place, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(UserError, match="set head.confidence to false"):
        start(recipe_in(place, "refused", "head.confidence=true"))
    with pytest.raises(UserError, match="unset ACCELERATE_USE_CPU"):
        start(recipe_in(place, "refused"))


def test_where_it_is_missing_the_error_says_so(monkeypatch):
    monkeypatch.setattr("draftsmith.train.deepspeed.is_deepspeed_available", lambda: False)
    with pytest.raises(UserError, match="pip install deepspeed"):
        check_deepspeed()
