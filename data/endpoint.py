"""The target behind an OpenAI-compatible server: many requests under way, each tried again until it is answered."""

import asyncio
import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterable
from email.utils import parsedate_to_datetime
from typing import Any, Self, TypeVar

import httpx

from ..console import note
from ..errors import UserError
from .rewriting import TOO_LONG, Answer, Rewrite, Settings, whole_thought

KEY = "OPENAI_API_KEY"
REFUSED = "refused by the server"
FAILED = "the server failed on it again and again"
OTHERWISE = "answer ended by the server for a reason of its own"
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before a request is tried again, doubled each time
BUSY = {408, 429, 502, 503, 504}  # the server's state, whatever the request; other 5xx may be the request's fault
BAD_REQUEST = {400, 413, 422}
BROKEN_OFF = {None, "abort", "error"}  # finish reasons of a server that is going down
KNOWN_ENGINES = {"vllm", "sglang"}  # what their /models call the owner; they take parameters beyond the protocol


T = TypeVar("T")


class Refused(Exception):
    """One request that the server will never answer: ``reason`` in constant words, the message in the server's."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Unanswered(Exception):
    """A try that failed and may be repeated. ``after``: seconds that the server asks for. ``busy``: no request's fault."""

    def __init__(self, message: str, busy: bool, after: float = 0.0) -> None:
        super().__init__(message)
        self.busy, self.after = busy, after


