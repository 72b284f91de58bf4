"""Several processes: the same rows in the same order and the same curve, however a batch is cut."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workplace import PLAIN, SIX_STEPS, build, curve, finished, launch, recipe_in, several, uncut

from draftsmith.data.batches import epoch_plan, share
from draftsmith.errors import UserError
from draftsmith.target import Target

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_target, lively_target) -> Path:
    """21 rows in batches of 8: the last batch of an epoch holds five, which four processes cannot share evenly."""
    own = Target(lively_target.model, tiny_target.tokenizer, "lively")
    return build(tmp_path_factory.mktemp("processes"), own, *SIX_STEPS, rows=21)


@given(
    rows=st.integers(1, 60), batch=st.integers(1, 17), world=st.integers(1, 5), micro=st.integers(1, 5), epoch=st.integers(0, 3)
)
def test_no_row_is_lost_or_doubled_however_a_batch_is_cut(rows, batch, world, micro, epoch):
    lengths = [(7 * i) % 23 + 1 for i in range(rows)]
    plan = epoch_plan(lengths, batch, seed=3, epoch=epoch)
    assert sorted(row for own in plan for row in own) == list(range(rows))
    for own in plan:
        shares = [share(own, rank, world, micro) for rank in range(world)]
        assert sorted(row for each in shares for rows in each for row in rows) == sorted(own)
        assert len({len(each) for each in shares}) == 1, "all ranks meet in every all-reduce"


@pytest.mark.slow
def test_one_two_and_four_processes_give_one_curve(place):
    """Accumulation 4, 2 and 1: micro-batches of two rows, eight to a step."""
    for processes in (1, 2, 4):
        launch(place, several(processes), f"x{processes}")
    one = place / "x1"
    for part in ("train", "held_out"):
        for other in ("x2", "x4"):
            for ours, theirs in zip(uncut(one, part), uncut(place / other, part), strict=True):
                assert ours.get("tokens") == theirs.get("tokens"), "no row is lost or doubled"
                assert theirs == pytest.approx(ours, rel=1e-4)
    assert curve(one)[-1]["loss"] < curve(one)[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "seats"), [("fsdp", [[0, 4], [1, 4], [2, 4], [3, 4]]), ("tp", [[0, 2], [0, 2], [1, 2], [1, 2]])]
)
def test_a_target_that_processes_hold_together_gives_what_a_whole_one_gives(place, parallel, seats):
    """Two groups of two processes: hidden states, logits, texts and weights."""
    said = finished([*several(4), str(TESTS / "held_together.py"), str(place / "recipe.yaml"), parallel, "2"])
    found = [json.JSONDecoder().raw_decode(rest)[0] for rest in said.split("FOUND ")[1:]]  # two may share a line
    assert sorted(each.pop("seat") for each in found) == seats
    for each in found:
        assert each.pop("taps") < 1e-5 and each.pop("logits") < 1e-4
        assert each.pop("share") == pytest.approx(0.5, abs=0.05), "of the layers; a norm may stay whole"
        assert all(each.values()), each


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp", "fsdp-zero2"])
def test_a_sharded_head_gives_the_curve_of_a_whole_one_and_recomputes(place, config):
    if not (place / "whole").exists():
        launch(place, PLAIN, "whole")
    sharded = [*several(2, config), "--mixed_precision", "no", str(TESTS / "fsdp_on_cpus.py")]
    launch(place, sharded, config, "train.gradient_checkpointing=true", "train.checkpoint_every=4")
    checkpoint = place / config / "checkpoints" / "step-4"
    assert list(checkpoint.rglob("*fsdp*")), "accelerate did shard it"
    for part in ("train", "held_out"):
        for ours, theirs in zip(uncut(place / "whole", part), uncut(place / config, part), strict=True):
            assert theirs == pytest.approx(ours, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "tp"])
def test_training_on_such_a_target_gives_the_curve_of_one_process(place, parallel):
    """Verifier and all: its passes on the main process go through the others' parts."""
    prompts = ["eval.prompts=2", "eval.max_new_tokens=8"]
    if not (place / "verified").exists():
        launch(place, PLAIN, "verified", *prompts)
    launch(place, several(2), f"target-{parallel}", f"target.parallel={parallel}", *prompts)
    for part in ("train", "held_out"):
        for ours, theirs in zip(uncut(place / "verified", part), uncut(place / f"target-{parallel}", part), strict=True):
            assert ours.get("tokens") == theirs.get("tokens") and ours.get("tau") == theirs.get("tau")
            assert theirs == pytest.approx(ours, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["target.parallel=fsdp", "data.features=memory"], "target.parallel fsdp every process must run the target"),
        (["target.parallel=tp", "data.features=write-through", "data.store=s"], "extract a store first"),
        (["target.parallel=fsdp", "train.on_policy=0.5"], "train.on_policy"),
        (["target.parallel=tp", "target.device=auto"], "leave one of them out"),
        (["target.group=2"], "set parallel to fsdp or tp"),
    ],
)
def test_what_a_target_held_together_cannot_do_is_refused(place, changes, said):
    with pytest.raises(UserError, match=said):
        recipe_in(place, "refused", *changes)
