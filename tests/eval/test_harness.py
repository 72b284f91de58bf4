"""What a measurement counts, by hand."""

from dataclasses import replace

import pytest
import torch

from draftsmith.eval.harness import divergence, followed, measure, seeded
from draftsmith.eval.measures import (
    Answer,
    by_output_position,
    conditional,
    counters,
    lengths,
    measures,
    per_position,
    repetitiveness,
    sizes,
    tau,
)
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.tree import parse
from draftsmith.eval.verifier import Generation
from draftsmith.heads.kinds import KINDS
from draftsmith.sampling import Sampling
from draftsmith.target import Target


def generation(proposed: list[int], accepted: list[int]) -> Generation:
    return Generation([1] * (1 + sum(accepted) + len(accepted)), proposed, accepted, False, {"prefill": 0.1, "total": 1.1})


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
    found = HeadProposer(head, parse(form)).described()
    assert (found["kind"], found["name"]) == (kind, form) and found["nodes"] in (8, 14, 20)
    assert found["stop"] == ({"below": 0.3, "by": by} if by else None)
    assert (found["paths"] is None) == (kind == "dynamic" or by is not None)


def answers(runs: list[Generation], questions: list[int] | None = None) -> list[Answer]:
    numbered = questions or range(len(runs))
    return [Answer(question, 0, "all", [1, 2], run, None) for question, run in zip(numbered, runs, strict=True)]


def test_the_interval_holds_tau_and_draws_questions() -> None:
    few, many = (measures(answers(RUNS * n), 3, 0)["tau_interval"] for n in (5, 60))
    assert few[0] < many[0] < tau(RUNS) < many[1] < few[1]
    turns = measures(answers(RUNS * 5, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]), 3, 0)["tau_interval"]
    assert turns == pytest.approx([tau(RUNS)] * 2)  # every question has the same two turns: nothing varies


# passes without a draft, as look-ups have them
SPARSE = [generation([0, 3, 0, 2], [0, 2, 0, 2]), generation([0, 0], [0, 0])]


def test_passes_without_a_draft_count_for_tau_and_not_for_vllms_mean() -> None:
    found = measures(answers(SPARSE), 3, 0)
    assert found["tau"] == 1 + 4 / 6 and found["verify_passes"] == 6
    assert found["mean_acceptance_length"] == 1 + 4 / 2
    assert found["tau_per_request"] == (2 + 1) / 2
    assert found["counters"] | {"num_draft_tokens": 0} == {
        "num_drafts": 2, "num_draft_tokens": 0, "num_accepted_tokens": 4, "num_accepted_tokens_per_pos": [2, 2, 0],
    }  # fmt: skip
    assert found["accepted_per_position"] == [1, 1, 0] and found["conditional_per_position"] == [1, 1, 0]
    assert found["accepted_lengths"] == [4, 0, 2, 0]


def test_conditional_acceptance_is_of_the_drafts_that_came_so_far() -> None:
    assert conditional(RUNS, 3) == [4 / 5, 2 / 3, 1 / 1]
    assert conditional(RUNS, 4)[3] is None
    assert lengths(RUNS, 3) == [1, 2, 1, 1] and counters(RUNS, 2)["num_accepted_tokens_per_pos"] == [4, 2]


def test_tau_by_output_position_counts_a_pass_where_it_began() -> None:
    run = generation([3] * 20, [3] * 10 + [0] * 10)  # forty tokens in ten passes, then ten in ten
    first, second = by_output_position([run])
    assert (first["from"], first["to"], first["passes"], first["tau"]) == (0, 32, 8, 4)
    assert (second["from"], second["passes"], second["tau"]) == (32, 12, 1 + 6 / 12)


@pytest.mark.parametrize(("prompt", "output", "share"), [
    ([1, 2, 3, 4], [1, 2, 3, 4], 1 / 1), ([9], [1, 2, 3, 4, 1, 2, 3, 4], 1 / 5), ([9], [1, 2, 3], 0.0),
])  # fmt: skip
def test_repetitiveness_is_the_share_of_runs_of_four_seen_before(prompt: list[int], output: list[int], share: float) -> None:
    assert repetitiveness([Answer(0, 0, "all", prompt, Generation(output, [], [], False, {}), None)]) == share


