"""The verdict in every situation that the advice is for, and the engine settings that go with it."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from cases import make_head
from published import CONTEXT, FREE, H100, ROOFLINE_TAU, VLLM_CHAIN2, VLLM_TAU, chain, step_costs
from typer.testing import CliRunner

from draftsmith.cli_advise import advise_command
from draftsmith.errors import UserError
from draftsmith.eval.advise import advise, sentences
from draftsmith.eval.local import measure_service, names
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.service import Acceptance, DraftCost, Load, Mean, Middle, ProposerFacts, Service, StepCost
from draftsmith.eval.settings import Wish, settings, written
from draftsmith.eval.tree import chain as chain_of
from draftsmith.target import Target

AS_IT_IS: dict[str, Any] = {  # drafts of two tokens alone were measured
    "draft_seconds": FREE, "tokenizer_equal": True, "temperature": 0.0, "tree": True, "sizes": {2: 1.0},
}  # fmt: skip
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def accelerator(batches: tuple[int, ...] = BATCHES) -> list[StepCost]:
    """Passes as an accelerator has them: flat while memory is what they wait for, then rising with every token."""
    return [
        StepCost(tokens=n, batch=b, seconds=max(0.008 + 2e-5 * b, 8e-5 * b * n), spread=0.01)
        for b in batches
        for n in (1, 2, 4, 8)
    ]


def head(tau: float = 2.9, length: int = 3, **more: Any) -> ProposerFacts:
    known = {"tokenizer_equal": True, "vocabulary_equal": True, "temperature": 0.0, "memory": 1e9}
    costs = [DraftCost(batch=b, length=n, seconds=0.0004 * n + 1e-6 * b * n) for b in (1, 256) for n in (1, length)]
    return chain("eagle3", tau, length, **{"draft_seconds": costs} | known | more)


def healthy(**more: Any) -> Service:
    """A chat with little traffic: answers of 300 tokens, four requests at once."""
    values: dict[str, Any] = {
        "qps": 1.5, "batch": Middle(p50=4, p95=12), "prompt_tokens": Mean(mean=400), "output_tokens": Mean(mean=300),
        "ttft": Mean(mean=0.08), "tpot": Mean(mean=0.0083), "temperature": 0.0, "memory_free": 8e9, "kv_cache_use": 0.2,
        "step_costs": accelerator(), "proposers": [head()], "repetitiveness": 0.05,
    }  # fmt: skip
    return Service(**values | more).from_("stated")


def test_a_healthy_service_with_little_traffic_turns_it_on() -> None:
    found = advise(healthy())
    assert (found["verdict"], found["proposer"], found["draft_length"]) == ("on", "eagle3", 3)
    assert found["table"]["traffic"]["value"]["load"] == "low"
    assert all(row["answer"] != "bad" for row in found["table"].values()), found["table"]
    one = found["predicted"][0]
    assert one["batch"] == 1 and one["interval"][0] < one["speedup"] < one["interval"][1]
    assert one["speedup"] == pytest.approx(2.9 * 0.00802 / (0.00802 + 0.0012), rel=0.02)


def test_short_outputs_wait_for_their_first_token() -> None:
    found = advise(healthy(ttft=Mean(mean=0.9), output_tokens=Mean(mean=20)))
    assert found["verdict"] == "not-yet" and "first token takes 85%" in found["because"]
    assert found["table"]["bottleneck"]["answer"] == "bad"
    assert found["proposer"] is None and found["draft_length"] == 0 and found["settings"] is None
    longer = next(each for each in found["would_change"] if "answers longer than" in each)
    needed = int(longer.split()[4])
    assert advise(healthy(ttft=Mean(mean=0.9), output_tokens=Mean(mean=needed * 1.1)))["verdict"] == "on"


def test_a_device_that_is_full_gains_nothing() -> None:
    costs = accelerator((*BATCHES, 512))
    found = advise(healthy(qps=60.0, batch=Middle(p50=220, p95=256), tpot=Mean(mean=0.0185), step_costs=costs, max_batch=256))
    assert found["verdict"] == "not-yet" and "saturated" in found["because"]
    assert found["table"]["traffic"]["value"]["load"] == "saturating"
    assert found["capacity"]["with_drafts"] < found["capacity"]["plain"]
    assert any("fewer than" in each for each in found["would_change"])


def test_a_full_device_that_still_waits_for_memory_gains_capacity() -> None:
    flat = [StepCost(tokens=n, batch=b, seconds=0.008 + 1e-6 * b * n) for b in (1, 64) for n in (1, 4)]
    found = advise(healthy(qps=40.0, batch=None, ttft=Mean(mean=0.002), step_costs=flat, max_batch=64))
    assert found["verdict"] == "on"
    assert found["considered"][0]["usual"]["plain_batch"] is None
    assert found["capacity"]["with_drafts"] > 2 * found["capacity"]["plain"]


def test_creative_sampling_accepts_too_little() -> None:
    found = advise(healthy(temperature=1.2, proposers=[head(tau=1.08, temperature=1.2)]))
    assert found["verdict"] == "not-yet" and "too few drafts are accepted at temperature 1.2" in found["because"]
    assert found["table"]["temperature"]["answer"] == "bad"


@pytest.mark.parametrize("measured_at", [0.0, None])
def test_acceptance_at_another_temperature_is_measured_anew_first(measured_at: float | None) -> None:
    found = advise(healthy(temperature=1.2, proposers=[head(temperature=measured_at)]))
    assert found["verdict"] == "first" and "measure it there" in found["because"]


def test_a_draft_with_another_tokenizer_is_refused() -> None:
    other = chain("draft_model", 3.5, 4, kind="model", tokenizer_equal=False, vocabulary_equal=False)
    found = advise(healthy(proposers=[other]))
    assert found["verdict"] == "not-yet" and "draft_model has another tokenizer" in found["because"]
    assert found["table"]["tokenizer"]["answer"] == "bad"
    both = advise(healthy(proposers=[other, head()]))
    assert (both["verdict"], both["proposer"]) == ("on", "eagle3")
    assert {"proposer": "draft_model", "left_out": "has another tokenizer"} in both["considered"]


def test_what_is_sure_goes_before_what_promises_more() -> None:
    unchecked = head(tau=3.5).model_copy(update={"name": "eagle3:other", "tokenizer_equal": None})
    found = advise(healthy(proposers=[unchecked, head()]))
    assert (found["verdict"], found["proposer"]) == ("on", "eagle3")
    assert any("eagle3:other promises more" in each for each in found["would_change"])
    assert [each["verdict"] for each in found["considered"]] == ["first", "on"]


def test_a_draft_that_does_not_fit_into_memory_is_refused() -> None:
    found = advise(healthy(memory_free=1e8))
    assert found["verdict"] == "not-yet" and "GiB are free" in found["because"]


@pytest.mark.parametrize(
    ("changed", "because"),
    [
        ({"proposers": []}, "no proposer was looked at: measure a draft head"),
        ({"proposers": [], "repetitiveness": 0.5}, "measure ngram and suffix"),
        ({"proposers": [ProposerFacts(name="eagle3", tokenizer_equal=True)]}, "how many drafts are accepted"),
        ({"step_costs": []}, "what the target's passes cost is not known"),
        ({"step_costs": [], "speculating": True}, "with speculation turned off"),
        ({"step_costs": [], "hardware": H100}, "roofline, which flatters"),
        ({"proposers": [head(tokenizer_equal=None)]}, "nobody has checked that its tokenizer"),
        ({"proposers": [head(kind="model", memory=None)]}, "whether it fits into memory"),
        ({"proposers": [head(ready=False, training=16)]}, "once it is trained"),
        ({"proposers": [head(acceptance=[Acceptance(rate=0.7, low=0.05, high=0.9)] * 3)]}, "may be chance"),
    ],
)
def test_what_is_missing_comes_first(changed: dict[str, Any], because: str) -> None:
    found = advise(healthy(**changed))
    assert found["verdict"] == "first" and because in found["because"], found["because"]


def test_without_a_proposer_it_says_what_one_would_have_to_give() -> None:
    found = advise(healthy(proposers=[]))["would_change"]
    edge = 1.05 * (1 + 3 * 0.07)  # four tokens cost no more than one here, and drafting is taken to cost 7 % each
    assert any(each.startswith(f"a draft head with 3 tokens pays from τ {edge:.2f}") for each in found), found


def test_vllms_published_sweep_crosses_one_near_batch_56() -> None:
    costs = step_costs(VLLM_CHAIN2 | {64: 0.93}, VLLM_TAU, 2)
    proposer = chain("eagle3", VLLM_TAU, 2, **AS_IT_IS)
    light, heavy = (
        advise(healthy(qps=None, closed=True, batch=batch, step_costs=costs, proposers=[proposer], max_batch=64))
        for batch in (Middle(p50=8, p95=24), Middle(p50=62, p95=63))
    )
    assert light["verdict"] == "on" and heavy["verdict"] == "not-yet"
    assert "load is too high" in heavy["because"]
    off = next(start for start, _, length in light["draft_length_by_batch"] if not length)
    assert 50 <= off <= 60
    assert light["hysteresis"]["on_up_to"] < light["hysteresis"]["off_above"] <= 62
    for row in light["predicted"]:
        if row["batch"] in VLLM_CHAIN2:
            assert row["speedup"] == pytest.approx(VLLM_CHAIN2[row["batch"]], rel=0.03)


def test_at_a_rate_of_requests_drafts_keep_the_batch_below_the_crossing() -> None:
    """Where 62 clients ask in turn, chains of 2 lose; where requests come at the rate that keeps 62 running, they do not."""
    costs = step_costs(VLLM_CHAIN2 | {64: 0.93}, VLLM_TAU, 2)
    proposer = chain("eagle3", VLLM_TAU, 2, **AS_IT_IS)
    values = {"qps": None, "batch": Middle(p50=62, p95=62), "step_costs": costs, "proposers": [proposer], "max_batch": 64}
    open_ended = advise(healthy(**values))["considered"][0]["usual"]
    assert open_ended["plain_batch"] == pytest.approx(62, rel=0.02)
    assert open_ended["batch"] < 50 and open_ended["speedup"] > 1.2
    assert advise(healthy(closed=True, **values))["considered"][0]["usual"]["speedup"] < 1


def test_a_load_that_crosses_its_end_drafts_by_batch_size() -> None:
    found = advise(healthy(qps=None, batch=Middle(p50=4, p95=250)))
    assert found["verdict"] == "on" and "by batch size" in found["because"]
    lengths = [length for _, _, length in found["draft_length_by_batch"]]
    assert lengths[0] == 3 and lengths[-1] == 0 and lengths == sorted(lengths, reverse=True)
    starts = [(start, end) for start, end, _ in found["draft_length_by_batch"]]
    assert starts[0][0] == 1 and all(before[1] + 1 == after[0] for before, after in pairwise(starts))


def test_the_gain_is_that_of_the_rate_not_of_the_batch() -> None:
    """The published fixed point: 70 requests at once become 22."""
    draft = 0.2 * ((H100.weights + CONTEXT * H100.cache_per_token) / H100.bandwidth + H100.overhead)
    costs = [DraftCost(batch=b, length=3, seconds=draft) for b in (1, 512)]
    proposer = chain("eagle3", ROOFLINE_TAU, 3, draft_seconds=costs, tokenizer_equal=True, temperature=0.0)
    prompt = Mean(mean=CONTEXT - 128)
    found = advise(
        Service(qps=32, output_tokens=Mean(mean=256), prompt_tokens=prompt, hardware=H100, proposers=[proposer], max_batch=512)
    )
    usual = found["considered"][0]["usual"]
    assert usual["plain_batch"] == pytest.approx(70, rel=0.07) and usual["batch"] == pytest.approx(22, rel=0.07)
    assert usual["plain_tpot"] == pytest.approx(8.6e-3, rel=0.07) and usual["tpot"] == pytest.approx(2.7e-3, rel=0.07)
    assert all(row["upper_bound"] for row in found["predicted"]) and found["verdict"] == "first"


def test_a_probed_endpoint_lets_sequences_stand_for_tokens() -> None:
    """What an endpoint shows under rising load bounds what verification costs from above."""
    seen = [Load(concurrency=c, tokens_per_s=c / t, ttft=0.05, tpot=t) for c, t in ((1, 0.01), (4, 0.0103), (16, 0.012))]
    found = advise(healthy(step_costs=[], throughput=seen, qps=None, batch=Middle(p50=1)))
    assert found["verdict"] == "on"
    assert found["predicted"][0]["break_even_tau"] == pytest.approx(1.03 + 0.0012 / 0.01, rel=0.01)
    assert "a sequence counted for a token" in found["table"]["costs"]["value"]


def test_numbers_that_contradict_each_other_are_pointed_out() -> None:
    row = advise(healthy(qps=4.5))["table"]["consistency"]
    assert row["answer"] == "bad" and row["value"] == pytest.approx(4.5 * 300 * 0.0083)
    assert advise(healthy())["table"]["consistency"]["answer"] == "good"


def test_the_whole_request_gains_less_than_its_decoding() -> None:
    found = advise(healthy(ttft=Mean(mean=1.0)))["whole_request"]
    share = 1 / (1 + 299 * 0.0083)
    assert found["prefill_share"] == pytest.approx(share)
    assert 1 < found["speedup"] < found["at_most"] == pytest.approx(1 / share)


def test_training_is_paid_back() -> None:
    found = advise(healthy(replicas=8, qps=100.0, batch=None, proposers=[head(training=16)]))
    paid = found["payback"]
    assert paid["days"] == pytest.approx(16 / paid["hours_saved_per_day"])
    assert 0 < paid["hours_saved_per_day"] < 24 * 8


def test_the_trap_of_the_acceptance_rate_is_named() -> None:
    facts = head(acceptance=[], engine={"rate": 0.5257, "length": 7})
    found = advise(healthy(proposers=[facts]))
    assert "τ = 1 + rate · length" in found["table"]["acceptance"]["says"]
    assert "is τ 4.68" in found["table"]["acceptance"]["says"]
    assert found["predicted"][0]["tau"] > 2.09 + 0.5


def test_the_text_says_all_that_the_document_says() -> None:
    found = advise(healthy())
    text = sentences(found)
    assert text.startswith("ON: eagle3 with 3 draft tokens")
    assert all(row["question"] in text for row in found["table"].values())
    assert json.loads(json.dumps(found)).keys() == found.keys()


# -- the service's file ------------------------------------------------------------------------------------------


def test_a_service_is_read_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(
        "name: chat\nqps: 2\nbatch: {p50: 3}\nproposers:\n  - {name: ngram, kind: lookup, sizes: {0: 0.5, 3: 0.5}}\n"
        "step_costs:\n  - {tokens: 1, batch: 1, seconds: 0.01}\n"
    )
    found = Service.read(path)
    assert found.qps == 2 and found.sources["qps"] == "stated" and found.sources["proposers.ngram.sizes"] == "stated"
    probed = Service(qps=1, ttft=Mean(mean=0.1)).from_("probed")
    both = probed.under(found)
    assert (both.qps, both.sources["qps"], both.sources["ttft"]) == (2, "stated", "probed")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("qps: -1", "qps: Input should be greater than 0"),
        ("qqs: 1", "qqs: Extra inputs"),
        ("proposers: [{name: a}, {name: a}]", "two proposers have one name"),
        ("proposers: [{name: a, acceptance: [{rate: 0.5, low: 0.6}]}]", "rate must lie between"),
        ("proposers: [{name: a, sizes: {1: 0.5}}]", "must add up to 1"),
        ("[1]", "holds no keys"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_wrong_file_is_told_by_its_key(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=told):
        Service.read(path)


# -- the engines' settings ---------------------------------------------------------------------------------------

EXAMPLE = [(1, 16, 5), (17, 32, 4), (33, 64, 3), (65, 128, 1), (129, 512, 0)]  # of vLLM's documentation


def test_vllm_takes_the_schedule_as_ranges() -> None:
    found = settings(Wish(head(path="heads/chat"), 5, EXAMPLE, 0.2))
    config = found["vllm"]["speculative-config"]
    assert config["method"] == "eagle3" and config["model"] == "heads/chat" and config["num_speculative_tokens"] == 5
    assert config["num_speculative_tokens_per_batch_size"] == [list(step) for step in EXAMPLE]
    assert json.loads(written(found)["vllm.json"]) == config


def test_sglang_takes_steps_width_and_tokens() -> None:
    flags = settings(Wish(head(path="heads/chat"), 5, EXAMPLE, 0.2))["sglang"]["flags"]
    assert flags["speculative-algorithm"] == "EAGLE3"
    assert [flags[f"speculative-{name}"] for name in ("num-steps", "eagle-topk", "num-draft-tokens")] == [5, 1, 6]


def test_tensorrt_takes_thresholds_and_turns_off_by_itself() -> None:
    config = settings(Wish(head(path="heads/chat"), 5, EXAMPLE, 0.2))["tensorrt-llm"]["speculative_config"]
    assert config["decoding_type"] == "Eagle3" and config["max_draft_len"] == 5
    assert config["draft_len_schedule"] == {16: 5, 32: 4, 64: 3, 128: 1}
    assert "max_concurrency" not in config and config["acceptance_rate_threshold"] == 0.2
    simple = settings(Wish(head(), 3, [(1, 40, 3), (41, 256, 0)], 0.2))["tensorrt-llm"]["speculative_config"]
    assert simple["max_concurrency"] == 40 and "draft_len_schedule" not in simple


def test_engines_that_do_not_know_a_proposer_say_so() -> None:
    found = settings(Wish(ProposerFacts(name="lookahead", kind="lookup"), 4, [(1, 256, 4)], 0.1))
    assert all("unsupported" in each for each in found.values()) and not written(found)
    ngram = settings(Wish(ProposerFacts(name="ngram", kind="lookup"), 4, [(1, 256, 4)], 0.1))
    assert ngram["vllm"]["speculative-config"]["num_speculative_tokens"] == 4
    assert "model" not in ngram["vllm"]["speculative-config"]
    assert yaml.safe_load(written(ngram)["tensorrt-llm.yaml"])["speculative_config"]["decoding_type"] == "NGram"


# -- measured here -----------------------------------------------------------------------------------------------


def test_a_local_target_is_measured(lively_target: Target, tiny_tokenizer_factory: Any, tmp_path: Path) -> None:
    target = Target(lively_target.model, tiny_tokenizer_factory(), "lively")
    (tmp_path / "head").mkdir()
    make_head(target, "eagle3").save(tmp_path / "head")
    prompts = [Prompt([{"role": "user", "content": text}]) for text in ("abcabc", "the other")]
    texts = ["ngram:3,max=2,min=1", "lookahead:3x3,guesses=2", str(tmp_path / "head")]
    found = measure_service(target, texts, prompts, chain_of(2), 12, batches=[1, 2])
    ngram, lookahead, eagle3 = found.proposers
    assert (ngram.name, ngram.kind, lookahead.tree, eagle3.kind) == ("ngram", "lookup", True, "head")
    assert ngram.sizes and max(ngram.sizes) <= 3 and 0 in ngram.sizes
    assert lookahead.sizes and max(lookahead.sizes) > 2  # the window is read, too
    assert {(row.batch, row.length) for row in eagle3.draft_seconds} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert eagle3.memory and eagle3.memory > 0 and eagle3.path == str(tmp_path / "head")
    assert {row.batch for row in found.step_costs} == {1, 2}
    assert max(row.tokens for row in found.step_costs) == 1 + max(max(each.sizes or {2: 1}) for each in found.proposers)
    assert found.sources["step_costs"] == "measured"
    advice = advise(found)
    assert advice["verdict"] in ("on", "first", "not-yet") and len(advice["considered"]) == 3
    for own, facts in zip(
        sorted(advice["considered"], key=lambda each: each["proposer"]), (eagle3, lookahead, ngram), strict=True
    ):
        assert (
            own["checked"]["measured"] == facts.speedup_alone
            and min(own["checked"]["measured"], own["checked"]["predicted"]) > 0
        )
    assert sentences(advice).count("One request at a time") == 3


def test_two_proposers_of_a_kind_have_two_names() -> None:
    assert list(names(["ngram:3", "ngram:5", "suffix:8"]).values()) == ["ngram", "ngram:2", "suffix"]


# -- the command -------------------------------------------------------------------------------------------------

app = typer.Typer()
app.command()(advise_command)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_the_command_writes_the_advice_and_the_settings(tmp_path: Path) -> None:
    document = healthy().model_dump(mode="json", exclude_unset=True, exclude={"sources"})
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(document))
    out = tmp_path / "advice"
    done = run("--service", tmp_path / "service.yaml", "--out", out, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {"table", "verdict", "because", "proposer", "draft_length", "predicted"} <= told.keys()
    assert all({"batch", "speedup", "interval"} <= row.keys() for row in told["predicted"])
    assert json.loads((out / "advice.json").read_text())["verdict"] == "on"
    assert Service.model_validate_json((out / "service.json").read_text()).qps == 1.5
    assert sorted(path.name for path in out.iterdir()) == [
        "advice.json", "service.json", "sglang.txt", "tensorrt-llm.yaml", "vllm.json",
    ]  # fmt: skip
    shown = run("--service", tmp_path / "service.yaml", "--out", out, "--force")
    assert shown.stdout.startswith("ON: eagle3 with 3 draft tokens")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing is known of the service"),
        (["--target", "a", "--endpoint", "b"], "give one of them"),
        (["--service", "a.yaml", "--proposer", "ngram"], "--proposer is measured on a --target"),
        (["--service", "a.yaml", "--model", "m"], "--model is one of an --endpoint's"),
        (["--target", "a"], "give --prompts FILE"),
        (["--service", "nowhere.yaml"], "nowhere.yaml cannot be read"),
    ],
)
def test_what_does_not_go_together_is_told(tmp_path: Path, arguments: list[str], told: str) -> None:
    done = run(*arguments, "--out", tmp_path / "out")
    assert isinstance(done.exception, UserError) and told in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_where_a_lone_request_does_not_gain_it_says_where_the_gain_begins() -> None:
    """A processor with a poor kernel for few tokens: four sequences gain, one loses."""
    costs = step_costs({1: 0.9, 2: 0.95, 4: 1.3, 8: 1.3}, 2.0, 2)
    proposer = chain("eagle3", 2.0, 2, **AS_IT_IS)
    found = advise(
        healthy(qps=None, closed=True, batch=Middle(p50=1, p95=1), step_costs=costs, proposers=[proposer], max_batch=8)
    )
    assert found["verdict"] == "not-yet"
    assert any(each.startswith("at least 3 running requests") and "begins" in each for each in found["would_change"])
    assert "up to 0 running" not in sentences(found) and "than 0 running" not in sentences(found)
