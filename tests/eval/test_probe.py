"""The endpoint probe, against a real server on loopback: what it measures, what it never does, and how it fails."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from serving import Reply, babble, completion, serving, streamed

from draftsmith.data import endpoint
from draftsmith.data.endpoint import KEY
from draftsmith.errors import UserError
from draftsmith.eval import probe as module
from draftsmith.eval.probe import Budget, explore, probe
from draftsmith.eval.prompts import Prompt

Chat = Callable[[dict[str, Any], int], Reply]
GAP = 0.004  # seconds between events


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.02)
    monkeypatch.delenv(KEY, raising=False)


def warm(body: dict[str, Any]) -> bool:
    return body["messages"] == module.WARM_UP.messages


def but_warm_up(chat: Chat) -> Chat:
    return lambda body, tries: babble(body) if warm(body) else chat(body, tries)


def questions(*texts: str) -> list[Prompt]:
    return [Prompt([{"role": "user", "content": text}]) for text in texts]


# -- what is measured --------------------------------------------------------------------------------------------------


def test_times_tokens_and_repetition_are_those_of_the_stream():
    text = "one two three four one two three four five"
    reply = streamed(text, gap=GAP, delay=0.05)
    with serving(lambda body, _: reply) as server:
        probed = explore(server.url, questions("five one two three four"), Budget(8, 60))
    service = probed.service()
    assert service.ttft and service.tpot and service.output_tokens and service.prompt_tokens
    assert service.ttft.mean >= 0.05 + GAP and service.tpot.mean >= GAP
    assert service.tpot.mean == pytest.approx(
        sum((answer.last - (answer.first or 0)) / 9 for answer in probed.rungs[0].answers) / len(probed.rungs[0].answers)
    )
    assert service.output_tokens.mean == 10 and service.prompt_tokens.mean == 7  # an end of turn beside nine words
    assert service.repetitiveness == pytest.approx(2 / 6)  # "one two three four" twice; the prompt has it, too
    assert probed.tokens_counted and service.target == "m" and service.sources["ttft"] == "probed"
    assert service.speculating is None and service.temperature is None


def test_several_tokens_in_one_event_are_counted_by_the_server():
    with serving(lambda body, _: streamed("a b c d e f g h", words=4, gap=GAP)) as server:
        probed = explore(server.url, budget=Budget(6, 60))
    (first, *_) = probed.answers
    assert (first.pieces, first.tokens) == (2, 9)
    assert first.tpot == pytest.approx((first.last - (first.first or 0)) / 8)


def test_without_usage_the_pieces_are_counted_and_this_is_said():
    with serving(lambda body, _: streamed("a b c d e f g h", used=None, words=2, gap=GAP)) as server:
        probed = explore(server.url, budget=Budget(6, 60))
    assert {answer.tokens for answer in probed.answers} == {4} and not probed.tokens_counted
    assert "counted by pieces" in probed.sentence() and probed.service().prompt_tokens is None


def test_reasoning_counts_as_text():
    reply = streamed("a b c", gap=GAP)
    events = [event.replace('"content"', '"reasoning_content"') for event in reply.events or ()]
    with serving(lambda body, _: Reply(events=events, gap=GAP)) as server:
        probed = explore(server.url, budget=Budget(6, 60))
    assert all(answer.text == "a b c " and answer.ttft for answer in probed.answers)


def test_what_is_asked():
    prompt = Prompt([{"role": "user", "content": "q"}], max_new=5, stop=("\n",))
    with serving() as server:
        probe(server.url, [prompt, *questions("r")], Budget(6, 60), max_tokens=9, temperature=0.5)
    first, second = server.bodies[1:3]
    assert first == {
        "model": "m",
        "messages": prompt.messages,
        "max_tokens": 5,
        "temperature": 0.5,
        "stop": ["\n"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (second["messages"][0]["content"], second["max_tokens"]) == ("r", 9) and "stop" not in second


def test_the_ladder_climbs_until_throughput_stops_growing():
    """The server answers four at a time: eight under way are no faster than four."""
    import threading

    doors = threading.Semaphore(4)

    def chat(body: dict[str, Any], _: int) -> Reply:
        with doors:
            threading.Event().wait(0.1)
        return babble(body)

    with serving(chat) as server:
        probed = explore(server.url, budget=Budget(1000, 60))
    assert [rung.concurrency for rung in probed.rungs][:3] == [1, 2, 4] and server.most >= 4
    assert probed.ended == "the throughput grows no more" and probed.rungs[-1].concurrency <= 16
    loads = probed.service().throughput
    assert [load.concurrency for load in loads] == [rung.concurrency for rung in probed.rungs]
    assert len(server.bodies) == 1 + sum(max(4, 2 * load.concurrency) for load in loads)


# -- the budget --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [3, 4, 7, 9, 20, 41])
@pytest.mark.parametrize("metrics", [True, False])
def test_no_request_beyond_the_budget(requests: int, metrics: bool):
    page = Reply(text="vllm:num_requests_running 0\n") if metrics else Reply(404, {})
    with serving(metrics=lambda: page) as server:
        if requests == 3:  # the models, the warm-up and the metrics
            with pytest.raises(UserError, match="no whole answer within 3 requests and 60 s"):
                explore(server.url, budget=Budget(requests, 60))
        else:
            probed = explore(server.url, budget=Budget(requests, 60))
            assert probed.sent == server.requests
    assert server.requests <= requests


def test_repeated_tries_are_within_the_budget():
    with serving(lambda body, _: babble(body) if warm(body) else Reply(429, {})) as server:
        with pytest.raises(UserError, match="turned a request away in 3 tries"):
            explore(server.url, budget=Budget(6, 60))
        assert server.requests == 6


def test_requests_under_way_are_cancelled_at_the_deadline():
    slow = but_warm_up(lambda body, _: streamed("word " * 400, gap=0.05))
    with serving(slow) as server:
        with pytest.raises(UserError, match="no whole answer within 100 requests and 0.6 s"):
            explore(server.url, budget=Budget(100, 0.6))
        sent = server.requests
        until(lambda: server.cancelled == 1)
    assert server.requests == sent == 4  # the models, the warm-up, the metrics that are not there, the first question


def test_what_was_measured_before_the_deadline_is_kept():
    """The third question of the first rung never ends."""
    asked: list[int] = []

    def chat(body: dict[str, Any], _: int) -> Reply:
        asked.append(1)
        return streamed("word " * 400, gap=0.05) if len(asked) > 2 else babble(body)

    with serving(but_warm_up(chat)) as server:
        probed = explore(server.url, budget=Budget(100, 1.5))
    assert [len(rung.answers) for rung in probed.rungs] == [2] and probed.ended == "the budget's seconds ended"
    assert probed.service().ttft


def until(true: Callable[[], bool]) -> None:
    import time

    for _ in range(400):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within four seconds")


# -- where it is sent --------------------------------------------------------------------------------------------------


def test_no_redirect_is_followed_and_no_proxy_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY, "secret")
    with serving() as other:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, other.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with serving(lambda *_: Reply(307, {}, headers={"Location": f"{other.url}/chat/completions"})) as server:
            with pytest.raises(UserError, match=f"redirects to {re.escape(other.url)}.*, which is not followed"):
                explore(server.url)
            assert server.keys == {"Bearer secret"}
        assert other.requests == 0


# -- the engine's own counters -----------------------------------------------------------------------------------------


class Counting:
    """A server whose page counts like vLLM's with speculation: ``drafts`` in each answer, accepted at three positions."""

    def __init__(self, before: int) -> None:
        self.answers, self.before = 0, before

    def chat(self, body: dict[str, Any], _: int) -> Reply:
        self.answers += 1
        return babble(body)

    def page(self) -> Reply:
        done = self.before + self.answers
        lines = [
            f"vllm:request_success_total {done}",
            "vllm:num_requests_running 3",
            "vllm:kv_cache_usage_perc 0.5",
            f"vllm:prompt_tokens_total {done * 300}",
            f"vllm:generation_tokens_total {done * 40}",
            f"vllm:time_to_first_token_seconds_sum {done * 0.25}",
            f"vllm:time_to_first_token_seconds_count {done}",
            f"vllm:spec_decode_num_drafts_total {done * 10}",
            f"vllm:spec_decode_num_draft_tokens_total {done * 30}",
            f"vllm:spec_decode_num_accepted_tokens_total {done * 14}",
            *(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}} {done * (8, 4, 2)[k]}' for k in range(3)),
        ]
        return Reply(text="\n".join(lines))


