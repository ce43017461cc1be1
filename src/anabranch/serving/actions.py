"""What a request's lifecycle asks its driver to do, and how an engine's refusal reads as an error."""

from __future__ import annotations

import msgspec

from anabranch.core.errors import AnabranchError, DeadlineExceeded, Overloaded, RequestError, Unavailable
from anabranch.engine.messages import Failed, GatewayToEngine, TokenEvent
from anabranch.engine.request import Usage
from anabranch.policy.routing import Route

CLIENT_FAULTS = {"context_length_exceeded", "invalid_input", "invalid_request"}


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Longest waits: for an engine to exist, for Prepared, for Prefilled, for the next token.

    The last three are begun again as long as the engine makes steps: a long queue is not a stalled engine, and trying
    again would only lose the place in it. So Prefilled may come after its ticket has ended; the decode engine then
    loads or recomputes the prompt.
    """

    engine_s: float = 10.0
    prepare_s: float = 30.0
    prefill_s: float = 60.0
    token_s: float = 60.0


class Send(msgspec.Struct, frozen=True):
    engine_id: str
    message: GatewayToEngine


class Deliver(msgspec.Struct, frozen=True):
    """New tokens for the client, in order."""

    events: list[TokenEvent]


class Routed(msgspec.Struct, frozen=True):
    """An attempt begins (for metrics and logs)."""

    route: Route
    attempt: int


class Computed(msgspec.Struct, frozen=True):
    """The prompt is in place; said once per request, so each prompt token is counted once."""

    usage: Usage


class Ended(msgspec.Struct, frozen=True):
    """Nothing follows. `error` None: every choice is complete, or the client went away (`cancelled`)."""

    error: AnabranchError | None = None
    cancelled: bool = False


Action = Send | Deliver | Routed | Computed | Ended


def refusal(engine_id: str, message: Failed) -> AnabranchError:
    """The error a client sees if nobody else can serve the request."""
    if message.code == Overloaded.code:
        return Overloaded(message.message, retry_after_s=message.retry_after_s)
    if message.code == DeadlineExceeded.code:
        return DeadlineExceeded(message.message)
    if message.retryable:
        return Unavailable(message.message)
    if message.code in CLIENT_FAULTS:
        return RequestError(message.message, code=message.code)
    return AnabranchError(f"engine {engine_id}: {message.message}")
