"""A chat server on loopback that speaks the OpenAI protocol, to test a client: it answers, refuses, stalls, breaks."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = "river mill field spring water april door bread stone winter".split()


@dataclass
class Reply:
    """What the server does with one request. ``text`` is sent as it is, ``value`` as JSON; ``hang_up`` sends nothing."""

    status: int = 200
    value: Any = None
    text: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0  # seconds
    hang_up: bool = False


@dataclass
class Server:
    """What was asked so far: bodies of chat requests with the seconds at which they came; ``most`` were under way at once."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    tries: Counter[str] = field(default_factory=Counter)
    under_way: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def completion(text: str, finish: str | None = "stop", used: int | None = None, **message: Any) -> Reply:
    """A chat completion of one choice; ``used`` completion tokens, by default its words."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    usage = {"completion_tokens": len(text.split()) + 1 if used is None else used}
    return Reply(value={"object": "chat.completion", "choices": [choice], "usage": usage})


def babble(body: dict[str, Any]) -> Reply:
    """A dozen words that depend on the messages, the temperature and the seed alone, as a deterministic server's do."""
    asked = json.dumps([body["messages"], body["temperature"], body["seed"]], sort_keys=True)
    drawn = hashlib.sha256(asked.encode()).digest()[:12]
    return completion(" ".join(WORDS[byte % len(WORDS)] for byte in drawn))


@contextmanager
def serving(
    chat: Callable[[dict[str, Any], int], Reply] = lambda body, _: babble(body),
    models: tuple[str, ...] = ("m",),
    owner: str = "x",
) -> Iterator[Server]:
    """Serve ``chat(body, tries)``, told how often this very request was made before; a delay is slept through here."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.keys.add(self.headers.get("Authorization"))
            listed = [{"id": name, "object": "model", "owned_by": owner} for name in models]
            self.send(Reply(value={"data": listed}) if self.path == "/v1/models" else Reply(404, {"detail": "Not Found"}))

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            body = json.loads(raw)
            with server.lock:
                tries = server.tries[raw.decode()]
                server.tries[raw.decode()] += 1
                server.bodies.append(body)
                server.times.append(time.monotonic())
                server.under_way += 1
                server.most = max(server.most, server.under_way)
            reply = chat(body, tries)
            time.sleep(reply.delay)
            with server.lock:
                server.under_way -= 1
            self.send(reply)

        def send(self, reply: Reply) -> None:
            self.close_connection = reply.hang_up
            if reply.hang_up:
                return
            data = (json.dumps(reply.value) if reply.text is None else reply.text).encode()
            try:
                self.send_response(reply.status)
                for name, value in {**reply.headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
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
