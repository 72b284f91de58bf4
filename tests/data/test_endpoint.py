"""The client of an OpenAI-compatible server, against a real one on loopback that fails in every way a server does."""

import asyncio
import json
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest
from serving import Reply, Server, babble, completion, serving

from draftsmith.data import endpoint as module
from draftsmith.data.conversations import Conversation
from draftsmith.data.endpoint import FAILED, KEY, OTHERWISE, REFUSED, Endpoint, as_protocol, through_endpoint
from draftsmith.data.rewriting import CUT, TOO_LONG, Rewrite, Settings
from draftsmith.errors import UserError

PROBE = "Say yes."
GREEDY = Settings(max_new_tokens=50)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT", 0.02)
    monkeypatch.delenv(KEY, raising=False)


def conversation(turns: int, text: str = "tell me") -> Conversation:
    said = [{"role": "user", "content": text}, {"role": "assistant", "content": "old"}]
    return Conversation(said * turns, "f", 1)


def rewrite_all(
    server: Server,
    conversations: list[Conversation],
    concurrency: int = 4,
    settings: Settings = GREEDY,
    budget: int = 10**9,
    tries: int = 4,
    timeout: float = 5.0,
) -> list[Rewrite]:
    """The finished conversations, in the order in which they were finished."""
    done: list[Rewrite] = []

    async def work() -> None:
        async with Endpoint(server.url, settings, concurrency, timeout, tries) as endpoint:
            await endpoint.connect(None)
            starts = (Rewrite(one, i, settings.temperature(i)) for i, one in enumerate(conversations))
            await through_endpoint(endpoint, starts, done.append, lambda used: used < budget)

    asyncio.run(work())
    return done


def but_probe(chat: Callable[[dict[str, Any], int], Reply]) -> Callable[[dict[str, Any], int], Reply]:
    """``chat`` for all requests but the first short question, which is answered."""
    return lambda body, tries: babble(body) if body["messages"][0]["content"] == PROBE else chat(body, tries)


def test_later_turns_see_the_server_s_own_answers_and_all_settings_arrive():
    with serving() as server:
        settings = Settings((0.5,), top_p=0.9, max_new_tokens=50, seed=3)
        (done,) = rewrite_all(server, [conversation(3)], settings=settings)
    answers = [message["content"] for message in done.messages[1::2]]
    asked = server.bodies[1:]
    assert [len(body["messages"]) for body in asked] == [1, 3, 5] and asked[2]["messages"] == done.messages[:5]
    assert answers == [babble(body).value["choices"][0]["message"]["content"] for body in asked]
    assert len({body["seed"] for body in asked}) == 3
    wanted = {"model": "m", "temperature": 0.5, "top_p": 0.9, "max_tokens": 50}
    assert all({key: body[key] for key in wanted} == wanted and "top_k" not in body for body in asked)
    assert done.tokens == 39 and done.finish == "stop" and not done.ids_known


def test_seeds_do_not_depend_on_concurrency():
    seen = []
    for concurrency in (1, 7):
        with serving() as server:
            done = rewrite_all(server, [conversation(2, f"q{i}") for i in range(9)], concurrency)
        seen.append({rewrite.index: rewrite.messages for rewrite in done})
    assert seen[0] == seen[1] and len(seen[0]) == 9


def test_concurrency_is_bounded_and_used():
    slow = but_probe(lambda body, _: Reply(**{**vars(babble(body)), "delay": 0.03}))
    with serving(slow) as server:
        start = time.monotonic()
        assert len(rewrite_all(server, [conversation(1, str(i)) for i in range(24)], concurrency=6)) == 24
        assert server.most == 6 and time.monotonic() - start < 24 * 0.03


