"""Why τ is what it is: heads with one known flaw each, and what every experiment makes of it."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import make_head
from scripted import ScriptedHead
from torch import Tensor

from draftsmith.cli_diagnose import diagnose as diagnose_command
from draftsmith.console import command_line
from draftsmith.data.chat import Encoded, encode
from draftsmith.data.conversations import Conversation
from draftsmith.data.extract import extract
from draftsmith.data.generation import continue_batch
from draftsmith.errors import UserError
from draftsmith.eval import experiments, masks, renderings
from draftsmith.eval.case import Case, Part, between, interval
from draftsmith.eval.curve import outlook
from draftsmith.eval.diagnose import MATERIAL, diagnose, ranked, table, verdict, write
from draftsmith.eval.masks import SHIFTS, shifted, template_mask
from draftsmith.eval.ran import read_ran
from draftsmith.eval.tree import NONE, chain
from draftsmith.eval.verifier import generate
from draftsmith.eval.walk import Text, Walked, by_depth, likelihood, replayed, tau, walk, walk_all
from draftsmith.sampling import Sampling
from draftsmith.target import Target

PROMPTS = [[5, 9, 40], [17, 3, 88, 60], [70, 71]]
LENGTH, MANY = 4, 24


def greedy_texts(target: Target, prompts: list[list[int]] = PROMPTS) -> list[Text]:
    return [Text(prompt + generate(target, None, prompt, NONE, MANY).tokens, len(prompt)) for prompt in prompts]


@cache
def likeliest_and_least(target: Target, ids: tuple[int, ...]) -> tuple[int, int]:
    logits = target.logits(target.features(torch.tensor([ids]), []).last[0, -1])
    return int(logits.argmax()), int(logits.argmin())


class Knowing(ScriptedHead):
    """Drafts the target's greedy token wherever ``knows(place of the token, depth)``, and another one elsewhere."""

    def __init__(self, target: Target, knows: Callable[[int, int], bool], target_ids: Tensor | None = None) -> None:
        super().__init__(target.vocab_size, torch.arange(target.vocab_size) if target_ids is None else target_ids)
        self.target, self.knows = target, knows

    def logits(self, committed: list[int], path: list[int]) -> Tensor:
        # begin is given the tokens behind the first one, so a token's place is one further
        read = (self.first, *committed, *path)
        best, worst = likeliest_and_least(self.target, read)
        row = torch.zeros(self.config.target.vocab_size)
        row[best if self.knows(len(read), len(path)) else worst] = 50.0
        return row

    def begin(self, state: dict, features: Any, ids: Tensor, target: Target) -> Any:
        if not state["committed"]:
            self.first = int(ids[0])
        return super().begin(state, features, ids, target)


def case(target: Target, head: Any, texts: list[Text], **rest: Any) -> Case:
    return Case(target, head, LENGTH, texts, walk_all(target, head, texts, LENGTH), **rest)


def walked(accepted: list[int], room: int = LENGTH, sure: list[float] | None = None, category: str = "all") -> Walked:
    rows = len(accepted)
    values = np.array(accepted)
    left = np.minimum(room, rows - np.arange(rows))
    values = np.minimum(values, left)
    ease = np.full(rows, 0.5) if sure is None else np.array(sure)
    return Walked(values, values, left, ease, np.zeros(rows, bool), np.zeros(rows), category)


# -- the walk --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["eagle3", "medusa-own", "hydra", "dflash-markov", "mtp", "draft-model", "peagle", "redrafter"]
)
def test_the_walk_counts_what_the_verifier_accepts(lively_target: Target, name: str) -> None:
    head = make_head(lively_target, name)
    texts = greedy_texts(lively_target)
    length = min(LENGTH, head.deepest or LENGTH)
    runs = [generate(lively_target, head, text.ids[: text.start], chain(length), MANY) for text in texts]
    # the verifier's last draft may reach beyond the text, where nobody knows what would have been accepted
    for text, run in zip(texts, runs, strict=True):
        own, row = walk(lively_target, head, text, length), 0
        for accepted in run.accepted[:-1]:
            assert own.accepted[row] == accepted
            row += accepted + 1