@pytest.mark.parametrize("before", [0, 1000])
def test_the_engine_tells_of_its_traffic_and_of_acceptance(before: int):
    engine = Counting(before)
    with serving(engine.chat, metrics=engine.page) as server:
        probed = explore(server.url, budget=Budget(16, 60))
    service = probed.service()
    (served,) = service.proposers
    assert service.speculating and [each.rate for each in served.acceptance] == pytest.approx([0.8, 0.5, 0.5])
    assert [rung.engine.requests for rung in probed.rungs if rung.engine] == [len(rung.answers) for rung in probed.rungs]
    assert probed.during and probed.during.requests == len(probed.answers)
    assert service.prompt_tokens and service.output_tokens and service.ttft
    if before:
        assert (service.prompt_tokens.mean, service.output_tokens.mean, service.ttft.mean) == (300, 40, 0.25)
        assert service.batch and service.batch.p50 == 3 and service.kv_cache_use == 0.5
    else:
        assert (service.prompt_tokens.mean, service.output_tokens.mean, service.batch) == (7, 13, None)


def test_an_engine_of_another_kind_speculates_by_its_gauges():
    page = "sglang:num_running_reqs 0\nsglang:spec_accept_length 2.5\nsglang:spec_accept_rate 0.3\n"
    with serving(metrics=lambda: Reply(text=page)) as server:
        (served,) = probe(server.url, budget=Budget(16, 60)).proposers
    assert served.engine and (served.engine.rate, served.engine.length) == (0.3, 5)


