import numpy as np
import pytest
from published import (
    AMD_LENGTHS,
    AMD_RECOVERED,
    CONTEXT,
    FREE,
    H100,
    ROOFLINE,
    ROOFLINE_TAU,
    SGLANG_CHAIN3,
    VLLM_CHAIN2,
    VLLM_TAU,
    chain,
    step_costs,
)

from draftsmith.errors import UserError
from draftsmith.eval import acceptance
from draftsmith.eval.costs import Roofline, Surface, measure_drafts, measure_prefill, measure_steps, rising, step_surface
from draftsmith.eval.ngram import NGram
from draftsmith.eval.service import Acceptance, DraftCost, Engine, ProposerFacts, StepCost
from draftsmith.eval.speedup import Predictor, end_to_end
from draftsmith.eval.verifier import Generation, Request
from draftsmith.target import Target

# -- acceptance --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "tau", "alpha"), list(zip(range(1, 8), AMD_LENGTHS, AMD_RECOVERED, strict=True)))
def test_an_engines_rate_gives_back_the_chance_behind_it(length: int, tau: float, alpha: float) -> None:
    rate = (tau - 1) / length
    assert acceptance.recovered(rate, length) == pytest.approx(alpha, abs=0.001)
    assert acceptance.expected([0.85] * length) == pytest.approx(tau, rel=0.037)


def test_the_engines_rate_in_place_of_the_chance_promises_half_as_much() -> None:
    rate = (AMD_LENGTHS[-1] - 1) / 7
    assert acceptance.expected([rate] * 7) == pytest.approx(2.09, abs=0.01)
    facts = ProposerFacts(name="eagle3", engine=Engine(rate=rate, length=7))
    assert acceptance.tau(facts, 7)[0] == pytest.approx(4.68, abs=1e-6)


def test_measured_acceptance_counts_passes_without_a_draft_as_misses() -> None:
    runs = [Generation([1] * 9, [2, 0, 2, 2], [2, 0, 1, 0], False, {}) for _ in range(3)]
    first, second = acceptance.measured(runs, 2)
    assert (first.rate, second.rate) == (0.5, 0.5)
    tau = acceptance.expected([first.rate, second.rate])
    assert tau == 1 + 3 / 4  # accepted drafts over all passes


def test_tau_beyond_the_measured_length_goes_on_like_its_last_position() -> None:
    facts = ProposerFacts(
        name="x", acceptance=[Acceptance(rate=0.8, low=0.7, high=0.9), Acceptance(rate=0.5, low=0.5, high=0.5)]
    )
    assert acceptance.tau(facts, 3) == pytest.approx((1 + 0.8 + 0.4 + 0.2, 1 + 0.7 + 0.35 + 0.175, 1 + 0.9 + 0.45 + 0.225))
    assert acceptance.tau(facts, 0) == (1, 1, 1)


def test_a_rate_without_an_interval_is_not_taken_for_exact() -> None:
    middle, low, high = acceptance.tau(ProposerFacts(name="x", acceptance=[Acceptance(rate=0.98)]), 1)
    assert (middle, low, high) == pytest.approx((1.98, 1 + 0.98 * 0.95, 2.0))


# -- the fitted surface ------------------------------------------------------------------------------------------


def test_a_surface_is_the_monotone_one_of_least_largest_error() -> None:
    noisy = np.array([[1.0, 2.0, 1.8], [1.1, 2.2, 4.0]])
    fitted = rising(noisy)
    assert (np.diff(fitted, axis=0) >= 0).all() and (np.diff(fitted, axis=1) >= 0).all()
    assert fitted[0] == pytest.approx([1.0, (2.0 * 1.8) ** 0.5, (2.0 * 1.8) ** 0.5])
    assert fitted[1] == pytest.approx(noisy[1])
    ordered = np.sort(np.random.default_rng(0).random((4, 5)), axis=1).cumsum(0)
    assert rising(ordered) == pytest.approx(ordered)


def test_a_dip_that_noise_does_not_explain_is_kept() -> None:
    """Four tokens read faster than three: processors have such kernels."""
    rows = [(1, 0.055, 0.01), (3, 0.111, 0.01), (4, 0.084, 0.01), (6, 0.0838, 0.01)]
    surface = step_surface([StepCost(tokens=n, seconds=s, spread=spread) for n, s, spread in rows])
    assert surface.seconds(1, 4) == pytest.approx(0.084 * 1.03) and surface.seconds(1, 3) == pytest.approx(0.111 * 0.97)
    assert surface.seconds(1, 6) >= surface.seconds(1, 4) * 0.99
    assert surface.seconds(1, 20) >= surface.seconds(1, 6)