@pytest.mark.parametrize("every", [2, 3, 5])
def test_replayed_walks_give_the_verifiers_tau(lively_target: Target, every: int) -> None:
    head = Knowing(lively_target, lambda place, depth: place % every > 0)
    texts = greedy_texts(lively_target)
    runs = [generate(lively_target, head, text.ids[: text.start], chain(LENGTH), MANY) for text in texts]
    emitted, passes = sum(len(run.tokens) - 1 for run in runs), sum(len(run.accepted) for run in runs)
    own = walk_all(lively_target, head, texts, LENGTH)
    assert tau(own) > 1.2
    assert replayed(own) == pytest.approx(emitted / passes, rel=0.1)  # the ends of the texts differ by a token


def test_tau_counts_whole_prefixes_and_places_with_room() -> None:
    own = walked([2, 0, 1, 3, 0, 0])
    # depth 1: 3 of 6 places; depth 2: the second draft of the fifth place would be beyond the text's 6 rows
    assert by_depth([own]) == [3 / 6, 2 / 5, 1 / 4, 0 / 3]
    assert tau([own]) == pytest.approx(1 + 3 / 6 + 2 / 5 + 1 / 4)


# -- one flaw, one experiment ----------------------------------------------------------------------------------------------


def test_vocabulary_misses_are_counted_as_far_as_they_cost(lively_target: Target) -> None:
    texts = greedy_texts(lively_target)
    written = sorted({token for text in texts for token in text.ids[text.start :]})
    missing = written[::3]
    inside = torch.tensor([token for token in range(lively_target.vocab_size) if token not in missing])
    found = case(lively_target, Knowing(lively_target, lambda *_: True, inside), texts)
    part = experiments.vocabulary(found)
    whole = tau(walk_all(lively_target, Knowing(lively_target, lambda *_: True), texts, LENGTH))
    assert part.evidence["tau had those been hits"] == pytest.approx(whole)
    assert part.share == pytest.approx(whole - tau(found.own)) and whole - tau(found.own) > 0.3
    assert verdict(ranked([part]))[0] == "vocabulary"


def test_a_small_vocabulary_costs_nothing_where_the_target_needs_no_more(lively_target: Target) -> None:
    texts = greedy_texts(lively_target)
    inside = torch.tensor(sorted({token for text in texts for token in text.ids}))
    part = experiments.vocabulary(case(lively_target, Knowing(lively_target, lambda place, _: place % 2 > 0, inside), texts))
    assert part.share is not None and part.share < 0.1  # the label behind a text's last token may be another
    whole = torch.arange(lively_target.vocab_size)
    assert (
        experiments.vocabulary(Case(lively_target, Knowing(lively_target, lambda *_: True, whole), LENGTH, [], [])).share == 0
    )


def test_error_growth_is_what_true_features_would_bring(lively_target: Target) -> None:
    class Recurrent(Knowing):
        kind = "eagle3"

    head = Recurrent(lively_target, lambda place, depth: depth < 2)  # right as long as it is near the target's states
    part = experiments.growth(case(lively_target, head, greedy_texts(lively_target)))
    assert part.evidence["right down to each depth"] == [1, 1, 0, 0]
    assert part.evidence["the same with true features"] == [1, 1, 1, 1]
    assert part.share == pytest.approx(2) and "head.depths" in part.next_step


def test_error_growth_does_not_apply_to_heads_that_read_no_states_of_their_own(lively_target: Target) -> None:
    part = experiments.growth(case(lively_target, make_head(lively_target, "medusa-own"), greedy_texts(lively_target)))
    assert part.share is None and "does not apply" in part.says


def law(steps: np.ndarray, end: float = 2.4, drop: float = 1.2, power: float = 0.5) -> np.ndarray:
    return end - drop * (steps / steps[-1]) ** -power


@pytest.mark.parametrize("power", [0.3, 0.5, 1.0])
def test_the_outlook_follows_a_saturating_curve(power: float) -> None:
    steps = np.arange(10.0, 400, 10)
    noise = np.random.default_rng(0).normal(0, 0.01, len(steps))
    ahead = outlook(steps, law(steps, power=power) + noise, 4.0)
    assert ahead is not None
    assert ahead.doubled == pytest.approx(1.2 * (1 - 2**-power), abs=0.1)
    assert ahead.doubled_interval[0] - 0.02 <= 1.2 * (1 - 2**-power) <= ahead.doubled_interval[1] + 0.02
    assert ahead.ever_interval[0] - 0.05 <= 1.2 <= ahead.ever_interval[1] + 0.05


