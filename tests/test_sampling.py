"""Rows of probabilities, against the library's own logits warpers."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftsmith.errors import UserError
from draftsmith.sampling import GREEDY, Sampling, draw, probabilities

VOCAB = 40


def rows(count: int = 200) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), list(itertools.product([0.3, 1.0, 1.7], [0, 1, 5, 100], [1.0, 0.9, 0.5, 0.01]))
)
def test_rows_equal_the_librarys_warpers(temperature: float, top_k: int, top_p: float) -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    logits = rows()
    expected = warpers(torch.zeros(len(logits), 1, dtype=torch.long), logits.clone()).softmax(-1)  # type: ignore[arg-type]
    probs = probabilities(logits, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=0)
    assert torch.equal(probs > 0, expected > 0)


def test_the_order_is_temperature_then_top_k_then_top_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert probabilities(logits, Sampling(1.0, top_k=2, top_p=0.55)).tolist() == [1, 0, 0, 0]  # 4/7 of what top-k left
    assert probabilities(logits, Sampling(1.0, top_p=0.55)).gt(0).tolist() == [True, True, False, False]
    assert probabilities(logits, Sampling(0.2, top_p=0.55)).tolist() == [1, 0, 0, 0]  # the temperature sharpens first


def test_greedy_is_one_hot_at_the_first_best_token() -> None:
    probs = probabilities(torch.tensor([[0.0, 2.0, 2.0], [5.0, -1.0, 0.0]]), GREEDY)
    assert probs.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert GREEDY.greedy and not Sampling(0.1).greedy


def test_low_precision_is_left_before_the_softmax() -> None:
    logits = rows().bfloat16()
    assert probabilities(logits, Sampling(1.0)).dtype == torch.float32
    torch.testing.assert_close(probabilities(logits, Sampling(0.7)), (logits.float() / 0.7).softmax(-1))


def test_draws_follow_the_row_and_the_generator() -> None:
    probs = torch.tensor([0.0, 0.25, 0.75, 0.0])
    generator = torch.Generator().manual_seed(0)
    drawn = [draw(probs, generator) for _ in range(4000)]
    assert set(drawn) == {1, 2} and abs(drawn.count(2) / 4000 - 0.75) < 0.03
    again = torch.Generator().manual_seed(0)
    assert drawn[:50] == [draw(probs, again) for _ in range(50)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": -1}, "top_k is -1"),
    ],
)
def test_settings_without_a_meaning_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**wrong)
