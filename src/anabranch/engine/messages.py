"""Gateway ↔ engine, one duplex connection per engine. Tags are class names; see `core.messages`.

Colocated (any engine, any role):        Submit → StepOutput* → (every choice finished)
Disaggregated:
    gateway → decode   Prepare           decode reserves pages, answers Prepared(ticket) or Failed
    gateway → prefill  Prefill(ticket)   prefill computes, pushes K/V, answers Prefilled(first tokens) or Failed
    gateway → decode   Start(first)      decode waits until the hand-off is complete, then StepOutput*
Cancel is idempotent and valid at any point on any engine; it is never answered.
A dropped connection cancels every request that came over it.
"""

from __future__ import annotations

from anabranch.core.messages import Message
from anabranch.engine.request import EngineRequest, FinishReason, TokenLogprob, Usage
from anabranch.transfer.api import Ticket


class Submit(Message, frozen=True, kw_only=True):
    request: EngineRequest


class Prepare(Message, frozen=True, kw_only=True):
    request: EngineRequest


class Prefill(Message, frozen=True, kw_only=True):
    request: EngineRequest
    ticket: Ticket


class Start(Message, frozen=True, kw_only=True):
    """The n first tokens, one per choice, sampled at prefill. The gateway has already sent them on."""

    request_id: str
    first: list[int]


class Cancel(Message, frozen=True, kw_only=True):
    request_id: str


class Drain(Message, frozen=True, kw_only=True):
    """Refuse new requests, finish running ones."""


class Ping(Message, frozen=True, kw_only=True):
    """Answered with EngineLoad at once: a liveness probe."""


class EngineHello(Message, frozen=True, kw_only=True):
    """First message on every connection, engine → gateway."""

    engine_id: str
    role: str
    model: str
    identity: bytes
    context_tokens: int
    block_tokens: int
    pid: int


class Prepared(Message, frozen=True, kw_only=True):
    """`cached` tokens of the prompt are already at the decode node and need not be pushed."""

    request_id: str
    ticket: Ticket
    cached: int


class TokenEvent(Message, frozen=True, kw_only=True):
    request_id: str
    index: int
    token: int
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    usage: Usage | None = None


class Prefilled(Message, frozen=True, kw_only=True):
    """Prompt done: the first token of each choice. All K/V has been sent (not necessarily received)."""

    request_id: str
    first: list[TokenEvent]
    usage: Usage


class StepOutput(Message, frozen=True, kw_only=True):
    """All tokens of one engine step."""

    tokens: list[TokenEvent]


class Failed(Message, frozen=True, kw_only=True):
    """The request ended without an answer. `retryable`: another engine (or a later try) may succeed."""

    request_id: str
    code: str
    message: str
    retryable: bool
    retry_after_s: float = 1.0


class EngineLoad(Message, frozen=True, kw_only=True):
    """A load view, sent at least every second and after each Ping."""

    waiting: int
    running: int
    waiting_tokens: int
    free_slots: int
    total_slots: int
    steps: int
    preemptions: int = 0
    draining: bool = False
    store_ok: bool = True
    counters: dict[str, float] = {}


GatewayToEngine = Submit | Prepare | Prefill | Start | Cancel | Drain | Ping
EngineToGateway = EngineHello | Prepared | Prefilled | StepOutput | Failed | EngineLoad