# -- failures ----------------------------------------------------------------------------------------------------------

LONG = " ".join(str(number) for number in range(40))
ONE_PIECE = streamed(LONG, words=1000)
HELD_BACK = Reply(
    text="".join(f"data: {event}\n\n" for event in streamed(LONG).events or ()), headers={"Content-Type": "text/event-stream"}
)
ERROR_EVENT = Reply(events=[*(streamed("a b").events or ())[:2], json.dumps({"error": {"message": "the engine died"}})])
FAILURES = {
    "whole JSON": (completion("a whole answer"), "answers without streaming"),
    "one piece": (ONE_PIECE, "holds its answers back"),
    "held back": (HELD_BACK, "holds its answers back"),
    "no events": (Reply(events=["[DONE]"]), "answers every question with nothing"),
    "web page": (Reply(text="<html>", headers={"Content-Type": "text/html"}), "answers without streaming"),
    "other events": (Reply(events=['{"type": "ping"}', "[DONE]"]), "streams what is no chat completion"),
    "no JSON": (Reply(events=["hello", "[DONE]"]), "streams what is no chat completion"),
    "400": (Reply(400, {"error": {"message": "max_tokens is too large"}}), "refuses a request (max_tokens is too large)"),
    "401": (Reply(401, {"error": "no such key"}), f"status 401 (no such key): set {KEY}"),
    "404": (Reply(404, {"detail": "Not Found"}), "status 404 (Not Found): check --endpoint, which ends in /v1"),
    "429": (Reply(429, {"error": "slow down"}), "turned a request away in 4 tries (status 429: slow down)"),
    "500": (Reply(500, text="<h1>oops</h1>"), "fails (status 500: <h1>oops</h1>): see to the server"),
    "503": (Reply(503, {"message": "loading"}), "turned a request away in 4 tries (status 503: loading)"),
    "hang-up": (Reply(hang_up=True), "gives no answer"),
    "garbled": (
        Reply(text="no gzip at all", headers={"Content-Type": "text/event-stream", "Content-Encoding": "gzip"}),
        "gives no answer",
    ),
    "broken off": (streamed("a b c d", breaks=True), "breaks an answer off after 4 pieces"),
    "ends early": (Reply(events=(streamed("a b").events or ())[:2]), "breaks an answer off after 1 pieces (the stream ends"),
    "aborted": (streamed("a b", finish="abort"), "breaks an answer off after 2 pieces (finish_reason abort)"),
    "error event": (ERROR_EVENT, "breaks an answer off after 1 pieces (the engine died)"),
    "stall": (Reply(200, {}, delay=1.0), "sent nothing for 0.3 s"),
    "stall midway": (streamed("a b", gap=1.0), "sent nothing for 0.3 s"),
}