FAULTS = {
    "429": Reply(429, {"error": {"message": "slow down"}}),
    "500": Reply(500, text="<h1>oops</h1>"),
    "503": Reply(503, {"detail": "loading"}),
    "408": Reply(408, {}),
    "hang-up": Reply(hang_up=True),
    "not json": Reply(200, text="<html>"),
    "not a completion": Reply(200, {"choices": []}),
    "broken off": completion("half an ans", "abort"),
    "stall": Reply(200, {}, delay=0.7),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_may_pass_is_tried_again(fault: str):
    chat = but_probe(lambda body, tries: FAULTS[fault] if tries < 2 else babble(body))
    with serving(chat) as server:
        done = rewrite_all(server, [conversation(2, str(i)) for i in range(3)], timeout=0.4)
    assert [len(one.messages) for one in done] == [4] * 3
    assert all("half" not in message["content"] for one in done for message in one.messages)
    assert len(server.bodies) == 1 + 3 * 2 * 3


def test_waits_grow_and_differ():
    waits = [[Endpoint.wait(failures) for _ in range(50)] for failures in range(14)]
    for failures, drawn in enumerate(waits):
        full = min(0.02 * 2**failures, 60.0)
        assert full / 2 <= min(drawn) < max(drawn) <= full


@pytest.mark.parametrize("date", [False, True])
def test_retry_after_is_honoured(date: bool):
    after = formatdate(time.time() + 2, usegmt=True) if date else "0.6"
    chat = but_probe(lambda body, tries: babble(body) if tries else Reply(429, {}, headers={"Retry-After": after}))
    with serving(chat) as server:
        rewrite_all(server, [conversation(1)])
    assert server.times[2] - server.times[1] >= (0.5 if date else 0.6)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            Reply(400, {"error": {"message": "max_tokens=50 cannot exceed 8"}}),
            "max_tokens=50 cannot exceed 8",
        ),
        (Reply(401, {"error": "no such key"}), f"status 401 (no such key): set {KEY}"),
        (Reply(404, {"detail": "Not Found"}), "status 404 (Not Found): check --endpoint, which ends in /v1"),
        (Reply(503, {"message": "still loading"}), "gave no answer in 2 tries (status 503: still loading)"),
        (Reply(418, text="I am\na teapot"), "status 418 (I am a teapot)"),
    ],
)
def test_a_server_that_refuses_a_plain_question_ends_the_run(reply: Reply, said: str):
    with serving(lambda *_: reply) as server, pytest.raises(UserError) as error:
        rewrite_all(server, [conversation(1)], tries=2)
    assert said in str(error.value)


def test_addresses_and_models_that_are_not_there():
    with serving(models=()) as server:
        for url, said in [
            (server.url, "serves no model"),
            (server.url + "/nowhere", "check --endpoint"),
            ("localhost:80", "is no address"),
            ("http://127.0.0.1:9/v1", "cannot connect"),
        ]:
            with pytest.raises(UserError, match=said):
                rewrite_all(Server(url), [conversation(1)], tries=2)


def test_the_named_model_must_be_served():
    async def work(url: str) -> str:
        async with Endpoint(url, Settings(), 1) as endpoint:
            await endpoint.connect("b")
            assert endpoint.model == "b"
            await endpoint.connect("c")
        return "connected"

    with serving(models=("a", "b")) as server, pytest.raises(UserError, match=r"does not serve 'c': choose --model from a, b"):
        asyncio.run(work(server.url))


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (Reply(400, {"error": {"message": "This model's maximum context length is 64 tokens"}}), TOO_LONG),
        (Reply(400, {"error": {"message": "roles must alternate"}}), REFUSED),
        (Reply(422, {"detail": [{"msg": "bad"}]}), REFUSED),
        (completion("", "content_filter"), OTHERWISE),
    ],
)
def test_one_bad_request_costs_one_conversation(reply: Reply, cause: str):
    chat = but_probe(lambda body, _: reply if "bad" in body["messages"][0]["content"] else babble(body))
    with serving(chat) as server:
        done = rewrite_all(server, [conversation(2, "good"), conversation(2, "bad"), conversation(2, "fine")])
    assert {one.index: one.cause for one in done} == {0: None, 1: cause, 2: None}
    assert next(one for one in done if one.index == 1).answers == 0


def test_a_request_that_breaks_the_server_is_given_up_while_others_are_answered():
    def chat(body: dict[str, Any], _: int) -> Reply:
        return Reply(500, {}) if "bad" in body["messages"][0]["content"] else Reply(**{**vars(babble(body)), "delay": 0.02})

    with serving(but_probe(chat)) as server:
        done = rewrite_all(server, [conversation(1, "bad"), *[conversation(1, str(i)) for i in range(40)]], concurrency=2)
        assert len(done) == 41 and [one.cause for one in done if one.cause] == [FAILED]
        with pytest.raises(UserError, match="gave no answer in 4 tries"):  # nobody is answered: it is the server
            rewrite_all(server, [conversation(1, "bad")] * 4)


