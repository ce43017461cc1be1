"""An OpenAI-compatible endpoint without a model, on a free loopback port: for tests of clients.

It answers every prompt with `word` as often as asked for, and counts cached tokens as a perfect prefix cache would.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from anabranch.traces.stats import IdealCache


class FakeEndpoint:
    """Use as a context manager. `requests` holds the bodies received. `before` is called with (number of the request,
    body) before each answer and returns None to serve it, a status to refuse with, or "drop" to break off midway."""

    def __init__(
        self,
        *,
        context: int | None = 512,
        block_tokens: int = 16,
        word: str = "word ",
        tiers: bool = True,
        before: Callable[[int, dict[str, Any]], int | str | None] | None = None,
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self.context = context
        self.word = word
        self.tiers = tiers
        self.before = before or (lambda number, body: None)
        self.cache = IdealCache(block_tokens)
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"endpoint": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    endpoint: FakeEndpoint
    protocol_version = "HTTP/1.0"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        card: dict[str, Any] = {"id": "fake", "object": "model"}
        if self.endpoint.context is not None:
            card["max_model_len"] = self.endpoint.context
        self._json(200, {"object": "list", "data": [card]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.endpoint.lock:
            self.endpoint.requests.append(body)
            number = len(self.endpoint.requests) - 1
        verdict = self.endpoint.before(number, body)
        if isinstance(verdict, int):
            self._json(verdict, {"error": {"message": f"refused with {verdict}", "code": "refused"}})
            return
        self._stream(body, drop=verdict == "drop")

    def _stream(self, body: dict[str, Any], *, drop: bool) -> None:
        prompt = body["prompt"] if "prompt" in body else list(json.dumps(body["messages"]).encode())
        with self.endpoint.lock:
            cached = self.endpoint.cache.hit_tokens(prompt)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for _ in range(body["max_tokens"]):
            text: dict[str, Any] = {"text": self.endpoint.word}
            if "messages" in body:
                text = {"delta": {"content": self.endpoint.word}}
            self._event({"choices": [{"index": 0, "finish_reason": None, **text}], "usage": None})
            if drop:
                return
        self._event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        self._event({"choices": [], "usage": self._usage(len(prompt), cached, body["max_tokens"])})
        self.wfile.write(b"data: [DONE]\n\n")
        with self.endpoint.lock:
            self.endpoint.cache.add(prompt)

    def _usage(self, prompt: int, cached: int, output: int) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.endpoint.tiers:
            usage["anabranch"] = {"computed": prompt - cached, "dram": cached, "ssd": 0, "peer": 0}
        return usage

    def _event(self, body: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")

    def _json(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        if status == 429:
            self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(content)