def test_a_surface_is_exact_where_it_was_measured_and_linear_between() -> None:
    rows = [StepCost(tokens=n, batch=b, seconds=0.01 * b + 0.001 * b * n) for b in (1, 4, 8) for n in (1, 4, 16)]
    surface = step_surface(rows)
    for row in rows:
        assert surface.seconds(row.batch, row.tokens) == pytest.approx(row.seconds)
    assert surface.seconds(4, 8) == pytest.approx(0.04 + 0.032)
    assert surface.seconds(2.5, 4) == pytest.approx((0.014 + 0.056) / 2)
    assert surface.seconds(16, 16) == pytest.approx(0.416)  # with the slope of the edge
    assert surface.seconds(0.5, 1) == surface.seconds(1, 1)
    assert surface.beyond(9, 1) and surface.beyond(1, 17) and not surface.beyond(8, 16)


def test_a_surface_never_falls_outside_its_points() -> None:
    rows = [(1, 1, 1.0), (1, 2, 3.0), (2, 1, 2.9), (2, 2, 3.1)]  # lines that would cross
    surface = step_surface([StepCost(batch=b, tokens=n, seconds=s) for b, n, s in rows])
    values = [[surface.seconds(b, n) for n in range(1, 12)] for b in range(1, 12)]
    assert (np.diff(values, axis=0) >= 0).all() and (np.diff(values, axis=1) >= 0).all()


def test_tokens_stand_for_sequences_where_one_sequence_was_measured_alone() -> None:
    surface = step_surface([StepCost(tokens=n, seconds=0.01 + 0.001 * n) for n in (1, 8, 64)])
    assert surface.seconds(4, 4) == pytest.approx(0.01 + 0.016)
    assert surface.beyond(20, 4)


def test_a_context_between_the_measured_ones_costs_between() -> None:
    rows = [StepCost(tokens=1, batch=b, context=c, seconds=0.01 + 1e-5 * c * b) for b in (1, 2) for c in (0, 1000)]
    assert step_surface(rows).seconds(2, 1, 500) == pytest.approx(0.02)


def test_costs_with_a_gap_name_the_missing_row() -> None:
    rows = [
        StepCost(tokens=1, batch=1, seconds=1),
        StepCost(tokens=4, batch=1, seconds=2),
        StepCost(tokens=1, batch=2, seconds=2),
    ]
    with pytest.raises(UserError, match="no row for context 0, batch 2, tokens 4"):
        step_surface(rows)


# -- the speed-up ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "expected"), ROOFLINE.items())
def test_the_roofline_gives_the_published_upper_bounds(batch: int, expected: float) -> None:
    roofline = Roofline(H100)
    cost = 0.2 * roofline.seconds(1, 1, CONTEXT)
    facts = chain("eagle3", ROOFLINE_TAU, 3, draft_seconds=[DraftCost(batch=b, length=3, seconds=cost) for b in (1, 512)])
    found = Predictor(facts, roofline, CONTEXT).predict(batch, 3)
    assert found.speedup == pytest.approx(expected, rel=0.06)
    assert found.bound


def test_the_roofline_flatters_where_measured_steps_do_not() -> None:
    facts = chain("eagle3", ROOFLINE_TAU, 3, draft_seconds=FREE)
    measured = step_surface(step_costs(SGLANG_CHAIN3, ROOFLINE_TAU, 3))
    for batch in (32, 64):
        bound = Predictor(facts, Roofline(H100), CONTEXT).predict(batch, 3).speedup
        assert bound > 1.5 * Predictor(facts, measured).predict(batch, 3).speedup


@pytest.mark.parametrize(("batch", "expected"), VLLM_CHAIN2.items())
def test_a_measured_table_predicts_the_sweep_that_it_came_from(batch: int, expected: float) -> None:
    facts = chain("eagle3", VLLM_TAU, 2, draft_seconds=FREE)
    found = Predictor(facts, step_surface(step_costs(VLLM_CHAIN2, VLLM_TAU, 2))).predict(batch, 2)
    assert found.speedup == pytest.approx(expected, rel=0.03)  # the sweep itself is not monotone in cost
    assert found.low < found.speedup < found.high
    assert found.break_even == pytest.approx(VLLM_TAU / expected, rel=0.03)


def test_compute_bound_passes_lose_whatever_the_draft() -> None:
    surface = step_surface([StepCost(tokens=n, batch=b, seconds=0.001 * n * b) for b in (1, 64) for n in (1, 2, 4, 8)])
    drafting = Predictor(chain("eagle3", 3.5, 4), surface)
    assert all(drafting.predict(8, length).speedup < 1 for length in range(1, 5))
    assert drafting.best(8).length == 0
    assert drafting.best(8).speedup == 1