@pytest.mark.parametrize("at", ["the warm-up", "the first rung"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_ends_in_one_sentence(failure: str, at: str):
    reply, said = FAILURES[failure]
    chat: Chat = (lambda *_: reply) if at == "the warm-up" else but_warm_up(lambda *_: reply)
    with serving(chat) as server, pytest.raises(UserError) as error:
        explore(server.url, patience=0.3)
    assert said in str(error.value) and server.url in str(error.value)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize("failure", ["401", "429", "500", "broken off", "hang-up"])
def test_a_failure_above_the_first_rung_ends_the_ladder_and_keeps_what_was_measured(failure: str):
    reply, said = FAILURES[failure]
    served: list[int] = []

    def chat(body: dict[str, Any], _: int) -> Reply:
        served.append(1)
        return reply if len(served) > 6 else babble(body)  # the rung of one has four, that of two another four

    with serving(but_warm_up(chat)) as server:
        probed = explore(server.url)
    assert [rung.concurrency for rung in probed.rungs] == [1] and said in probed.ended
    assert probed.ended.startswith("with 2 under way, ")


def test_retry_after_is_waited_for_and_does_not_count_as_time_to_a_first_token():
    refusals = Reply(429, {}, headers={"Retry-After": "0.4"})
    with serving(but_warm_up(lambda body, tries: babble(body) if tries else refusals)) as server:
        probed = explore(server.url, questions(*"abcd"), Budget(11, 60))
    assert server.times[2] - server.times[1] >= 0.4
    assert len(probed.rungs[0].answers) == 4 and probed.sent == server.requests == 11
    assert min(probed.rungs[0].ttft) < 0.4


def test_a_wait_beyond_the_budget_is_not_begun():
    with serving(lambda *_: Reply(429, {}, headers={"Retry-After": "3600"})) as server:
        with pytest.raises(UserError, match="turned a request away in 1 tries"):
            explore(server.url)
        assert len(server.bodies) == 1


def test_addresses_and_models_that_are_not_there():
    with serving(models=("a", "b")) as server:
        for url, model, said in [
            (server.url, "c", r"does not serve 'c': choose --model from a, b"),
            (server.url + "/nowhere", None, "status 404 .*: check --endpoint, which ends in /v1"),
            (server.url.removesuffix("/v1"), None, "status 404 .*: check --endpoint, which ends in /v1"),
            ("localhost:80", None, "is no address"),
            ("http://127.0.0.1:9/v1", None, "cannot be reached"),
        ]:
            with pytest.raises(UserError, match=said):
                explore(url, model=model)
        assert not server.bodies
        assert probe(server.url, budget=Budget(6, 60), model="b").target == "b"
