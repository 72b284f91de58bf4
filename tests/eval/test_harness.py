"""What a measurement counts, by hand."""

from dataclasses import replace

import pytest
import torch

from draftsmith.eval.harness import described, divergence, per_position, sizes, tau, tau_interval
from draftsmith.eval.tree import parse
from draftsmith.eval.verifier import Generation
from draftsmith.heads.kinds import KINDS
from draftsmith.target import Target


def generation(proposed: list[int], accepted: list[int]) -> Generation:
    return Generation([1] * (1 + sum(accepted) + len(accepted)), proposed, accepted, False, {})


RUNS = [generation([3, 3, 1], [3, 0, 1]), generation([3, 2], [1, 2])]


def test_tau_and_positions_are_vllms() -> None:
    assert tau(RUNS) == 1 + 7 / 5
    assert per_position(RUNS, 3) == [4 / 5, 2 / 4, 1 / 3]  # accepted there / drafts that proposed the position
    assert tau([]) == tau([generation([], [])]) == 1
    assert per_position([], 2) == [0, 0]


def test_the_drafts_sizes_are_means_over_passes() -> None:
    runs = [replace(RUNS[0], drafted=20), replace(RUNS[1], drafted=15)]
    assert sizes(runs) == {"mean_length": 12 / 5, "mean_nodes": 35 / 5}
    assert sizes([]) == {"mean_length": 0, "mean_nodes": 0}


@pytest.mark.parametrize(
    ("form", "confidence", "kind", "by"),
    [
        ("chain:8", True, "chain", None),
        ("chain:8,stop=0.3", True, "chain", "the confidence head"),
        ("chain:8,stop=0.3", False, "chain", "the draft's own probability"),
        ("tree:2x2x2", True, "tree", None),
        ("dynamic:14,k=3,depth=4", True, "dynamic", None),
        ("dynamic:14,k=3,depth=4,stop=0.3", True, "dynamic", "the draft's own probability"),
        ("beam:4x5", True, "dynamic", None),
    ],
)
def test_a_report_says_what_ends_a_draft(tiny_target: Target, form: str, confidence: bool, kind: str, by: str | None) -> None:
    medusa = KINDS["medusa"]
    head = medusa.create(tiny_target, medusa.Options(), None, 9, torch.arange(128), confidence)
    found = described(parse(form), head)
    assert (found["kind"], found["name"]) == (kind, form) and found["nodes"] in (8, 14, 20)
    assert found["stop"] == ({"below": 0.3, "by": by} if by else None)
    assert (found["paths"] is None) == (kind == "dynamic" or by is not None)


def test_the_interval_holds_tau_and_shrinks_with_prompts() -> None:
    few, many = tau_interval(RUNS, 0), tau_interval(RUNS * 30, 0)
    assert few[0] <= many[0] < tau(RUNS) < many[1] <= few[1]
    assert tau_interval(RUNS, 0) == few
    assert tau_interval(RUNS[:1], 0) == [tau(RUNS[:1])] * 2


@pytest.mark.parametrize("rank", [1, 5])
def test_the_margin_is_of_the_tokens_that_parted(lively_target: Target, rank: int) -> None:
    prompt = [5, 9, 33]
    logits = lively_target.model(torch.tensor([[*prompt, 70, 71]])).logits[0, -1]
    ranked = logits.argsort(descending=True).tolist()
    best, other = ranked[0], ranked[rank]
    ours, plain = [70, 71, other, 4], [70, 71, best, 8]
    found = divergence(lively_target, prompt, ours, plain)
    assert (found["token"], found["ours"], found["plain"]) == (2, [other], [best])
    assert found["margin"] == pytest.approx(float(logits[best] - logits[other]), abs=1e-4)
    assert divergence(lively_target, prompt, plain, ours)["margin"] == pytest.approx(found["margin"], abs=1e-4)


def test_a_text_that_stops_early_ties_with_nothing(lively_target: Target) -> None:
    found = divergence(lively_target, [5, 9], [70], [70, 71])
    assert (found["token"], found["ours"], found["plain"]) == (1, [], [71]) and found["margin"] > 1
