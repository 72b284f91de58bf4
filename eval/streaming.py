"""One answer of an OpenAI-compatible server as it streams in, and a client that never sends a request beyond its budget."""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, Self

import httpx

from ..data.endpoint import (
    BROKEN_OFF,
    Endpoint,
    Refused,
    Unanswered,
    as_protocol,
    authorization,
    check_status,
    message_of,
    models_of,
    served_model,
)
from ..errors import UserError, first_line
from .engine_metrics import EngineMetrics, read_metrics
from .prompts import Prompt

TRIES = 4  # of a request that a busy server turns away; each is a request of the budget
METRICS_PATIENCE = 5.0  # seconds for the metrics page, which is not worth a longer wait


class Spent(Exception):
    """The budget has no request left."""


@dataclass
class Answer:
    """One streamed answer, filled while it arrives. Times are those of time.perf_counter, in seconds."""

    prompt: str  # its texts, for comparing the answer with them
    sent: float
    first: float | None = None  # when the first text came
    last: float = 0.0  # when the last text, or the word that the answer is finished, came
    text: str = ""
    pieces: int = 0  # events with text
    used: int | None = None  # completion tokens in the server's own count
    prompt_tokens: int | None = None
    finish: str | None = None
    done: bool = False  # the stream's closing word was seen

    @property
    def tokens(self) -> int:
        """The server's count; without one, the events with text, which under speculation hold several tokens each."""
        return self.pieces if self.used is None else self.used

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; None for an answer without any."""
        return None if self.first is None else self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token behind the first; None for one token, or where all came in one piece."""
        if self.first is None or self.tokens < 2 or self.last <= self.first:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    def take(self, event: Any, now: float) -> None:
        """One event of the stream. Raises AttributeError, LookupError or TypeError for one that is no piece of a completion."""
        usage = event.get("usage") or {}
        self.used = usage.get("completion_tokens", self.used)
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        for choice in event["choices"][:1]:
            delta = choice.get("delta") or {}
            text = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
            self.finish = choice.get("finish_reason") or self.finish
            if text:
                self.first = self.first or now
                self.text += text
                self.pieces += 1
            if text or choice.get("finish_reason"):
                self.last = now


