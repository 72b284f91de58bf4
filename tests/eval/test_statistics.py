"""Intervals that hold what they promise, and tests that err as often as they say."""

from itertools import product

import numpy as np
import pytest
from scipy.stats import t as students

from draftsmith.eval.statistics import by_question, holm, interval, paired, rate, speedup, student, tau


def prompts(rng: np.random.Generator, n: int, mean: float = 2.0) -> np.ndarray:
    """Accepted drafts and verify passes of ``n`` prompts that are unequally hard and unequally long."""
    passes = rng.integers(10, 80, n)
    return np.stack([rng.poisson(rng.gamma(6, mean / 6, n) * passes), passes], 1)


def test_the_numbers_are_pooled() -> None:
    assert tau(np.array([[6.0, 4.0], [0.0, 0.0]])).tolist() == [2.5, 1.0]
    assert rate(np.array([30.0, 2.0])) == 15 and np.isnan(rate(np.array([30.0, 0.0])))
    assert speedup(np.array([30.0, 2.0, 20.0, 4.0])) == 3
    assert np.isnan(speedup(np.array([30.0, 2.0, 0.0, 0.0])))


def test_a_questions_turns_are_one_draw() -> None:
    rows = [{"id": "a", "x": 1, "y": 2}, {"id": "b", "x": 5, "y": None}, {"id": "a", "x": 10, "y": 20}]
    assert {name: sums.tolist() for name, sums in by_question(rows, ("x", "y")).items()} == {"a": [11, 22], "b": [5, 0]}


@pytest.mark.parametrize("freedom", [3, 4, 9, 30, 300])
def test_students_quantile(freedom: int) -> None:
    assert student(freedom) == pytest.approx(students.ppf(0.975, freedom), rel=0.01)


@pytest.mark.parametrize("n", [8, 30])
def test_an_interval_holds_the_truth_as_often_as_it_says(n: int) -> None:
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(300):
        low, high = interval(prompts(rng, n), tau, seed) or (0, 0)
        held += low <= 3 <= high  # the lengths are independent of the acceptance, whose mean is 2
    assert 0.91 <= held / 300 <= 0.98


def test_an_interval_of_what_does_not_exist() -> None:
    assert interval(np.zeros((3, 2)), rate) is None
    assert interval(np.zeros((0, 2)), tau) is None
    assert interval(np.array([[3.0, 2.0]]), tau) == [2.5, 2.5]  # one prompt says nothing of others
    assert interval(np.array([[3.0, 2.0]] * 5), tau) == [2.5, 2.5]


def test_a_difference_by_hand() -> None:
    a = np.array([[10, 10], [20, 10], [30, 10]])
    b = a + [[6, 0], [9, 0], [3, 0]]
    found, (low, high), p = paired(a, b, tau)
    assert found == pytest.approx(18 / 30)
    assert low == pytest.approx(0.3) and high == pytest.approx(0.9)  # three times the prompt that gains least, and most
    assert p == 2 / 8  # of all ways to swap, only these labels and their opposite are as far apart
    back, (low, high), p = paired(b, a, tau)
    assert back == -found and (low, high) == pytest.approx((-0.9, -0.3)) and p == 2 / 8


def test_swaps_are_of_whole_prompts() -> None:
    rng = np.random.default_rng(3)
    a, b = prompts(rng, 7), prompts(rng, 7, 2.4)
    found = float(tau(b.sum(0)) - tau(a.sum(0)))
    all_ways = []
    for sides in product([False, True], repeat=7):
        keep = np.array(sides)[:, None]
        all_ways.append(float(tau(np.where(keep, a, b).sum(0)) - tau(np.where(keep, b, a).sum(0))))
    p = np.mean(np.abs(all_ways) >= abs(found) - 1e-12)
    assert paired(a, b, tau)[2] == pytest.approx(p)


def test_the_same_run_twice_differs_in_nothing() -> None:
    a = prompts(np.random.default_rng(0), 20)
    assert paired(a, a, tau) == (0, [0, 0], 1)


@pytest.mark.parametrize("n", [10, 20])
def test_no_difference_is_found_where_there_is_none(n: int) -> None:
    """Both runs draw from the same prompts with luck of their own: below 0.05 in one of twenty cases."""
    rng = np.random.default_rng(1)
    false = missed = 0
    for seed in range(300):
        passes, hard = rng.integers(10, 80, n), rng.gamma(6, 1 / 3, n)
        a, b, c = (np.stack([rng.poisson(hard * factor * passes), passes], 1) for factor in (1, 1, 1.2))
        false += paired(a, b, tau, seed)[2] < 0.05
        missed += paired(a, c, tau, seed)[2] >= 0.05
    assert 0.02 <= false / 300 <= 0.08
    assert missed / 300 < 0.25


def test_pairing_sees_what_lies_between_the_prompts() -> None:
    """Prompts differ far more than the runs do; on the same prompts the small difference shows all the same."""
    rng = np.random.default_rng(2)
    passes, hard = np.full(30, 200), rng.gamma(2, 1, 30)
    a, b = (np.stack([rng.poisson(hard * factor * passes), passes], 1) for factor in (1.0, 1.1))
    (low_a, high_a), (low_b, _) = interval(a, tau) or (0, 0), interval(b, tau) or (0, 0)
    found, (low, high), p = paired(a, b, tau)
    assert low_a < low_b < high_a  # apart, the intervals overlap
    assert 0 < low < found < high and p < 0.001


@pytest.mark.parametrize(
    ("ps", "raised"),
    [([0.01], [0.01]), ([0.04, 0.01, 0.03], [0.06, 0.03, 0.06]), ([0.5, 0.9], [1, 1]), ([], [])],
)
def test_holm(ps: list[float], raised: list[float]) -> None:
    assert holm(ps) == pytest.approx(raised)