def test_a_server_that_goes_away_ends_the_run_and_keeps_what_is_done():
    chat = but_probe(lambda body, _: Reply(503, {}) if body["messages"][0]["content"] == "5" else babble(body))
    with serving(chat) as server, pytest.raises(UserError, match="run the same command again; what is finished is kept"):
        rewrite_all(server, [conversation(1, str(i)) for i in range(10)], tries=2)


def test_the_budget_starts_no_further_conversation_and_finishes_those_under_way():
    with serving() as server:
        done = rewrite_all(server, [conversation(2, str(i)) for i in range(20)], concurrency=2, budget=100)
    assert all(one.answers == 2 for one in done)
    assert 100 <= sum(one.tokens for one in done) <= 100 + 2 * 26 and len(done) < 20


def test_a_cut_answer_ends_the_conversation():
    chat = but_probe(lambda *_: completion("half of a", "length"))
    with serving(chat) as server:
        (done,) = rewrite_all(server, [conversation(3)])
    assert (done.finish, done.cause, done.unwritten, len(done.messages)) == ("length", CUT, 2, 2)


def test_reasoning_is_kept_apart_where_the_server_does_and_whole_where_it_does_not():
    chat = but_probe(
        lambda body, _: completion("\n\nyes", reasoning="hm") if len(body["messages"]) == 1 else completion("so\n</think>\nno")
    )
    with serving(chat) as server:
        (done,) = rewrite_all(server, [conversation(2)])
    assert done.messages[1] == {"role": "assistant", "content": "\n\nyes", "reasoning_content": "hm"}
    assert done.messages[3]["content"] == "<think>\nso\n</think>\nno"
    assert server.bodies[2]["messages"][1]["reasoning_content"] == "hm"


def test_half_a_surrogate_pair_is_replaced():
    with serving(but_probe(lambda *_: Reply(200, text=json.dumps(completion("a \ud83d b").value)))) as server:
        (done,) = rewrite_all(server, [conversation(1)])
    assert done.messages[1]["content"] == "a ? b"


def test_engines_get_what_only_they_know_and_others_refuse_it():
    with serving(owner="vllm") as server:
        rewrite_all(server, [conversation(1)], settings=Settings(top_k=5))
    assert [(body["top_k"], body["skip_special_tokens"]) for body in server.bodies] == [(5, False)] * 2
    with serving() as server, pytest.raises(UserError, match="--top-k is not part of the OpenAI protocol"):
        rewrite_all(server, [conversation(1)], settings=Settings(top_k=5))


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY, "secret")
    with serving() as server:
        rewrite_all(server, [conversation(1)])
    assert server.keys == {"Bearer secret"}


def test_calls_and_results_are_tied_as_the_protocol_wants():
    def call(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "arguments": {"at": "é"}}}

    sent = as_protocol(
        [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "weight": 0, "tool_calls": [call("a"), call("b")]},
            {"role": "tool", "content": "ra"},
            {"role": "tool", "content": "rb", "name": "b"},
            {"role": "assistant", "content": "", "weight": 0, "tool_calls": [call("c")]},
            {"role": "tool", "content": "rc"},
        ]
    )
    ids = [[c["id"] for c in message.get("tool_calls", [])] for message in sent]
    assert ids == [[], ["call_0", "call_1"], [], [], ["call_2"], []]
    assert [message.get("tool_call_id") for message in sent] == [None, None, "call_0", "call_1", None, "call_2"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "a", "arguments": '{"at": "é"}'} and "weight" not in sent[1]


def test_tools_are_shown_and_never_called():
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with serving() as server:
        rewrite_all(server, [Conversation([{"role": "user", "content": "u"}], "f", 1, tools=tools)])
    assert server.bodies[1]["tools"] == tools and server.bodies[1]["tool_choice"] == "none"


def test_an_answer_may_be_nothing_at_all():
    with serving(but_probe(lambda *_: completion(None, "stop", 1))) as server:  # type: ignore[arg-type]
        (done,) = rewrite_all(server, [conversation(1)])
    assert done.answers == 0 and done.cause == "empty answer"
