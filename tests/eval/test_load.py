import pytest
from published import CONTEXT, H100, ROOFLINE_TAU, chain

from draftsmith.eval.costs import Roofline
from draftsmith.eval.load import balance, capacity, latency
from draftsmith.eval.service import DraftCost
from draftsmith.eval.speedup import Predictor

ROOF = Roofline(H100)
COST = 0.2 * ROOF.seconds(1, 1, CONTEXT)
FACTS = chain("eagle3", ROOFLINE_TAU, 3, draft_seconds=[DraftCost(batch=b, length=3, seconds=COST) for b in (1, 512)])


def plain(batch: float) -> float:
    return ROOF.seconds(batch, 1, CONTEXT)


def speculating(batch: float) -> float:
    return Predictor(FACTS, ROOF, CONTEXT).pass_seconds(batch, 3)


def test_the_published_fixed_point() -> None:
    """32 requests per second of 256 tokens: 70 run at once at 8.6 ms per token, with drafts 22 at 2.7 ms."""
    without, with_drafts = balance(32 * 256, plain), balance(32 * 256, speculating, ROOFLINE_TAU)
    assert without and without.batch == pytest.approx(70, rel=0.07) and without.tpot == pytest.approx(8.6e-3, rel=0.07)
    assert with_drafts and with_drafts.batch == pytest.approx(22, rel=0.07)
    assert with_drafts.tpot == pytest.approx(2.7e-3, rel=0.07)


def test_the_gain_at_a_rate_is_not_the_gain_at_a_batch_size() -> None:
    without, with_drafts = balance(32 * 256, plain), balance(32 * 256, speculating, ROOFLINE_TAU)
    assert without and with_drafts
    at_batch = ROOFLINE_TAU * plain(without.batch) / speculating(without.batch)
    assert without.tpot / with_drafts.tpot > at_batch * 1.2
    assert without.tpot / with_drafts.tpot == pytest.approx(without.batch / with_drafts.batch)  # Little's law


def test_a_linear_step_has_the_closed_form() -> None:
    found = balance(50, lambda batch: 0.01 + 0.001 * batch)
    assert found and found.batch == pytest.approx(0.5, rel=0.2)  # below one sequence a pass costs as for one
    busier = balance(500, lambda batch: 0.01 + 0.001 * batch)
    assert busier and busier.batch == pytest.approx(500 * 0.01 / (1 - 500 * 0.001), rel=1e-6)


def test_no_balance_is_saturation() -> None:
    assert balance(1001, lambda batch: 0.01 + 0.001 * batch) is None
    assert balance(900, lambda batch: 0.01 + 0.001 * batch, most=64) is None  # its 90 sequences do not fit
    assert balance(1, lambda batch: 0.01, busy=1.0) is None


def test_reading_prompts_takes_time_from_decoding() -> None:
    free, half = balance(100, lambda batch: 0.02), balance(100, lambda batch: 0.02, busy=0.5)
    assert free and half and half.tpot == pytest.approx(2 * free.tpot)


def test_capacity_is_where_the_balance_ends() -> None:
    most = capacity(lambda batch: 0.01 + 0.001 * batch, most=64)
    assert most == pytest.approx(64 / 0.074)
    assert balance(0.999 * most, lambda batch: 0.01 + 0.001 * batch, most=64)
    assert balance(1.001 * most, lambda batch: 0.01 + 0.001 * batch, most=64) is None
    assert capacity(lambda batch: 0.01, most=10, busy_per_token=0.001) == pytest.approx(500)


def test_speculation_may_lower_latency_and_still_cost_capacity() -> None:
    plain_latency, drafting = (2.0, 0.02), (1.0, 0.03)
    assert latency(*drafting, rate=10) < latency(*plain_latency, rate=10)  # type: ignore[operator]
    assert latency(*drafting, rate=34) is None
    assert latency(*plain_latency, rate=34) == pytest.approx(2.0 / 0.32)
