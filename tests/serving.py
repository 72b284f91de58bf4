"""A chat server on loopback that speaks the OpenAI protocol, to test a client: it answers, refuses, stalls, breaks."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = "river mill field spring water april door bread stone winter".split()


@dataclass
class Reply:
    """What the server does with one request. ``text`` is sent as it is, ``value`` as JSON; ``hang_up`` sends nothing.

    ``events`` are streamed instead, one every ``gap`` seconds, each after "data: "; with ``breaks`` the connection is then cut.
    """

    status: int = 200
    value: Any = None
    text: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0  # seconds
    hang_up: bool = False
    events: Sequence[str] | None = None
    gap: float = 0.0
    breaks: bool = False


@dataclass
class Server:
    """What was asked so far: bodies of chat requests with the seconds at which they came; ``most`` were under way at once.

    ``requests`` counts all kinds; ``cancelled`` those whose client went away before the last event.
    """

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    tries: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    cancelled: int = 0
    under_way: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def completion(text: str, finish: str | None = "stop", used: int | None = None, **message: Any) -> Reply:
    """A chat completion of one choice; ``used`` completion tokens, by default its words."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    usage = {"completion_tokens": len(text.split()) + 1 if used is None else used}
    return Reply(value={"object": "chat.completion", "choices": [choice], "usage": usage})


def streamed(
    text: str, finish: str | None = "stop", used: int | None = -1, gap: float = 0.0, words: int = 1, **ways: Any
) -> Reply:
    """A streamed chat completion, ``words`` of the text in an event; ``used`` completion tokens, by default its words and an
    end, None for a server that does not count them."""
    parts = text.split(" ")
    pieces = [" ".join(parts[i : i + words]) + " " for i in range(0, len(parts), words)]
    deltas = [{"role": "assistant", "content": ""}, *({"content": piece} for piece in pieces)]
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if used is not None:
        usage = {"prompt_tokens": 7, "completion_tokens": len(parts) + 1 if used < 0 else used}
        chunks.append({"choices": [], "usage": usage})
    return Reply(events=[*map(json.dumps, chunks), "[DONE]"], gap=gap, **ways)


def babble(body: dict[str, Any]) -> Reply:
    """A dozen words that depend on the messages, the temperature and the seed alone, as a deterministic server's do."""
    asked = json.dumps([body["messages"], body.get("temperature"), body.get("seed")], sort_keys=True)
    drawn = hashlib.sha256(asked.encode()).digest()[:12]
    text = " ".join(WORDS[byte % len(WORDS)] for byte in drawn)
    return streamed(text) if body.get("stream") else completion(text)


@contextmanager
def serving(
    chat: Callable[[dict[str, Any], int], Reply] = lambda body, _: babble(body),
    models: tuple[str, ...] = ("m",),
    owner: str = "x",
    metrics: Callable[[], Reply] = lambda: Reply(404, {"detail": "Not Found"}),
) -> Iterator[Server]:
    """Serve ``chat(body, tries)``, told how often this very request was made before; a delay is slept through here.

    ``metrics()`` is what /metrics shows.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # events leave at once

        def do_GET(self) -> None:
            with server.lock:
                server.keys.add(self.headers.get("Authorization"))
                server.requests += 1
            listed = [{"id": name, "object": "model", "owned_by": owner} for name in models]
            pages = {"/v1/models": lambda: Reply(value={"data": listed}), "/metrics": metrics}
            self.send(pages.get(self.path, lambda: Reply(404, {"detail": "Not Found"}))())

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            body = json.loads(raw)
            with server.lock:
                tries = server.tries[raw.decode()]
                server.tries[raw.decode()] += 1
                server.bodies.append(body)
                server.requests += 1
                server.times.append(time.monotonic())
                server.under_way += 1
                server.most = max(server.most, server.under_way)
            reply = chat(body, tries)
            time.sleep(reply.delay)
            if reply.events is not None:
                self.stream(reply)
                return
            self.leave()
            self.send(reply)

        def leave(self) -> None:
            with server.lock:
                server.under_way -= 1

        def stream(self, reply: Reply) -> None:
            """Send the events; the empty chunk that closes them is missing where the stream breaks."""
            *events, last = reply.events or [""]
            self.close_connection = reply.breaks
            try:
                self.head({"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked", **reply.headers})
                for event in events:
                    self.event(event)
                    time.sleep(reply.gap)
            except OSError:
                self.close_connection = True
                with server.lock:
                    server.cancelled += 1
            self.leave()
            with suppress(OSError):
                self.event(last)
                self.wfile.write(b"" if reply.breaks else b"0\r\n\r\n")

        def event(self, text: str) -> None:
            data = f"data: {text}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

        def head(self, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def send(self, reply: Reply) -> None:
            self.close_connection = reply.hang_up
            if reply.hang_up:
                return
            data = (json.dumps(reply.value) if reply.text is None else reply.text).encode()
            try:
                self.head({**reply.headers, "Content-Length": str(len(data))}, reply.status)
                self.wfile.write(data)
            except OSError:  # the client was killed, or has waited long enough
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:  # a killed client resets its connections
            pass

    with Quiet(("127.0.0.1", 0), Handler) as http:
        server = Server(f"http://127.0.0.1:{http.server_address[1]}/v1")
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