class Streams:
    """A client of the server at ``url``, which ends in /v1. It sends at most ``requests``, of any kind, to that host alone.

    It follows no redirect, uses no proxy of the environment, waits at most ``patience`` seconds for the next byte, and for
    nothing beyond ``seconds`` from now.
    """

    def __init__(self, url: str, requests: int, seconds: float, patience: float) -> None:
        self.url, self.left, self.patience = url.rstrip("/"), requests, patience
        self.deadline = time.monotonic() + seconds
        self.model = ""
        self.client = httpx.AsyncClient(
            headers=authorization(),
            timeout=httpx.Timeout(patience, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            follow_redirects=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.client.aclose()

    def spend(self) -> None:
        """Called before anything is sent. Raises Spent where that would exceed the budget."""
        if self.left < 1:
            raise Spent
        self.left -= 1

    async def choose(self, model: str | None) -> None:
        """Take ``model`` or the first one served. Raises UserError where the server is not there or does not serve it."""
        self.spend()
        try:
            response = await self.client.get(f"{self.url}/models")
            refuse_redirect(response)
            check_status(response)
            self.model = served_model(self.url, models_of(response.json()), model)
        except ValueError as error:
            raise UserError(f"{self.url}/models is no JSON: check --endpoint, which ends in /v1.") from error
        except (Unanswered, Refused) as error:
            raise UserError(f"{self.url} does not list its models ({error}): see to the server.") from error
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise self.unreachable(error, None) from error

    async def metrics(self) -> EngineMetrics | None:
        """The engine's own numbers, at the root of the server; None where it shows none, or there is no request left."""
        if self.left < 1:
            return None
        self.spend()
        try:
            response = await self.client.get(self.url.removesuffix("/v1") + "/metrics", timeout=METRICS_PATIENCE)
        except httpx.RequestError:
            return None
        return read_metrics(response.text) if response.status_code == 200 else None

    async def ask(self, prompt: Prompt, max_tokens: int, temperature: float | None) -> Answer:
        """The answer to a prompt; a server that is busy is asked again a few times, with growing waits.

        Raises UserError where it does not come, in one sentence; Spent where the budget ends before.
        """
        body = {
            "model": self.model,
            "messages": as_protocol(prompt.messages),
            "max_tokens": prompt.max_new or max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"temperature": temperature} if temperature is not None else {}
        body |= {"stop": list(prompt.stop)} if prompt.stop else {}
        body |= {"tools": prompt.tools, "tool_choice": "none"} if prompt.tools else {}
        answer = Answer("\n".join(str(message.get("content") or "") for message in prompt.messages), 0.0)
        for failures in range(TRIES):
            try:
                return await self.stream(body, answer)
            except Refused as error:
                raise UserError(f"{self.url} refuses a request ({error}): change what it names.") from error
            except Unanswered as error:
                if not error.busy:
                    raise UserError(f"{self.url} fails ({error}): see to the server.") from error
                wait = max(error.after, Endpoint.wait(failures))
                if failures == TRIES - 1 or self.left < 1 or time.monotonic() + wait > self.deadline:
                    raise UserError(
                        f"{self.url} turned a request away in {failures + 1} tries ({error}): "
                        "ask for less at once, or when it is less busy."
                    ) from error
                await asyncio.sleep(wait)
        raise AssertionError("the last try returns or raises")

    async def stream(self, body: dict[str, Any], answer: Answer) -> Answer:
        """Send the request and fill the answer. Raises what ``check_status`` does, and UserError for a stream that fails."""
        self.spend()
        answer.sent = time.perf_counter()
        try:
            async with self.client.stream("POST", f"{self.url}/chat/completions", json=body) as response:
                refuse_redirect(response)
                if response.status_code != 200:
                    await response.aread()
                    check_status(response)
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    raise UserError(
                        f"{self.url} answers without streaming, so no token's time can be seen: turn its streaming on."
                    )
                async for line in response.aiter_lines():
                    self.take(line, answer)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise self.unreachable(error, answer) from error
        if answer.finish in BROKEN_OFF and not (answer.done and answer.finish is None):
            raise self.broken_off(answer, f"finish_reason {answer.finish}" if answer.finish else "the stream ends early")
        return answer

    def take(self, line: str, answer: Answer) -> None:
        """One line of the stream."""
        now = time.perf_counter()
        field, _, value = line.partition(":")
        if field != "data":
            return  # a comment that keeps the connection open, another field, or the end of an event
        if value.strip() == "[DONE]":
            answer.done, answer.last = True, answer.last or now
            return
        try:
            event = json.loads(value)
            if event.get("error"):
                raise self.broken_off(answer, message_of(event))
            answer.take(event, now)
        except (ValueError, AttributeError, LookupError, TypeError) as error:
            raise UserError(f"{self.url} streams what is no chat completion: check --endpoint.") from error

    def broken_off(self, answer: Answer, why: str) -> UserError:
        return UserError(f"{self.url} breaks an answer off after {answer.pieces} pieces ({why}): see to the server.")

    def unreachable(self, error: Exception, answer: Answer | None) -> UserError:
        """What it means that nothing more comes."""
        if isinstance(error, (httpx.InvalidURL, httpx.UnsupportedProtocol)):
            return UserError(f"--endpoint {self.url} is no address ({error}): give one as http://host:8000/v1.")
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return UserError(
                f"{self.url} cannot be reached ({str(error) or 'nobody answers'}): start the server, or mend --endpoint."
            )
        if isinstance(error, httpx.TimeoutException):
            return UserError(f"{self.url} sent nothing for {self.patience:g} s: see whether the server hangs.")
        if answer and answer.pieces:
            return self.broken_off(answer, first_line(error))
        return UserError(f"{self.url} gives no answer ({first_line(error)}): see to the server.")


def refuse_redirect(response: httpx.Response) -> None:
    """The named host alone is asked, and a redirect may lead to another."""
    if response.is_redirect:
        where = response.headers["location"]
        raise UserError(f"{response.url} redirects to {where}, which is not followed: name that address in --endpoint.")