def test_the_outlook_knows_its_limits() -> None:
    steps = np.arange(10.0, 400, 10)
    flat = outlook(steps, np.full(len(steps), 2.0), 4.0)
    assert flat is not None and flat.doubled == pytest.approx(0, abs=1e-6)
    rising = outlook(steps, 1 + steps / 400, 2.1)
    assert rising is not None and rising.ever <= 2.1 - 1 + 0.05
    assert outlook(steps[:3], law(steps)[:3], 4.0) is None


def curve(steps: np.ndarray, taus: np.ndarray) -> list[dict[str, Any]]:
    return [{"part": "train", "step": int(step), "tau_sim": float(tau)} for step, tau in zip(steps, taus, strict=True)]


def test_a_rising_curve_is_undertraining_and_few_steps_are_a_fault(lively_target: Target) -> None:
    base = Case(lively_target, make_head(lively_target, "eagle3"), LENGTH, [], [])
    steps = np.arange(10.0, 310, 10)
    rising = experiments.training(replace(base, curve=curve(steps, law(steps, 3.0, 1.8, 0.4))))
    settled = experiments.training(replace(base, curve=curve(steps, 2 - np.exp(-steps / 20))))
    assert verdict(ranked([rising]))[0] == "training" and not rising.fault
    assert settled.share is not None and settled.share < MATERIAL / 2
    few = experiments.training(replace(base, curve=curve(np.array([10.0, 20.0]), np.array([1.05, 1.15]))))
    assert few.fault and few.share == pytest.approx(0.1) and verdict(ranked([few]))[0] == "training"
    assert experiments.training(base).share is None


def row_of(text: Text) -> Encoded:
    ids = np.array([*text.ids, 2], np.int32)
    return Encoded(ids, np.arange(len(ids)) >= text.start)


def test_responses_of_another_are_told_from_the_targets_own(lively_target: Target) -> None:
    texts = greedy_texts(lively_target, [[i, i + 1, i + 2] for i in range(3, 90, 12)])
    head = make_head(lively_target, "eagle3")
    rng = np.random.default_rng(0)
    foreign = [Text(text.ids[: text.start] + rng.integers(3, 120, MANY).tolist(), text.start) for text in texts]
    theirs, ours = (
        experiments.responses(case(lively_target, head, texts, taught=[row_of(text) for text in some], unseen=some))
        for some in (foreign, texts)
    )
    assert theirs.fault and theirs.evidence["surprise, nats a token"] > 1 and verdict(ranked([theirs]))[0] == "responses"
    assert not ours.fault and ours.evidence["training tokens that are the target's greedy choice"] == 1
    assert ours.share == pytest.approx(0, abs=1e-6)


