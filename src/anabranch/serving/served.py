"""What a client sees of one answer: its text as it comes, its times, and where its prompt's tokens came from.

**Covers** server-sent events of /v1/chat/completions and /v1/completions, of Anabranch or another compatible server.
**Does not cover** connections (`live.endpoint`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from anabranch.core.errors import (
    AnabranchError,
    DeadlineExceeded,
    Overloaded,
    RequestError,
    Unavailable,
)

TIERS = ("dram", "ssd", "peer")


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, complete. Times in seconds; `ttft_s` from sending to the first text, `tpot_s` per token after it
    (None with fewer than two tokens). `tiers`: cached prompt tokens by tier; {} if the server does not say."""

    text: str
    finish: str
    ttft_s: float
    total_s: float
    tpot_s: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    tiers: dict[str, int]

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class Stream:
    """Reads one stream line by line. `feed` returns the new text; `served` the whole, after the end."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._last_s = sent_s
        self._texts: list[str] = []
        self._finish = ""
        self._usage: dict[str, Any] = {}
        self._events = 0
        self.ended = False

    def feed(self, line: str, now_s: float) -> str:
        """One line of the body. Raises the error that the server put into the stream, or Unavailable if it is none of
        this protocol."""
        if not line.startswith("data:"):
            return ""
        data = line[5:].strip()
        if data == "[DONE]":
            self.ended = True
            return ""
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise Unavailable(f"the server sent something that is no event: {data[:80]!r}") from error
        if not isinstance(event, dict):
            raise Unavailable(f"the server sent something that is no event: {data[:80]!r}")
        if event.get("error"):
            raise error_of(event, 500)
        if isinstance(event.get("usage"), dict):
            self._usage = event["usage"]
        return self._choice(event.get("choices") or [], now_s)

    def _choice(self, choices: list[Any], now_s: float) -> str:
        text = ""
        for choice in choices:
            delta = choice.get("delta") or {}
            text += choice.get("text") or delta.get("content") or ""
            self._finish = choice.get("finish_reason") or self._finish
        if text:
            self._events += 1
            self._first_s = now_s if self._first_s is None else self._first_s
            self._texts.append(text)
        if choices:
            self._last_s = now_s
        return text

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def served(self) -> Served:
        """Raises Unavailable if the stream broke off before its end mark."""
        if not self.ended:
            raise Unavailable("the connection ended in the middle of an answer; the server may have been stopped")
        first = self._last_s if self._first_s is None else self._first_s
        output = int(self._usage.get("completion_tokens", self._events))
        details = self._usage.get("prompt_tokens_details") or {}
        by_tier = self._usage.get("anabranch") or {}
        return Served(
            text=self.text,
            finish=self._finish,
            ttft_s=first - self._sent_s,
            total_s=self._last_s - self._sent_s,
            tpot_s=(self._last_s - first) / (output - 1) if output > 1 else None,
            prompt_tokens=int(self._usage.get("prompt_tokens", 0)),
            output_tokens=output,
            cached_tokens=int(details.get("cached_tokens") or 0),
            tiers={tier: int(by_tier[tier]) for tier in TIERS if tier in by_tier},
        )


def error_of(body: object, status: int, retry_after_s: float = 1.0) -> AnabranchError:
    """The server's refusal as an error of this package, in its own words."""
    found = body.get("error") if isinstance(body, dict) else None
    message, code = f"the server answered with status {status}", None
    if isinstance(found, dict):
        message, code = str(found.get("message") or message), found.get("code")
    elif isinstance(found, str):
        message = found
    if status == 429:
        return Overloaded(message, retry_after_s=retry_after_s)
    if status == 504:
        return DeadlineExceeded(message)
    if status >= 500:
        return Unavailable(message)
    return RequestError(message, status=status, code=code if isinstance(code, str) else None)


def reuse_line(answer: Served) -> str:
    """One line: what was reused (by tier) and computed, TTFT, speed."""
    tiers = ", ".join(f"{count:,} {tier}" for tier, count in answer.tiers.items() if count)
    parts = [
        f"reused {answer.cached_tokens:,}{f' ({tiers})' if tiers else ''}",
        f"computed {answer.computed_tokens:,}",
        f"TTFT {seconds(answer.ttft_s)}",
    ]
    if answer.tpot_s:
        parts.append(f"{1 / answer.tpot_s:.1f} tokens/s")
    return " · ".join(parts)


def seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"
