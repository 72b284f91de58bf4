"""Several processes: the same rows in the same order and the same curve, however a batch is cut."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import curve, launch, settle

from draftsmith.data.batches import epoch_plan, share


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_target) -> Path:
    """21 rows in batches of 8: the last batch of an epoch holds five, which four processes cannot share evenly."""
    return settle(tmp_path_factory.mktemp("processes"), tiny_target)


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
        launch(place, processes, f"x{processes}")
    one = place / "x1"
    for part in ("train", "held_out"):
        for other in ("x2", "x4"):
            for ours, theirs in zip(curve(one, part), curve(place / other, part), strict=True):
                assert ours.get("tokens") == theirs.get("tokens"), "no row is lost or doubled"
                ours.pop("padding", None), theirs.pop("padding", None)  # follows from the cut
                assert theirs == pytest.approx(ours, rel=1e-4)
    assert curve(one)[-1]["loss"] < curve(one)[0]["loss"]