def test_what_the_target_draws_does_not_surprise_it(lively_target: Target) -> None:
    prompts = [[i, i + 5] for i in range(3, 103)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = continue_batch(lively_target, prompts, Sampling(1.0), MANY)
    found = [likelihood(lively_target, Text(p + text.ids, 2)) for p, text in zip(prompts, drawn, strict=True)]
    low, high = interval(found, experiments.surprise)
    assert abs(experiments.surprise(found)) < high - low < 0.2


def test_equal_ease_takes_out_how_hard_a_text_is() -> None:
    def text(easy: int, hard: int, knows: int) -> Walked:  # easy places are drafted right, of hard ones none
        return walked([knows] * easy + [0] * hard, 1, [0.9] * easy + [0.1] * hard)

    own, harder, worse = [text(30, 10, 1)], [text(10, 30, 1)], [text(30, 10, 0)]
    assert tau(own) - tau(harder) == pytest.approx(0.5)
    assert experiments.at_equal_ease(own, harder) == pytest.approx(tau(own))
    assert experiments.at_equal_ease(own, worse) == pytest.approx(1)


def test_temperature_and_domain_are_differences_between_texts(lively_target: Target) -> None:
    good, bad = [walked([1, 0] * 10)] * 6, [walked([0, 0] * 10)] * 6
    base = Case(lively_target, make_head(lively_target, "eagle3"), LENGTH, [], good)
    assert experiments.temperature(base).share is None
    hot = experiments.temperature(replace(base, hot=bad, temperature=0.8))
    assert hot.share == pytest.approx(0.5) and "0.8" in hot.next_step
    assert experiments.domain(base).share is None
    away = experiments.domain(replace(base, own=bad, home=good))
    assert away.share == pytest.approx(0.5) and away.evidence["tau on the run's own held-out prompts"] == pytest.approx(1.5)
    mixed = [walked([1, 0] * 10, category="chat"), walked([0, 0] * 10, category="code")] * 3
    part = experiments.domain(replace(base, own=mixed, mix={"chat": 1.0}))
    assert part.evidence["tau by category"] == {"chat": pytest.approx(1.5), "code": pytest.approx(1.0)}
    assert part.share == pytest.approx(0.25) and "code" in part.next_step


# -- masks -----------------------------------------------------------------------------------------------------------------


def chats(tokenizer: Any, count: int = 6) -> list[Encoded]:
    words = ["the sea", "an ant in the tin", "hot tea", "ten men", "no", "oh well then"]
    rows = []
    for i in range(count):
        messages = [{"role": "user", "content": words[i % 6]}, {"role": "assistant", "content": words[(i + 2) % 6]}]
        rows.append(encode(Conversation(messages, "a", i), tokenizer, None))
    return rows


def test_the_templates_mask_is_found_in_the_ids_alone(tiny_target: Target) -> None:
    found = Case(tiny_target, make_head(tiny_target, "eagle3"), LENGTH, [], [])
    talk = [
        {"role": role, "content": text}
        for role, text in (("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "e"))
    ]
    for row in [*chats(tiny_target.tokenizer), encode(Conversation(talk, "a", 1), tiny_target.tokenizer, None)]:
        assert np.array_equal(template_mask(row.ids, found), row.mask)


@pytest.mark.parametrize("shift", [0, *SHIFTS])
def test_a_shifted_mask_in_a_store_is_named(tiny_target: Target, shift: int) -> None:
    rows = [replace(row, mask=shifted(row.mask, shift) if shift else row.mask) for row in chats(tiny_target.tokenizer)]
    texts = greedy_texts(tiny_target)
    part = masks.mask(case(tiny_target, make_head(tiny_target, "eagle3"), texts, taught=rows, recorded=True))
    assert part.fault == bool(shift)
    assert part.evidence["stored masks, by tokens late"] == {str(shift): 1.0}
    if shift:
        assert f"{abs(shift)} token" in part.says and ("late" if shift > 0 else "early") in part.says


def test_a_mask_that_supervises_the_user_is_named(tiny_target: Target) -> None:
    rows = [replace(row, mask=np.ones_like(row.mask)) for row in chats(tiny_target.tokenizer)]
    part = masks.mask(
        case(tiny_target, make_head(tiny_target, "eagle3"), greedy_texts(tiny_target), taught=rows, recorded=True)
    )
    assert part.fault and "no reply's" in part.says


@pytest.mark.parametrize("shift", [0, -1, -2, 1])
def test_a_head_betrays_the_early_mask_it_was_taught_with(lively_target: Target, shift: int) -> None:
    texts = greedy_texts(lively_target, [list(range(i, i + 10)) for i in range(5, 65, 10)])
    ids = [np.array(text.ids, np.int32) for text in texts]
    right = (np.arange(len(ids[0])) >= texts[0].start) & (np.arange(len(ids[0])) < len(ids[0]) - 4)
    taught = masks.rows_of(shifted(right, shift) if shift else right)
    head = Knowing(lively_target, lambda place, _: bool(taught[place - 2]))
    part = masks.mask(case(lively_target, head, texts, taught=[Encoded(own, right) for own in ids]))
    assert part.fault == (shift < 0)  # a late one is told from its store alone
    if part.fault:
        assert "what the head knows" in part.says and "too early" in part.says


# -- renderings ------------------------------------------------------------------------------------------------------------

DEFAULT = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nbe kind<|im_end|>\n' }}{% endif %}"


@pytest.fixture
def kind_target(tiny_target: Target, tiny_tokenizer_factory: Callable[..., Any]) -> Target:
    """The tiny target with a template that gives a system turn to a chat without one."""
    plain = tiny_tokenizer_factory("plain")
    return Target(tiny_target.model, tiny_tokenizer_factory(DEFAULT + plain.chat_template), "kind")


def test_the_default_system_turn_is_found(kind_target: Target, tiny_target: Target) -> None:
    opening = renderings.added_opening(kind_target.tokenizer)
    assert kind_target.tokenizer.decode(opening) == "<|im_start|>system\nbe kind<|im_end|>\n"
    assert renderings.added_opening(tiny_target.tokenizer) == []


def served_texts(target: Target, count: int = 4) -> list[Text]:
    return [
        Text(row.ids[: np.flatnonzero(row.mask)[-1]].tolist(), int(np.flatnonzero(row.mask)[0]))
        for row in chats(target.tokenizer, count)
    ]


def test_a_store_without_the_default_system_turn_is_named(kind_target: Target, tiny_target: Target) -> None:
    head, texts = make_head(kind_target, "eagle3"), served_texts(kind_target)
    bare, sound = chats(tiny_target.tokenizer), chats(kind_target.tokenizer)
    spoilt = renderings.template(case(kind_target, head, texts, taught=bare, recorded=True))
    assert spoilt.fault and "'<|im_start|>system\\nbe kind<|im_end|>'" in spoilt.says
    assert not renderings.template(case(kind_target, head, texts, taught=sound, recorded=True)).fault
    assert not renderings.template(case(kind_target, head, texts, taught=bare)).fault  # encoded anew, they are no record


def test_a_head_that_knows_bare_prompts_alone_is_named(kind_target: Target) -> None:
    opening = renderings.added_opening(kind_target.tokenizer)

    class Bare(Knowing):
        def logits(self, committed: list[int], path: list[int]) -> Tensor:
            self.knows = lambda *_: [self.first, *committed][: len(opening)] != opening
            return super().logits(committed, path)

    part = renderings.template(case(kind_target, Bare(kind_target, lambda *_: True), served_texts(kind_target)))
    assert part.fault and part.share is not None and part.share > 1


def test_another_template_in_the_recipe_is_named(kind_target: Target) -> None:
    texts = served_texts(kind_target)
    cut = len(renderings.added_opening(kind_target.tokenizer))
    head = make_head(kind_target, "eagle3")
    other = renderings.template(case(kind_target, head, texts, asked=[text.ids[cut : text.start] for text in texts]))
    assert other.fault and "recipe's target" in other.says
    same = renderings.template(case(kind_target, head, texts, asked=[text.ids[: text.start] for text in texts]))
    assert not same.fault


# -- the verdict -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "dominant", "order"),
    [
        ([Part("a", "", 0.1), Part("b", "", 0.2), Part("c", "")], "none", "bac"),
        ([Part("a", "", 0.1), Part("b", "", MATERIAL), Part("c", "")], "b", "bac"),
        ([Part("a", "", 0.01, fault=True), Part("b", "", 0.9)], "a", "ab"),
        ([Part("a", "", 0.01, fault=True), Part("b", "", 0.3, fault=True)], "b", "ba"),
        ([Part("a", ""), Part("b", "", 0.0)], "none", "ba"),
        ([Part("a", "", 0.9, (-0.1, 1.9)), Part("b", "", 0.3, (0.1, 0.5))], "b", "ab"),
    ],
    ids=["none", "largest", "fault", "faults", "nothing", "by chance"],
)
def test_the_rule(parts: list[Part], dominant: str, order: str) -> None:
    assert "".join(part.name for part in ranked(parts)) == order
    name, because = verdict(ranked(parts))
    assert name == dominant and (name != "none" or "no part costs 0.25" in because)


def test_intervals_hold_the_value_and_shrink_with_texts() -> None:
    rng = np.random.default_rng(1)
    found = list(rng.normal(1, 1, 400))
    low, high = interval(found, lambda some: float(np.mean(some)))
    assert low < np.mean(found) < high and math.isclose(high - low, 4 / 20, rel_tol=0.3)
    low, high = between(found, list(rng.normal(0, 1, 400)), lambda a, b: float(np.mean(a) - np.mean(b)))
    assert 0.7 < low < high < 1.3


# -- a whole run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """A run's directory as training leaves it, with an untrained head."""
    place = tmp_path_factory.mktemp("run")
    tiny_target.model.save_pretrained(place / "target")
    tiny_target.tokenizer.save_pretrained(place / "target")
    words = ["one", "two", "red", "sea", "sun", "ant", "tea", "ten"]
    talk = [[{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": f"{w} and {w} then {w}"}] for w in words]
    rows = [{"messages": messages, "category": "ab"[i % 2]} for i, messages in enumerate(talk)]
    for name in ("train", "held_out"):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "target": {"name": str(place / "target"), "dtype": "float32"},
        "data": {"train": str(place / "train.jsonl"), "held_out": str(place / "held_out.jsonl"), "max_length": 60},
        "head": {"kind": "eagle3", "taps": [1, 2, 3], "depths": 2, "draft_vocab": 48},
        "eval": {"tree": "chain:3", "prompts": 2},
        "output": str(place),
    }
    (place / "recipe.yaml").write_text(json.dumps(recipe))
    (place / "head").mkdir()
    loaded = Target.load(str(place / "target"), "float32")
    make_head(loaded, "eagle3", 2).save(place / "head")
    steps = np.arange(10.0, 310, 10)
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve(steps, law(steps))))
    return place


def test_a_run_is_diagnosed_whole(run: Path, tmp_path: Path) -> None:
    found = diagnose(run, limit=6, max_new=8)
    assert found["length"] == 3 and found["prompts"] == 6 and found["target_is_the_heads"]
    assert {part["name"] for part in found["parts"]} == {
        "responses", "template", "mask", "vocabulary", "error growth", "training", "temperature", "domain",
    }  # fmt: skip
    shares = [part["share"] for part in found["parts"] if part["share"] is not None]
    assert all(0 <= share <= found["length"] for share in shares)
    by_name = {part["name"]: part for part in found["parts"]}
    assert found["dominant"] in {*by_name, "none"} and by_name["training"]["share"] > 0.2  # the curve in the fixture
    assert by_name["domain"]["evidence"]["training rows by category"] == {"a": 0.5, "b": 0.5}
    write(found, tmp_path)
    assert json.loads((tmp_path / "diagnosis.json").read_text()) == json.loads(json.dumps(found))
    assert f"Dominant: {found['dominant']}." in (tmp_path / "diagnosis.html").read_text()
    assert table(found).row_count == 8


def test_the_store_of_a_run_is_its_record(run: Path, tmp_path: Path) -> None:
    target = Target.load(str(run / "target"), "float32")
    late = [replace(row, mask=shifted(row.mask, 1)) for row in chats(target.tokenizer)]
    extract(target, late, [1, 2, 3], tmp_path / "store", "float32")
    shutil.copytree(run, tmp_path / "run")
    recipe = json.loads((run / "recipe.yaml").read_text())
    recipe["data"] |= {"features": "store", "store": str(tmp_path / "store")}
    (tmp_path / "run" / "recipe.yaml").write_text(json.dumps(recipe))
    found = diagnose(tmp_path / "run", limit=6, max_new=8)
    assert found["dominant"] == "mask" and "1 token too late" in found["because"]


def test_a_head_alone_needs_prompts_and_says_what_it_cannot_know(run: Path) -> None:
    with pytest.raises(UserError, match="--prompts"):
        diagnose(run / "head")
    found = diagnose(run / "head", prompts=[str(run / "held_out.jsonl")], limit=4, max_new=8, temperature=1.0)
    by_name = {part["name"]: part for part in found["parts"]}
    assert found["length"] == 5
    assert "--data" in by_name["responses"]["says"] and "metrics.jsonl" in by_name["training"]["says"]
    assert by_name["temperature"]["share"] is not None


def test_prompts_of_a_service_are_compared_with_the_runs_own(run: Path, tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "why", "category": "c"}\n{"prompt": "who", "category": "d"}\n')
    found = diagnose(run, prompts=[str(tmp_path / "asked.jsonl")], limit=4, max_new=8)
    domain = next(part for part in found["parts"] if part["name"] == "domain")
    assert set(domain["evidence"]["tau by category"]) == {"c", "d"}
    assert domain["evidence"]["tau on the run's own held-out prompts"] >= 1


def test_the_command_writes_its_report_and_one_json_document(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    app = command_line()
    app.command()(diagnose_command)
    few = [str(run), "--limit", "3", "--max-new-tokens", "6", "--out", str(tmp_path / "why")]
    app([*few, "--json"], standalone_mode=False)
    document = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "why" / "diagnosis.json").read_text()) == document
    with pytest.raises(UserError, match="--force"):
        app(few, standalone_mode=False)
    app([*few, "--force"], standalone_mode=False)
    assert f"dominant: {document['dominant']}" in capsys.readouterr().out


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a run"):
        read_ran(tmp_path)
