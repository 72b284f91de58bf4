"""Typical acceptance by hand."""

import math

import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.eval.tree import NONE, chain, full
from draftsmith.eval.typical import Typical, accept_typical, read_typical
from draftsmith.eval.verifier import generate
from draftsmith.heads.base import Draft, Shape
from draftsmith.heads.kinds import KINDS
from draftsmith.sampling import GREEDY, Sampling
from draftsmith.target import Target

EVEN = [0.25, 0.25, 0.25, 0.25]
SHARP = [0.97, 0.01, 0.01, 0.01]
HALF = [0.5, 0.3, 0.2, 0.0]
WIDE = Typical(0.09, 0.3)  # Medusa's


def accept(rows: list[list[float]], tokens: list[int], shape: Shape, typical: Typical = WIDE) -> tuple[list[int], int]:
    probs = torch.tensor(rows)
    return accept_typical(probs.log(), probs, Draft(tokens, shape), typical)


def test_medusas_numbers() -> None:
    assert read_typical("0.09") == read_typical("0.09,0.3") == WIDE
    assert read_typical("0.2, 1.5") == Typical(0.2, 1.5)
    assert WIDE.name == "typical acceptance ε=0.09 δ=0.3"


@pytest.mark.parametrize("text", ["", "x", "0.09,", "0.1,0.2,0.3", "0", "1", "-0.1", "0.09,0", "0.09,-1", "nan", "0.09,inf"])
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--lossy-typical .* 0\.09,0\.3"):
        read_typical(text)


@pytest.mark.parametrize(
    ("row", "token", "typical", "accepted"),
    [
        (EVEN, 3, WIDE, True),  # H = ln 4: 0.25 > min(0.09, 0.3 / 4)
        (SHARP, 1, WIDE, False),  # H = 0.168: 0.01 < min(0.09, 0.25)
        (HALF, 2, WIDE, True),  # 0.2 > 0.09
        (HALF, 2, Typical(0.25, 9.0), False),  # eps rules: 0.2 < 0.25
        (HALF, 1, Typical(0.25, 9.0), True),
        (HALF, 2, Typical(0.9, 0.5), True),  # H = 1.0297, 0.5 e^-H = 0.1786 < 0.2
        (HALF, 2, Typical(0.9, 0.57), False),  # 0.57 e^-H = 0.2036
        (EVEN, 0, Typical(0.25, 9.0), False),  # more than the threshold, not as much
        (HALF, 3, Typical(1e-6, 1e-6), False),
    ],
)
def test_one_token(row: list[float], token: int, typical: Typical, accepted: bool) -> None:
    path, _ = accept([row, SHARP], [token], chain(1), typical)
    assert path == ([0, 1] if accepted else [0])


def test_the_thresholds_of_the_table_above() -> None:
    entropy = -sum(p * math.log(p) for p in HALF if p)
    assert 0.5 * math.exp(-entropy) == pytest.approx(0.1786, abs=1e-4)


def test_behind_the_path_comes_the_targets_likeliest_token() -> None:
    assert accept([EVEN, HALF, SHARP], [2, 1], chain(2)) == ([0, 1, 2], 0)
    assert accept([SHARP, HALF, SHARP], [2, 1], chain(2)) == ([0], 0)  # nothing below a rejected token counts
    assert accept([[0.1, 0.2, 0.7, 0.0]], [], NONE) == ([0], 2)


def test_the_longest_path_wins_even_over_likelier_tokens() -> None:
    rows = [[0.6, 0.2, 0.2, 0.0], SHARP, EVEN, SHARP, SHARP, SHARP, SHARP]
    tokens = [0, 1, 1, 2, 3, 2]  # below the likely 0 all is refused, below 1 all is accepted
    assert accept(rows, tokens, full([2, 2]))[0] == [0, 2, 5]


def test_of_equally_long_paths_the_likelier_wins() -> None:
    rows = [[0.4, 0.5, 0.1, 0.0], [0.9, 0.1, 0.0, 0.0], [0.6, 0.4, 0.0, 0.0], *[SHARP] * 4]
    tokens = [0, 1, 0, 1, 0, 1]  # 0.4 * 0.9 = 0.36 beats 0.5 * 0.6 = 0.3
    assert accept(rows, tokens, full([2, 2]))[0] == [0, 1, 3]
    assert accept([[0.3, 0.3, 0.4, 0.0], SHARP, SHARP], [0, 1], full([2]))[0] == [0, 1]  # of equals the first


def test_only_drafts_at_a_temperature_are_judged(lively_target: Target) -> None:
    head = KINDS["medusa"].create(lively_target, KINDS["medusa"].Options(), None, 3, torch.arange(128)).eval()
    for sampling, sampled in ((GREEDY, False), (Sampling(1.0), True)):
        with pytest.raises(UserError, match="--lossy-typical.*--temperature"):
            generate(lively_target, head, [5], chain(2), 4, sampling, sampled, typical=WIDE)
    texts = [
        generate(lively_target, None, [5], NONE, 9, s, typical=t).tokens for s, t in ((GREEDY, None), (Sampling(1.0), WIDE))
    ]
    assert texts[0] == texts[1]  # with no drafts only the likeliest tokens are left