class Endpoint:
    """A client of the server at ``url``, which ends in /v1. ``connect`` comes first; ``model`` is then the served name."""

    def __init__(self, url: str, settings: Settings, concurrency: int, timeout: float = 600.0, tries: int = 8) -> None:
        """``timeout``: seconds for one try of a request, of which there are ``tries``. Up to ``concurrency`` run at once."""
        self.url = url.rstrip("/")
        self.settings, self.concurrency, self.timeout, self.tries = settings, concurrency, timeout, tries
        self.model = ""
        self.extras: dict[str, Any] = {}
        self.counts_tokens = False
        self.answered = 0  # requests, to tell a bad one from a server that is down
        self.failures = 0  # tries that had to be repeated
        self.client = httpx.AsyncClient(
            headers=authorization(),
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=concurrency),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.client.aclose()

    async def connect(self, model: str | None) -> None:
        """Find the model, ``model`` or the first one served, and ask it one short question.

        Raises UserError where the server is not there, does not serve the model or refuses the settings.
        """
        try:
            served = await self.send("GET", "/models", None, models_of)
            self.choose(served, model)
            probe = await self.answer([{"role": "user", "content": "Say yes."}], None, 0.0, 0)
        except Refused as error:
            raise UserError(f"{self.url} refuses a plain question ({error}): change the settings that it names.") from error
        self.counts_tokens = probe.tokens > 0

    def choose(self, served: dict[str, str], model: str | None) -> None:
        """Take the model among those ``served``, each with its owner, and the parameters that only some servers know."""
        self.model = served_model(self.url, served, model)
        if served[self.model] in KNOWN_ENGINES:
            self.extras = {"skip_special_tokens": False, "top_k": self.settings.top_k or -1}
        elif self.settings.top_k:
            raise UserError("--top-k is not part of the OpenAI protocol, and this server may not take it: leave it out.")

    async def answer(self, messages: list[dict[str, Any]], tools: Any, temperature: float, seed: int) -> Answer:
        """The model's answer to the messages. Raises Refused where this request fails, UserError where the server does."""
        body = {
            "model": self.model,
            "messages": as_protocol(messages),
            "temperature": temperature,
            "top_p": self.settings.top_p,
            "max_tokens": self.settings.max_new_tokens,
            "seed": seed,
            **self.extras,
        }
        if tools:  # shown to the model; a call that it writes stays the text that it is
            body |= {"tools": tools, "tool_choice": "none"}
        return await self.send("POST", "/chat/completions", body, answer_of)

    async def send(self, method: str, path: str, body: dict[str, Any] | None, read: Callable[[Any], T]) -> T:
        """What ``read`` makes of the reply's JSON; tried again with growing, jittered waits while it may still succeed."""
        answered_before, failed = self.answered, None
        for failures in range(self.tries):
            if failed:
                await asyncio.sleep(max(failed.after, self.wait(failures - 1)))
            try:
                reply = read(await self.try_once(method, path, body))
                self.answered += 1
                return reply
            except Unanswered as error:
                failed = error
                self.failures += 1
                if not self.model:  # the run has not begun, and somebody may be watching a wrong address
                    note(f"{self.url}: {error}")
        assert failed, "there is at least one try"
        if not failed.busy and self.answered > answered_before:  # others were answered meanwhile
            raise Refused(FAILED, str(failed)) from failed
        raise UserError(
            f"{self.url} gave no answer in {self.tries} tries ({failed}): see to the server, then run the same command again; "
            "what is finished is kept."
        ) from failed

    @staticmethod
    def wait(failures: int) -> float:
        """Seconds to wait after so many failures, jittered so that the requests of one outage do not return at once."""
        return min(FIRST_WAIT * 2**failures, LONGEST_WAIT) * random.uniform(0.5, 1.0)

    async def try_once(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """The JSON value of a reply with status 200. Raises what any other outcome means."""
        try:
            async with asyncio.timeout(self.timeout):
                response = await self.client.request(method, self.url + path, json=body)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise UserError(f"--endpoint {self.url} is no address ({error}): give one as http://host:8000/v1.") from error
        except TimeoutError as error:
            raise Unanswered(f"nothing within {self.timeout:g} s", busy=False) from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unanswered(f"cannot connect: {str(error) or 'nobody answers'}", busy=True) from error
        except httpx.TransportError as error:
            raise Unanswered(f"{type(error).__name__}: {error}", busy=False) from error
        check_status(response)
        try:
            return response.json()
        except ValueError:
            return None


def authorization() -> dict[str, str]:
    """The header with the user's key, where there is one."""
    key = os.environ.get(KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}


def served_model(url: str, served: Iterable[str], model: str | None) -> str:
    """``model`` if the server at ``url`` has it, or the first of what it has. Raises UserError where there is none."""
    names = list(served)
    if model and model not in names:
        raise UserError(f"{url} does not serve {model!r}: choose --model from {', '.join(names) or 'no model'}.")
    if not names:
        raise UserError(f"{url} serves no model: start it with one.")
    return model or names[0]


def check_status(response: httpx.Response) -> None:
    """Raise what a status other than 200 means: to try again, one request's fault, or the settings'."""
    status = response.status_code
    if status in BUSY or status >= 500:
        raise Unanswered(f"status {status}: {said(response)}", status in BUSY, retry_after(response))
    if status in BAD_REQUEST:
        message = said(response)
        raise Refused(TOO_LONG if "context length" in message else REFUSED, message)
    if status != 200:
        mend = f"set {KEY}" if status in (401, 403) else "check --endpoint, which ends in /v1, and --model"
        raise UserError(f"{response.url} answers with status {status} ({said(response)}): {mend}.")


def said(response: httpx.Response) -> str:
    """The server's own words for an error, wherever its kind of server puts them; cut to a readable length."""
    try:
        text = message_of(response.json())
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(text.split())[:400] or response.reason_phrase


def message_of(value: Any) -> str:
    """What a JSON object that tells of an error says."""
    error = value.get("error", value)
    return error if isinstance(error, str) else str(error.get("message") or error.get("detail") or json.dumps(value))


def retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait, given as a number or as a date; 0 without a word of it."""
    value = response.headers.get("retry-after", "").strip()
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0


def as_protocol(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the protocol has them: no weights, arguments as JSON text, and calls and their results tied by an id."""
    sent, calls, open_calls = [], 0, []
    for message in messages:
        message = {key: value for key, value in message.items() if key != "weight"}
        if message.get("tool_calls"):
            open_calls = [f"call_{calls + i}" for i in range(len(message["tool_calls"]))]
            message["tool_calls"] = [
                {"id": name, "type": "function", "function": _written_out(call["function"])}
                for name, call in zip(open_calls, message["tool_calls"], strict=True)
            ]
            calls += len(open_calls)
        elif message["role"] == "tool" and open_calls:
            message["tool_call_id"] = open_calls.pop(0)
        sent.append(message)
    return sent


def _written_out(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def models_of(reply: Any) -> dict[str, str]:
    """The names of the models that a server lists, each with its owner."""
    try:
        return {card["id"]: card.get("owned_by") or "" for card in reply["data"]}
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError("the endpoint's /models is no list of models: check --endpoint, which ends in /v1.") from error


def answer_of(reply: Any) -> Answer:
    """The first choice of a chat completion.

    Raises Unanswered for what is none, and for one that the server broke off; Refused for an ending of another kind.
    """
    try:
        choice = reply["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        text = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        used = (reply.get("usage") or {}).get("completion_tokens") or 0
    except (LookupError, TypeError, AttributeError) as error:
        raise Unanswered("the reply is not a chat completion", busy=False) from error
    if finish in BROKEN_OFF:
        raise Unanswered(f"the answer was broken off (finish_reason {finish})", busy=True)
    if finish not in ("stop", "length"):
        raise Refused(OTHERWISE, f"finish_reason {finish}")
    return Answer(whole_thought("", whole_text(text)), finish, used, reasoning and whole_text(reasoning))


def whole_text(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can carry and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


async def through_endpoint(
    endpoint: Endpoint,
    rewrites: Iterable[Rewrite],
    done: Callable[[Rewrite], None],
    may_start: Callable[[int], bool],
) -> None:
    """Let the server rewrite conversations, several at once; ``done`` gets each as it is finished.

    ``may_start(tokens)`` is asked before each conversation with the completion tokens that this call has used; those under
    way are always finished. Raises UserError where the server fails.
    """
    waiting, used = iter(rewrites), 0

    async def work() -> None:
        nonlocal used
        while may_start(used):
            rewrite = next(waiting, None)
            if rewrite is None:
                return
            while rewrite.due:
                before = rewrite.tokens
                await next_answer(endpoint, rewrite)
                used += rewrite.tokens - before
            done(rewrite)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(endpoint.concurrency):
                workers.create_task(work())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


async def next_answer(endpoint: Endpoint, rewrite: Rewrite) -> None:
    """Ask for the one answer that is due. Its seed depends on the conversation and the turn alone."""
    name = f"{endpoint.settings.seed}/{rewrite.index}/{len(rewrite.messages)}"
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) >> 1  # 31 bits: some servers take no more
    try:
        answer = await endpoint.answer(rewrite.messages, rewrite.conversation.tools, rewrite.temperature, seed)
    except Refused as error:
        rewrite.end(error.reason, str(error))
    else:
        rewrite.take(answer)
