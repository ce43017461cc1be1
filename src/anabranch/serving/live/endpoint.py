"""A client of an OpenAI-compatible endpoint: what `anabranch chat` and `anabranch bench` talk through.

Foreign exceptions end here: a server that is not there is Unavailable with the remedy, a refusal is its own words.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, Self

import httpx
import msgspec

from anabranch.core.errors import ConfigError, Unavailable
from anabranch.serving.served import Served, Stream, error_of

CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length")


class ModelCard(msgspec.Struct, frozen=True):
    """Sizes are None if the server does not say; `vocab_size` and `block_tokens` only Anabranch does."""

    name: str
    context_tokens: int | None
    vocab_size: int | None = None
    block_tokens: int | None = None


class Endpoint:
    """One base URL. Use as an async context manager; every call raises Unavailable if nobody answers there."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None)
        timeout = httpx.Timeout(timeout_s, connect=5.0)
        try:
            # No proxy from the environment: the endpoint is on this machine or this network.
            self._client = httpx.AsyncClient(
                base_url=self.url, headers=headers, limits=limits, timeout=timeout, trust_env=False
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{url!r} is not a URL: {error}; write it like http://127.0.0.1:8000") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def models(self) -> list[ModelCard]:
        """What the server serves. Raises RequestError (e.g. wrong key) or Unavailable."""
        try:
            response = await self._client.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        self._check(response.status_code, response.content, response.headers)
        try:
            cards = [item for item in response.json()["data"] if isinstance(item["id"], str)]
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"{self.url} is not an OpenAI-compatible endpoint: it lists no models") from error
        return [
            ModelCard(card["id"], _size(card, *CONTEXT_FIELDS), _size(card, "vocab_size"), _size(card, "block_tokens"))
            for card in cards
        ]

    async def choose(self, name: str | None) -> ModelCard:
        """The model called `name`, or the first. Raises ConfigError naming those that there are."""
        cards = await self.models()
        for card in cards:
            if name in (None, card.name):
                return card
        known = ", ".join(card.name for card in cards) or "none"
        raise ConfigError(f"{self.url} does not serve {name or 'any model'}; it serves: {known}")

    async def stream(self, path: str, body: Mapping[str, Any], on_text: Callable[[str], None] | None = None) -> Served:
        """POST with streaming on; `on_text` gets each new piece of text. Raises what the server refused with, or
        Unavailable."""
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        stream = Stream(time.monotonic())
        try:
            async with self._client.stream("POST", path, json=request) as response:
                if response.status_code != 200:
                    self._check(response.status_code, await response.aread(), response.headers)
                async for line in lines(response):
                    text = stream.feed(line, time.monotonic())
                    if text and on_text is not None:
                        on_text(text)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        return stream.served()

    def _check(self, status: int, content: bytes, headers: httpx.Headers) -> None:
        if status == 200:
            return
        body: object = None
        retry_after_s = 1.0
        with suppress(msgspec.DecodeError):
            body = msgspec.json.decode(content)
        with suppress(ValueError):
            retry_after_s = float(headers.get("retry-after", "1"))
        raise error_of(body, status, retry_after_s)

    def _unreachable(self, error: Exception) -> Unavailable:
        if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
            return Unavailable(f"{self.url} did not answer in time")
        if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
            return Unavailable(f"{self.url} closed the connection in the middle of an answer")
        return Unavailable(f"no endpoint answers at {self.url}; start one with `anabranch up`, or give its --url")


async def lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines of an event stream. Not `aiter_lines`: that also cuts at characters that an answer may contain (U+0085,
    U+2028)."""
    rest = b""
    async for data in response.aiter_bytes():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r").decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _size(card: Mapping[str, Any], *fields: str) -> int | None:
    found = (card.get(field) for field in fields)
    return next((value for value in found if isinstance(value, int) and value > 0), None)
