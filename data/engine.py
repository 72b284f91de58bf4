"""Hidden states from a running vLLM server that was started to extract them: one request a sequence, many under way.

The server writes each sequence's states into a folder that both machines see, and answers with the file's path; the file is
deleted once it is read. docs/engine.md has the server's command line.
"""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from ..console import note
from ..errors import UserError
from ..target import Features, Target
from .chat import Encoded
from .endpoint import BAD_REQUEST, BUSY, FAILED, KEY, REFUSED, Endpoint, Refused, Unanswered, authorization, retry_after, said
from .hidden_states import NoStates, load, remove

TRIES = 8  # of one request, with growing waits between them
LATE = 10.0  # seconds that a file may take to show up once nobody holds its lock
TOP = 5  # tokens whose probabilities are compared before anything else is asked
APART = 0.5  # nats between the server's log-probability of a token and that of its own states: bfloat16 reaches a tenth of it
PROBE = 16  # tokens


@dataclass(frozen=True)
class Reply:
    """A sequence's states [tokens, layers, hidden], and the log-probabilities of the likeliest next tokens by their ids."""

    states: Tensor
    logprobs: dict[int, float]


class Engine:
    """The server at ``url``, which ends in /v1: ``connect`` first. ``layers`` are those that it was told to extract, the last
    of them the target's depth.

    ``folder``: where its files are found here, if not under the path that it names itself. ``timeout``: seconds for one try.
    """

    def __init__(
        self,
        url: str,
        layers: Sequence[int],
        model: str | None = None,
        folder: Path | None = None,
        in_flight: int = 8,
        timeout: float = 600.0,
        tries: int | None = None,
    ) -> None:
        self.url, self.layers, self.model, self.folder = url.rstrip("/"), tuple(layers), model, folder
        self.in_flight, self.timeout, self.tries = in_flight, timeout, tries or TRIES
        self.answered = 0  # requests, to tell a bad one from a server that is down
        self.stopped = threading.Event()
        self.client = httpx.Client(
            headers=authorization(),
            timeout=httpx.Timeout(timeout, connect=10.0),
            limits=httpx.Limits(max_connections=in_flight),
        )

    def connect(self, target: Target, longest: int) -> dict[str, Any]:
        """Ask for one short sequence and hold its states against the target's final norm and output head.

        Returns what the server says it is. Raises UserError where it is not there, extracts nothing, extracts other layers, in
        another dtype or of another model, or where sequences of ``longest`` tokens do not fit.
        """
        card = self._served()
        room = card.get("max_model_len")
        if room and longest >= room:
            raise UserError(
                f"{self.url} takes {room} tokens with one new one, and the longest conversation has {longest}: start it with "
                f"--max-model-len {longest + 1}, or set max_length to {room - 1}."
            )
        ids = torch.linspace(0, target.vocab_size - 1, PROBE).long()
        try:
            reply = self.ask(ids.tolist(), logprobs=TOP)
        except Refused as error:
            raise UserError(
                f"{self.url} refuses a plain sequence ({error}): see docs/engine.md for how to start it."
            ) from error
        self._check(reply, target)
        return {"url": self.url, "model": self.model, "layers": list(self.layers), "version": self._version()}

    def ask(self, ids: list[int], logprobs: int | None = None) -> Reply:
        """The states of a sequence, tried again with growing waits while the server may still answer.

        Raises Refused where this sequence fails, UserError where the server does.
        """
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "stream": False}
        if logprobs is not None:
            body |= {"logprobs": logprobs, "return_tokens_as_token_ids": True}
        before, failed = self.answered, Unanswered("it was not asked", busy=True)
        for failures in range(self.tries if threading.main_thread().is_alive() else 0):  # else the process is on its way out
            if failures and self.stopped.wait(max(failed.after, Endpoint.wait(failures - 1))):
                break
            try:
                reply = self._read(self._send("POST", "/completions", body), ids)
            except Unanswered as error:
                failed = error
                continue
            self.answered += 1
            return reply
        if not failed.busy and self.answered > before:  # others were answered meanwhile
            raise Refused(FAILED, str(failed))
        raise UserError(
            f"{self.url} gave no hidden states in {self.tries} tries ({failed}): see to the engine, then run the same command "
            "again, with --resume where it trains; what is finished is kept."
        )

    def close(self) -> None:
        self.stopped.set()
        self.client.close()

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON value of a reply with status 200. Raises what any other outcome means."""
        try:
            response = self.client.request(method, self.url + path, json=body)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise UserError(f"data.engine.url {self.url} is no address ({error}): give one as http://host:8000/v1.") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unanswered(f"cannot connect: {str(error) or 'nobody answers'}", busy=True) from error
        except httpx.TimeoutException as error:
            raise Unanswered(f"nothing within {self.timeout:g} s", busy=False) from error
        except httpx.TransportError as error:
            raise Unanswered(f"{type(error).__name__}: {error}", busy=False) from error
        status = response.status_code
        if status in BUSY or status >= 500:
            raise Unanswered(f"status {status}: {said(response)}", status in BUSY, retry_after(response))
        if status in BAD_REQUEST:
            raise Refused(REFUSED, said(response))
        if status != 200:
            mend = f"set {KEY}" if status in (401, 403) else "check data.engine.url, which ends in /v1, and data.engine.model"
            raise UserError(f"{response.url} answers with status {status} ({said(response)}): {mend}.")
        try:
            return response.json()
        except ValueError as error:
            raise Unanswered("the reply is no JSON", busy=False) from error

    def _served(self) -> dict[str, Any]:
        """What the server says of the model that is to be asked: the one named, or its first."""
        failed = None
        for failures in range(self.tries):
            try:
                cards = {card["id"]: card for card in self._send("GET", "/models")["data"]}
            except Unanswered as error:
                failed = error
                note(f"{self.url}: {error}")
                self.stopped.wait(Endpoint.wait(failures))
                continue
            except (Refused, LookupError, TypeError) as error:
                raise UserError(f"{self.url}/models is no list of models: check data.engine.url, which ends in /v1.") from error
            if self.model not in (None, *cards) or not cards:
                names = ", ".join(cards) or "no model"
                raise UserError(f"{self.url} does not serve {self.model!r}: choose data.engine.model from {names}.")
            self.model = self.model or next(iter(cards))
            return cards[self.model]
        raise UserError(
            f"{self.url} gave no answer in {self.tries} tries ({failed}): start the engine, or mend data.engine.url."
        )

    def _version(self) -> str | None:
        try:
            return str(self.client.get(self.url.removesuffix("/v1") + "/version").json()["version"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None

    def _read(self, value: Any, ids: list[int]) -> Reply:
        """The states that a completion tells of; their file is deleted."""
        try:
            named = (value.get("kv_transfer_params") or {}).get("hidden_states_path")
            top = ((value["choices"][0].get("logprobs") or {}).get("top_logprobs") or [{}])[0]
            logprobs = {int(name.removeprefix("token_id:")): chance for name, chance in top.items()}
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise Unanswered("the reply is no completion", busy=False) from error
        if not isinstance(named, str) or not named.endswith(".safetensors"):
            raise UserError(
                f"{self.url} answers without a file of hidden states: start it with the method extract_hidden_states and its "
                "connector, as docs/engine.md tells."
            )
        path = self.folder / Path(named).name if self.folder else Path(named)
        try:
            own, states = load(path, self.timeout, LATE)
        except NoStates as error:
            raise Unanswered(
                f"its file {path} {error}; the folder must be seen here, too (data.engine.folder)", True
            ) from error
        states = states.clone()  # the file goes
        remove(path)
        if states.shape[1] != len(self.layers):
            raise UserError(
                f"{self.url} extracts {states.shape[1]} layers, and {len(self.layers)} are asked of it: start it with the "
                f"layers {list(self.layers)}, or name those that it has in data.engine.layers."
            )
        if own.tolist() != ids:
            raise Refused(REFUSED, "the server sent the states of other tokens")
        if not bool(states.isfinite().all()):
            raise Refused(REFUSED, "its states hold NaN or infinity")
        return Reply(states, logprobs)

    def _check(self, reply: Reply, target: Target) -> None:
        states = reply.states
        if states.shape[-1] != target.hidden_size:
            raise UserError(
                f"{self.url} sends states of {states.shape[-1]} numbers, and {target.name!r} has {target.hidden_size}: serve "
                "that model, or name the one that is served."
            )
        if states.dtype != target.dtype:
            theirs, ours = (str(dtype).removeprefix("torch.") for dtype in (states.dtype, target.dtype))
            raise UserError(
                f"{self.url} computes in {theirs}, and the target is {ours} here: set its dtype to {theirs}, or start the "
                f"engine with --dtype {ours}."
            )
        last = normed(states[-1:, -1], target)
        own = target.logits(last).float().log_softmax(-1)[0]
        apart = max((abs(own[token].item() - chance) for token, chance in reply.logprobs.items()), default=float("inf"))
        if not apart < APART:
            raise UserError(
                f"{self.url} gives other probabilities of the next token than its states do with the final norm and output "
                f"head of {target.name!r} (off by {apart:.2f} nats): let it serve this very model, and extract layer "
                f"{self.layers[-1]} last."
            )


class EngineStates:
    """The states of one data set's rows from an engine. Up to ``ahead`` rows, besides those just asked for, are under way or
    wait in memory.

    A row that the server refuses, or answers with other tokens, NaN or infinity, is named once and counts as lost; under
    ``strict`` it stops the run.
    """

    def __init__(self, engine: Engine, target: Target, taps: Sequence[int], ahead: int = 0, strict: bool = False) -> None:
        self.engine, self.target, self.ahead, self.strict = engine, target, ahead, strict
        self.columns = [engine.layers.index(tap) for tap in taps]
        self.pool = ThreadPoolExecutor(engine.in_flight, thread_name_prefix="engine")
        self.pending: dict[int, Future[Reply]] = {}
        self.lost: set[int] = set()

    def expect(self, rows: Iterable[tuple[int, Encoded]]) -> None:
        """Ask for rows that will be needed, in this order, as far as there is room for them."""
        for row, example in rows:
            if len(self.pending) >= self.ahead:
                return
            if row not in self.lost:
                self._ask(row, example)

    def states(self, examples: dict[int, Encoded]) -> dict[int, Features]:
        """Each row's own states [time, ...] on the target's device; without the rows that are lost. Raises UserError."""
        wanted = [row for row in examples if row not in self.lost]
        for row in wanted:
            self._ask(row, examples[row])
        try:
            return {row: self._features(reply.states) for row in wanted if (reply := self._reply(row))}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drop what waits, and let what is under way be read to its end, so that no file stays behind."""
        self.engine.stopped.set()
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.pending.clear()

    def _reply(self, row: int) -> Reply | None:
        """What came of a row that was asked for; None where it is lost."""
        try:
            return self.pending.pop(row).result()
        except Refused as error:
            if self.strict:
                raise UserError(f"the engine gives no states of row {row} ({error.reason}: {error}): leave it out.") from error
            note(f"left out: row {row} ({error.reason}: {error})")
            self.lost.add(row)
            return None

    def _ask(self, row: int, example: Encoded) -> None:
        if row not in self.pending:
            self.pending[row] = self.pool.submit(self.engine.ask, example.ids.tolist())

    def _features(self, states: Tensor) -> Features:
        states = states.to(self.target.device, self.target.dtype)
        return Features(states[:, self.columns].flatten(1), normed(states[:, -1], self.target))


@torch.no_grad()
def normed(states: Tensor, target: Target) -> Tensor:
    """Last hidden states [tokens, hidden] of what the final norm reads."""
    states = states.to(target.device)
    return states if target.final_norm is None else target.final_norm(states[None])[0]


def layers_for(taps: Sequence[int], depth: int) -> tuple[int, ...]:
    """The layers that an engine must extract for a head with these taps."""
    return tuple(sorted({*taps, depth}))
