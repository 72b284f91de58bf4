"""Look-ups are lossless: greedy texts are the plain ones at any batch size, sampled ones have the target's distribution."""

from typing import Any

import pytest
import torch
from tables import NUCLEUS, WARM, TableTarget, exact, p_value, remember_rows, tables

from draftsmith.eval.lookahead import Lookahead
from draftsmith.eval.lookups import LookUp
from draftsmith.eval.ngram import NGram
from draftsmith.eval.suffix import Suffix
from draftsmith.eval.verifier import Request, decode
from draftsmith.sampling import Sampling
from draftsmith.target import Target

LOOKUPS = {
    "ngram": lambda: NGram(4, 3, 1),
    "suffix": lambda: Suffix(6),
    "suffix with a memory": lambda: Suffix(6, memory=3),
    "suffix trees": lambda: Suffix(4, nodes=7, memory=3),
    "lookahead": lambda: Lookahead(4, 4, 3),
    "lookahead alone": lambda: Lookahead(3, 3, 4, from_text=False),
}
NEW = 24


def asked(count: int) -> list[Request]:
    """Prompts with a run that stands twice, answered with 1 to NEW tokens, so that they end at different times."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for i in range(count):
        run = torch.randint(3, 111, (1 + i % 9,), generator=generator).tolist()
        found.append(Request([*run, 50 + i, *run], NEW - (7 * i) % NEW))
    return found


@pytest.fixture(scope="module")
def plain(tiny_target: Target, lively_target: Target) -> dict[str, list[list[int]]]:
    return {
        target.name: [generation.tokens for generation in decode(target, None, asked(20)).generations]
        for target in (tiny_target, lively_target)
    }


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", LOOKUPS)
def test_greedy_texts_are_the_plain_ones(
    tiny_target: Target, lively_target: Target, plain: dict[str, list[list[int]]], name: str, batch: int
) -> None:
    """On a target that repeats itself and on one that wanders."""
    for target, least in ((tiny_target, 2), (lively_target, 0)):
        proposer = LOOKUPS[name]()
        run = decode(target, proposer, asked(20), batch=batch)
        assert [generation.tokens for generation in run.generations] == plain[target.name]
        assert max(each.active for each in run.passes) == batch
        proposed = [depth for generation in run.generations for depth in generation.proposed]
        assert proposer.length >= max(proposed) > 0
        accepted = {count for generation in run.generations for count in generation.accepted}
        assert max(accepted) >= least


@pytest.mark.parametrize("room", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("name", LOOKUPS)
def test_the_contexts_end_cuts_drafts(tiny_target: Target, monkeypatch: pytest.MonkeyPatch, name: str, room: int) -> None:
    """The target has 64 positions; a prompt that repeats itself leaves room for so many."""
    request = Request(([5, 6, 7] * 64)[: 64 - room], 100)
    expected = decode(tiny_target, None, [request]).generations[0].tokens
    verify, furthest = tiny_target.verify, [0]
    monkeypatch.setattr(tiny_target, "verify", lambda t, at, *rest: furthest.append(int(at.max())) or verify(t, at, *rest))
    (found,) = decode(tiny_target, LOOKUPS[name](), [request]).generations
    assert found.tokens == expected and max(furthest) < 64


# -- sampling: the exact distribution ---------------------------------------------------------------------------

FEW, TOKENS, DRAWS = 4, 4, 4000
REPEATING = [0, 1, 2, 3, 0, 1, 3, 2, 0, 1, 2, 1, 1, 0, 2, 3, 3, 0]  # every token, with many of its followers


def texts_drawn(target: Any, proposer: LookUp, sampling: Sampling, draws: int = DRAWS) -> tuple[torch.Tensor, float]:
    """How often every text was emitted [FEW ** TOKENS], and how many drafts were accepted a pass."""
    generator = torch.Generator().manual_seed(7)
    counts = torch.zeros(FEW**TOKENS, dtype=torch.float64)
    accepted = passes = 0
    runs = decode(target, proposer, [Request(REPEATING, TOKENS, generator)] * draws, sampling, batch=4)
    for generation in runs.generations:
        counts[sum(token * FEW ** (TOKENS - 1 - i) for i, token in enumerate(generation.tokens))] += 1
        accepted += sum(generation.accepted)
        passes += len(generation.accepted)
    return counts, accepted / passes


@pytest.mark.parametrize(
    ("name", "sampling"), [*((name, WARM) for name in LOOKUPS), ("suffix", NUCLEUS), ("lookahead", NUCLEUS)]
)
def test_sampled_texts_have_the_targets_distribution(monkeypatch: pytest.MonkeyPatch, name: str, sampling: Sampling) -> None:
    remember_rows(monkeypatch)
    target: Any = TableTarget(tables(1, vocab=FEW))
    counts, accepted = texts_drawn(target, LOOKUPS[name](), sampling)
    assert accepted > (0.1 if "alone" in name else 0.3)
    assert p_value(counts, exact(target, sampling, TOKENS, REPEATING)) > 1e-3


def test_the_test_of_the_distribution_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verified by a target that differs a little from the one whose distribution is expected."""
    remember_rows(monkeypatch)
    target: Any = TableTarget(tables(1, vocab=FEW))
    other: Any = TableTarget(tables(1, vocab=FEW) + tables(2, 0.25, vocab=FEW))
    counts, _ = texts_drawn(other, LOOKUPS["suffix"](), WARM)
    assert p_value(counts, exact(target, WARM, TOKENS, REPEATING)) < 1e-6
