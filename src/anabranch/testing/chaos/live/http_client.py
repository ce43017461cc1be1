"""A client of the completions endpoint that notices everything: errors, cuts, missing end marks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec

from anabranch.serving.detokenizer import numbered_tokens
from anabranch.testing.chaos.judge import Outcome
from anabranch.testing.chaos.workload import Ask

PREFIX, END = "data: ", b"\n\n"


class HttpClient:
    """Every second ask is streamed. A tripwire's text gives back the tokens exactly (`serving.detokenizer`)."""

    def __init__(self, url: str, vocab: int, connections: int, *, model: str = "tripwire") -> None:
        self._vocab = vocab
        self._model = model
        limits = httpx.Limits(max_connections=2 * connections, max_keepalive_connections=connections)
        self._http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(60.0, connect=2.0), limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    async def health(self) -> str:
        """The gateway's account of itself, or why there is none."""
        try:
            return (await self._http.get("/health", timeout=2.0)).text
        except httpx.HTTPError as error:
            return repr(error)

    async def put(self, ask: Ask) -> Outcome:
        seen = Outcome.empty(ask)
        said = ["" for _ in range(ask.n)]
        talk = self._streamed(ask, seen, said) if ask.number % 2 else self._whole(ask, seen, said)
        try:
            if ask.fate == "finish":
                await talk
            else:
                async with asyncio.timeout(ask.patience_s):
                    await talk
        except TimeoutError:
            seen.left = True
        except httpx.HTTPError as error:
            seen.cut = True
            seen.message = type(error).__name__
        seen.choices = [numbered_tokens(text, self._vocab) for text in said]
        return seen

    def _body(self, ask: Ask, *, stream: bool) -> dict[str, Any]:
        sampling = ask.sampling
        body = {
            "model": self._model,
            "prompt": ask.tokens,
            "n": ask.n,
            "seed": sampling.seed,
            "max_tokens": sampling.max_tokens,
            "presence_penalty": sampling.presence_penalty,
            "stream": stream,
        }
        return {**body, "stream_options": {"include_usage": True}} if stream else body

    async def _whole(self, ask: Ask, seen: Outcome, said: list[str]) -> None:
        response = await self._http.post("/v1/completions", json=self._body(ask, stream=False))
        body = _decoded(response.text)
        if response.status_code != 200:
            _refused(seen, body, response.status_code)
            return
        for choice in body["choices"]:
            said[choice["index"]] = choice["text"]
            seen.finishes[choice["index"]] = choice["finish_reason"]
        seen.prompt_tokens = body["usage"]["prompt_tokens"]

    async def _streamed(self, ask: Ask, seen: Outcome, said: list[str]) -> None:
        request = self._http.stream("POST", "/v1/completions", json=self._body(ask, stream=True))
        async with request as response:
            if response.status_code != 200:
                await response.aread()
                _refused(seen, _decoded(response.text), response.status_code)
                return
            async with contextlib.aclosing(_events(response)) as events:
                async for data in events:
                    if data == "[DONE]":
                        return
                    self._event(_decoded(data), seen, said)
                    if seen.error:
                        return
                    if ask.fate == "leave" and sum(map(len, said)) >= ask.patience_tokens:
                        seen.left = True
                        return
        seen.cut = True
        seen.message = "the stream ended without its end mark"

    def _event(self, body: dict[str, Any], seen: Outcome, said: list[str]) -> None:
        if "error" in body:
            _refused(seen, body, 200)
            return
        for choice in body["choices"]:
            said[choice["index"]] += choice["text"]
            if choice["finish_reason"] is not None:
                seen.finishes[choice["index"]] = choice["finish_reason"]
        if body.get("usage"):
            seen.prompt_tokens = body["usage"]["prompt_tokens"]


async def _events(response: httpx.Response) -> AsyncGenerator[str, None]:
    """Data of each event. Not `aiter_lines`: that cuts at characters that an answer may contain (U+0085, U+2028)."""
    rest = b""
    async for data in response.aiter_bytes():
        *events, rest = (rest + data).split(END)
        for event in events:
            yield event.decode().removeprefix(PREFIX)


def _refused(seen: Outcome, body: dict[str, Any], status: int) -> None:
    error = body.get("error", {})
    seen.error = str(error.get("code") or f"status {status}")
    seen.message = str(error.get("message", ""))


def _decoded(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
