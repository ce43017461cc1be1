"""OpenAI response bodies, whole and streamed.

**Covers** the JSON of answers, chunks, usage and errors. **Does not cover** HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from anabranch.core.errors import (
    AnabranchError,
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    RequestError,
    Retryable,
)
from anabranch.engine.request import Usage
from anabranch.serving.assembly import Entry, Piece

DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder()


class PromptDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class Tiers(msgspec.Struct, kw_only=True):
    """Prompt tokens by origin; they add up to prompt_tokens."""

    computed: int
    dram: int
    ssd: int
    peer: int


class UsageBody(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    anabranch: Tiers


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str


class Choice(msgspec.Struct, kw_only=True):
    """One of `delta` (chat chunk), `message` (chat) and `text` (completion) is set."""

    index: int
    delta: Delta | UnsetType = UNSET
    message: ChatMessage | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: Any = None
    finish_reason: str | None = None


class Answer(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody | UnsetType | None = UNSET


class Voice(msgspec.Struct, kw_only=True):
    """What all parts of one answer have in common. `token_bytes` is the text of a token for log probabilities."""

    kind: Literal["chat", "completion"]
    id: str
    created: int
    model: str
    logprobs: bool
    include_usage: bool
    token_bytes: Callable[[int], bytes]

    def opening(self, choices: int) -> bytes:
        """The role, before any text (chat only)."""
        if self.kind == "completion":
            return b""
        return b"".join(
            self._event([Choice(index=index, delta=Delta(role="assistant", content=""))]) for index in range(choices)
        )

    def event(self, piece: Piece) -> bytes:
        """One server-sent event; b"" if the piece says nothing yet."""
        if not (piece.text or piece.entries or piece.finish):
            return b""
        choice = Choice(index=piece.index, finish_reason=piece.finish, logprobs=self._logprobs(piece.entries))
        if self.kind == "chat":
            choice.delta = Delta(content=piece.text) if piece.text or not piece.finish else Delta()
        else:
            choice.text = piece.text
        return self._event([choice])

    def closing(self, usage: UsageBody) -> bytes:
        """After the last choice: usage if wanted, and the end mark."""
        if not self.include_usage:
            return DONE
        return sse(msgspec.structs.replace(self._answer([], chunk=True), usage=usage)) + DONE

    def whole(self, choices: Sequence[tuple[int, str, list[Entry], str | None]], usage: UsageBody) -> bytes:
        """The body of an answer that is not streamed; choices as (index, text, log probabilities, finish)."""
        body = []
        for index, text, entries, finish in choices:
            choice = Choice(index=index, finish_reason=finish, logprobs=self._logprobs(entries))
            if self.kind == "chat":
                choice.message = ChatMessage(content=text)
            else:
                choice.text = text
            body.append(choice)
        answer = self._answer(body, chunk=False)
        answer.usage = usage
        return _json.encode(answer)

    def _event(self, choices: list[Choice]) -> bytes:
        answer = self._answer(choices, chunk=True)
        if self.include_usage:
            answer.usage = None
        return sse(answer)

    def _answer(self, choices: list[Choice], *, chunk: bool) -> Answer:
        name = "text_completion"
        if self.kind == "chat":
            name = "chat.completion.chunk" if chunk else "chat.completion"
        return Answer(id=self.id, object=name, created=self.created, model=self.model, choices=choices)

    def _logprobs(self, entries: list[Entry]) -> Any:
        if not self.logprobs:
            return None
        if self.kind == "chat":
            return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}
        return {
            "tokens": [self._token_text(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{self._token_text(token): value for token, value in entry.top} for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _chat_entry(self, entry: Entry) -> dict[str, Any]:
        top = [self._token(token, value) for token, value in entry.top]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token_text(token), "logprob": logprob, "bytes": list(self.token_bytes(token))}

    def _token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")


def sse(body: Any) -> bytes:
    return b"data: " + _json.encode(body) + b"\n\n"


def usage_body(usages: Sequence[Usage], prompt_tokens: int, completion_tokens: int) -> UsageBody:
    """Sums over the prompts of a request. A prompt whose origin no engine reported counts as computed."""
    dram = sum(usage.dram for usage in usages)
    ssd = sum(usage.ssd for usage in usages)
    peer = sum(usage.peer for usage in usages)
    cached = dram + ssd + peer
    return UsageBody(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
        anabranch=Tiers(computed=prompt_tokens - cached, dram=dram, ssd=ssd, peer=peer),
    )


def http_status(error: AnabranchError) -> int:
    match error:
        case RequestError():
            return error.status
        case Overloaded():
            return 429
        case DeadlineExceeded():
            return 504
        case Retryable():
            return 503
        case InvalidInput():
            return 400
        case _:
            return 500


def error_body(error: AnabranchError, status: int) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": error.param if isinstance(error, RequestError) else None,
            "code": error.code,
        }
    }