# -- a measurement ---------------------------------------------------------------------------------------------


def asked(later: tuple[str, ...] = ()) -> list[Prompt]:
    said = ["tell me of rivers", "and of stones", "why?", "a b c d", "how"]
    return [
        Prompt([{"role": "user", "content": text}], "even" if i % 2 == 0 else "odd", later=later, id=f"q{i}")
        for i, text in enumerate(said)
    ]


def medusa_proposer(target: Target) -> HeadProposer:
    kind = KINDS["medusa"]
    torch.manual_seed(0)
    return HeadProposer(kind.create(target, kind.Options(), None, 3, torch.arange(128)).eval(), parse("chain:3"))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9)], ids=["greedy", "T=0.9"])
def test_a_measurement_is_the_same_at_any_batch_size(tiny_target: Target, sampling: Sampling) -> None:
    timed = {"batch", "ttft", "tpot", "tokens_per_s", "baseline_tokens_per_s", "speedup", "speedup_interval", "time",
             "peak_memory", "per_prompt", "by_category"}  # fmt: skip
    one, two, four = (measure(tiny_target, medusa_proposer(tiny_target), asked(), 10, sampling, batch=n) for n in (1, 2, 4))
    for found in (two, four):
        assert {k: v for k, v in found.items() if k not in timed} == {k: v for k, v in one.items() if k not in timed}
        for name in ("id", "turn", "accepted", "passes", "drafted"):
            assert [row[name] for row in found["per_prompt"]] == [row[name] for row in one["per_prompt"]]
    assert one["lossless"] is (True if sampling.greedy else None)
    assert one["baseline_prompts"] == one["prompts"] == 5 and one["speedup"] > 0
    assert set(one["categories"]) == {"even", "odd"} and one["by_category"]["odd"]["prompts"] == 2
    assert sum(one["time"].values()) == pytest.approx(1)


@pytest.mark.parametrize("batch", [1, 2])
def test_further_turns_are_asked_on_the_targets_own_answers(tiny_target: Target, batch: int) -> None:
    prompts = [Prompt([{"role": "user", "content": text}], later=("b",), id=text) for text in "ac"]
    found = measure(tiny_target, medusa_proposer(tiny_target), prompts, 3, batch=batch)
    assert [(row["id"], row["turn"]) for row in found["per_prompt"]] == [("a", 0), ("a", 1), ("c", 0), ("c", 1)]
    assert found["prompts"] == 2 and found["lossless"]


def test_a_further_turn_stands_behind_the_answer(tiny_target: Target) -> None:
    (first,) = [Prompt([{"role": "user", "content": "a"}], later=("b", "c"))]
    answer = tiny_target.tokenizer("yes", add_special_tokens=False)["input_ids"]
    second = followed(first, [*answer, 2], tiny_target)
    assert [m["content"] for m in second.messages] == ["a", "yes", "b"] and second.later == ("c",)
    assert second.messages[1]["role"] == "assistant"


def test_a_question_that_outgrows_the_context_is_left_out(tiny_target: Target) -> None:
    prompts = asked(later=tuple(["again and again"] * 9))[:1]
    found = measure(tiny_target, medusa_proposer(tiny_target), prompts, 8, baseline=0)
    assert 1 <= len(found["per_prompt"]) < 10 and found["speedup"] is None and found["lossless"] is None


def test_the_sample_says_who_wrote_what(lively_target: Target, tiny_target: Target) -> None:
    found = measure(tiny_target, medusa_proposer(tiny_target), asked()[:1], 10)
    assert found["sample"][0]["by"] == "plain"
    assert {piece["by"] for piece in found["sample"]} <= {"plain", "draft", "bonus"}


def test_a_seed_of_ones_own() -> None:
    draws = {float(torch.rand((), generator=seeded(*key))) for key in [(0, 1, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0)]}
    assert len(draws) == 4 and float(torch.rand((), generator=seeded(0, 0, 0))) in draws


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