def test_the_interval_holds_both_the_acceptance_and_the_costs() -> None:
    rows = [StepCost(tokens=n, batch=1, seconds=0.01 + 0.0001 * n, spread=0.05) for n in (1, 4)]
    sure = chain("a", 2.5, 3)
    exact = sure.model_copy(
        update={"acceptance": [Acceptance(rate=p, low=p, high=p) for p in (each.rate for each in sure.acceptance)]}
    )
    with_both, with_costs = (Predictor(each, step_surface(rows)).predict(1, 3) for each in (sure, exact))
    assert with_both.low < with_costs.low < with_costs.speedup < with_costs.high < with_both.high
    assert with_costs.high / with_costs.speedup == pytest.approx(np.exp(1.96 * 2**0.5 * 0.05))


def test_a_pass_is_as_large_as_its_largest_draft() -> None:
    facts = ProposerFacts(name="ngram", kind="lookup", sizes={0: 0.5, 4: 0.5}, acceptance=[Acceptance(rate=0.4)] * 4)
    surface = step_surface([StepCost(tokens=n, batch=b, seconds=0.01 * n) for b in (1, 4) for n in (1, 5)])
    drafting = Predictor(facts.model_copy(update={"draft_seconds": FREE}), surface)
    assert dict(drafting.largest(4, 1)) == pytest.approx({0: 0.5, 4: 0.5})
    assert dict(drafting.largest(4, 3)) == pytest.approx({0: 0.125, 4: 0.875})
    assert dict(drafting.largest(2, 1)) == pytest.approx({0: 0.5, 2: 0.5})
    assert drafting.pass_seconds(3, 4) == pytest.approx(0.125 * 0.01 + 0.875 * 0.05)
    assert Predictor(drafting.facts, surface, pads=False).pass_seconds(3, 4) == pytest.approx(0.03)


def test_trees_are_drafted_as_they_were_measured() -> None:
    facts = ProposerFacts(name="tree", tree=True, sizes={24: 1.0}, acceptance=[Acceptance(rate=0.7)] * 3, draft_seconds=FREE)
    surface = step_surface([StepCost(tokens=n, batch=b, seconds=0.01 + 0.001 * n) for b in (1, 2) for n in (1, 25)])
    assert Predictor(facts, surface).lengths == [0, 3]
    assert Predictor(facts, surface).pass_seconds(1, 3) == pytest.approx(0.035)


def test_drafting_timed_at_one_batch_size_slows_down_as_the_target_does() -> None:
    surface = step_surface([StepCost(tokens=n, batch=b, seconds=0.01 * b) for b in (1, 4) for n in (1, 4)])
    timed = [DraftCost(batch=1, length=length, seconds=0.001 * length) for length in (1, 4)]
    head = ProposerFacts(name="h", draft_seconds=timed)
    assert Predictor(head, surface).draft_seconds(4, 2) == pytest.approx(0.008)
    lookup = head.model_copy(update={"kind": "lookup"})
    assert Predictor(lookup, surface).draft_seconds(4, 2) == pytest.approx(0.002)
    both = head.model_copy(update={"draft_seconds": [*timed, *(c.model_copy(update={"batch": 4}) for c in timed)]})
    assert Predictor(both, surface).draft_seconds(4, 2) == pytest.approx(0.002)


def test_amdahl() -> None:
    assert end_to_end(0.6, 3.0) == pytest.approx(1 / 0.7333, rel=1e-3)
    assert end_to_end(0.0, 2.0) == 2


# -- measuring ---------------------------------------------------------------------------------------------------


def test_passes_of_a_target_are_timed_and_fitted(lively_target: Target) -> None:
    table = measure_steps(lively_target, [1, 3], [1, 2, 4], context=8, rounds=3)
    assert [(row.batch, row.tokens) for row in table] == [(b, n) for b in (1, 3) for n in (1, 2, 4)]
    assert all(row.seconds > 0 and row.context == 8 for row in table)
    assert isinstance(step_surface(table), Surface)


def test_a_context_too_short_to_time_is_refused(lively_target: Target) -> None:
    with pytest.raises(UserError, match="too short to time passes of 64 tokens"):
        measure_steps(lively_target, [1], [1, 64], context=8)


def test_drafting_and_prefill_are_timed(lively_target: Target) -> None:
    requests = [Request([1, 2, 3, 4, 1, 2, 3], 12), Request([5, 6, 5, 6, 5], 12)]
    table = measure_drafts(lively_target, NGram.read("3,max=2,min=1"), requests, [1, 2])
    assert [(row.batch, row.length) for row in table] == [(1, 3), (2, 3)]
    assert len(measure_prefill(lively_target, [request.prompt for request in requests])) == 2
