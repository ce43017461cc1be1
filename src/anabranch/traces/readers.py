"""Lines of a trace file → requests.

**Covers** three formats, told apart by their first line:

    mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids (global; blocks of 512 tokens)
    agents     JSON lines, one session each: session, block_size, requests[t, agent, input_length, output_length,
               blocks as ranges with ids local to the session, think_time]
    azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens (lengths only)

**Does not cover** opening files: `live.files`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Literal

import msgspec

from anabranch.core.errors import InvalidInput
from anabranch.traces.schema import LOCAL_MASK, Namespaces, TraceRequest, ranges_of

TraceFormat = Literal["mooncake", "agents", "azure"]
FORMATS: tuple[TraceFormat, ...] = ("mooncake", "agents", "azure")
MOONCAKE_BLOCK_TOKENS = 512
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class _AgentRequest(msgspec.Struct):
    t: float
    input_length: int
    output_length: int
    blocks: list[tuple[int, int]]
    agent: str = "main"
    think_time: float = 0.0


class _AgentSession(msgspec.Struct):
    session: str
    block_size: int
    requests: list[_AgentRequest]


_mooncake = msgspec.json.Decoder(_MooncakeLine)
_agents = msgspec.json.Decoder(_AgentSession)


def detect_format(line: str, where: str) -> TraceFormat:
    """Raises InvalidInput if the line opens none of the formats."""
    if line.lstrip("\ufeff").strip().replace(" ", "") == AZURE_HEADER:
        return "azure"
    try:
        first = msgspec.json.decode(line)
    except msgspec.DecodeError:
        first = None
    if isinstance(first, dict):
        if "requests" in first and "session" in first:
            return "agents"
        if "hash_ids" in first and "timestamp" in first:
            return "mooncake"
    raise InvalidInput(
        f"{where}:1: not a known trace; the first line must hold timestamp and hash_ids (mooncake), "
        f"session and requests (agents), or be the header {AZURE_HEADER} (azure)"
    )


class TraceReader:
    """Reads one file's lines. A bad line raises InvalidInput naming `where`:line; with `lenient` it is left out and
    counted in `skipped`, the first reason kept in `first_reason`."""

    def __init__(self, where: str, *, trace_format: TraceFormat | None = None, lenient: bool = False) -> None:
        self.where = where
        self.format = trace_format
        self.skipped = 0
        self.first_reason = ""
        self._lenient = lenient
        self._namespaces = Namespaces()
        self._azure_start: datetime | None = None

    def requests(self, lines: Iterable[str]) -> Iterator[TraceRequest]:
        """Requests in the order of the file. An empty file raises InvalidInput."""
        empty = True
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            empty = False
            if self.format is None:
                self.format = detect_format(line, self.where)
            try:
                yield from self._parser(self.format)(line, number)
            except (msgspec.MsgspecError, ValueError) as error:
                self._refuse(number, str(error))
        if empty:
            raise InvalidInput(f"{self.where}: the trace is empty")

    def _refuse(self, number: int, reason: str) -> None:
        message = f"{self.where}:{number}: bad {self.format} line: {reason}"
        if not self._lenient:
            raise InvalidInput(f"{message} (--lenient skips bad lines)")
        self.skipped += 1
        self.first_reason = self.first_reason or message

    def _parser(self, trace_format: TraceFormat) -> Callable[[str, int], list[TraceRequest]]:
        return {"mooncake": self._mooncake, "agents": self._agents, "azure": self._azure}[trace_format]

    def _mooncake(self, line: str, number: int) -> list[TraceRequest]:
        row = _mooncake.decode(line)
        _check_lengths(row.input_length, row.output_length)
        if any(not 0 <= block < 1 << 63 for block in row.hash_ids):
            raise ValueError("hash_ids must be from 0 to 2**63 - 1")
        if len(row.hash_ids) > -(-row.input_length // MOONCAKE_BLOCK_TOKENS):
            raise ValueError(f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens in blocks of 512")
        return [
            TraceRequest(
                t_s=row.timestamp / 1000,
                session=f"request-{number}",
                input_tokens=row.input_length,
                output_tokens=row.output_length,
                block_tokens=MOONCAKE_BLOCK_TOKENS,
                ranges=ranges_of(row.hash_ids),
            )
        ]

    def _agents(self, line: str, number: int) -> list[TraceRequest]:
        session = _agents.decode(line)
        if session.block_size < 1:
            raise ValueError("block_size must be at least 1")
        base = self._namespaces.base(session.session)
        return [_agent_request(session, request, base) for request in session.requests]

    def _azure(self, line: str, number: int) -> list[TraceRequest]:
        if line.lstrip("\ufeff").startswith("TIMESTAMP"):
            return []
        stamp, inputs, outputs = line.strip().split(",")
        when = datetime.fromisoformat(stamp[:26])  # the last digit, 100 ns, is more than datetime holds
        self._azure_start = self._azure_start or when
        lengths = int(inputs), int(outputs)
        _check_lengths(*lengths)
        return [
            TraceRequest(
                t_s=(when - self._azure_start).total_seconds(),
                session=f"request-{number}",
                input_tokens=lengths[0],
                output_tokens=lengths[1],
            )
        ]


def _agent_request(session: _AgentSession, request: _AgentRequest, base: int) -> TraceRequest:
    _check_lengths(request.input_length, request.output_length)
    if any(first < 0 or count < 1 or first + count > LOCAL_MASK for first, count in request.blocks):
        raise ValueError(f"blocks at t={request.t} must be ranges [first, count] with first ≥ 0 and count ≥ 1")
    if sum(count for _, count in request.blocks) > -(-request.input_length // session.block_size):
        raise ValueError(f"more blocks than {request.input_length} tokens fill, at t={request.t}")
    return TraceRequest(
        t_s=request.t,
        session=session.session,
        agent=request.agent,
        input_tokens=request.input_length,
        output_tokens=request.output_length,
        think_s=request.think_time,
        block_tokens=session.block_size,
        ranges=tuple((base + first, count) for first, count in request.blocks),
    )


def _check_lengths(inputs: int, outputs: int) -> None:
    if inputs < 0 or outputs < 0:
        raise ValueError("lengths must not be negative")
