"""Questions to directory processes, on the caller's own thread.

A lane is one connection that one caller uses at a time: a question costs one send and one receive, and no hand-off to
another thread. Lanes wait in a pool between questions.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from typing import Any

import msgspec

from anabranch.core.errors import AccessDenied, Unavailable, WireError
from anabranch.core.live.handshake import OPEN_DIALER, Dialer
from anabranch.core.messages import Message
from anabranch.core.wire import HEADER, MAX_FRAME_BYTES, encode
from anabranch.store.live.directory_refusal import FromDirectory, Refused, refusal

CONNECT_S = 0.5
DOWN_S = 0.1
LONGEST_DOWN_S = 1.0
POOLED = 64
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromDirectory)


class Lane:
    """One connection. Every call raises Unavailable once the deadline (monotonic) has passed, or the peer is gone;
    the lane is then closed."""

    def __init__(self, address: str, deadline: float, dial: Dialer = OPEN_DIALER) -> None:
        self.address = address
        try:
            self._sock = dial(address, timeout_s=max(0.001, min(CONNECT_S, deadline - time.monotonic())))
        except AccessDenied as error:
            raise Refused(f"directory {address}: {error}", denied=True) from error
        except WireError as error:
            raise Refused(f"directory {address}: what answers there is no directory: {error}", denied=False) from error
        self._patience = 0.0

    def send(self, message: Message, deadline: float) -> None:
        try:
            self._wait_until(deadline)
            self._sock.sendall(encode(message))
        except OSError as error:
            raise self._failed(error) from error

    def receive(self, deadline: float) -> Any:
        try:
            data = self._read(b"", HEADER.size, deadline)
            (length,) = HEADER.unpack_from(data)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
            data = self._read(data, HEADER.size + length, deadline)
            message = _decoder.decode(memoryview(data)[HEADER.size : HEADER.size + length])
            if refused := refusal(self.address, message):
                self.close()
                raise refused
            return message
        except (OSError, msgspec.MsgspecError, WireError) as error:
            raise self._failed(error) from error

    def close(self) -> None:
        self._sock.close()

    def _read(self, data: bytes, size: int, deadline: float) -> bytes:
        while len(data) < size:
            self._wait_until(deadline)
            more = self._sock.recv(max(1 << 16, size - len(data)))
            if not more:
                raise ConnectionResetError("it closed the connection")
            data = data + more if data else more
        return data

    def _wait_until(self, deadline: float) -> None:
        """The kernel's own timeout: Python's costs another system call each time. Renewed when it is off by a
        quarter."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed")
        if not 0.75 * self._patience <= left <= self._patience:
            value = struct.pack("@ll", int(left), int(left % 1 * 1e6) + 1)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            self._patience = left

    def _failed(self, error: Exception) -> Unavailable:
        self.close()
        cause = "no answer before the deadline" if isinstance(error, BlockingIOError | TimeoutError) else str(error)
        return Unavailable(f"directory {self.address}: {cause}")


class Lanes:
    """All lanes to all shards. Thread-safe. A shard that failed is not asked again for DOWN_S (doubling up to
    LONGEST_DOWN_S) except by one caller at a time, so that the others learn at once that it is down."""

    def __init__(self, dial: Dialer = OPEN_DIALER) -> None:
        self._dial = dial
        self._idle: dict[str, deque[Lane]] = {}
        self._down: dict[str, tuple[float, float]] = {}
        self._reasons: dict[str, Unavailable] = {}
        self._closed = False

    def ask(self, questions: dict[str, Message], deadline: float) -> dict[str, Message | Unavailable]:
        """One question to each address, all under way at the same time."""
        answers: dict[str, Message | Unavailable] = {}
        asked: list[tuple[Lane, bool]] = []
        for address, question in questions.items():
            try:
                asked.append(self._send(address, question, deadline))
            except Unavailable as error:
                answers[address] = error
        for lane, pooled in asked:
            address = lane.address
            try:
                try:
                    answers[address] = lane.receive(deadline)
                except Unavailable:
                    if not pooled or time.monotonic() >= deadline:
                        raise
                    # The lane may be from before a restart of the directory.
                    self._forget(address)
                    lane, _ = self._send(address, questions[address], deadline)
                    answers[address] = lane.receive(deadline)
                self._down.pop(address, None)
                self._put(lane)
            except Unavailable as error:
                self._mark(address, error)
                answers[address] = error
        return answers

    def up(self, address: str) -> None:
        """It has been heard of: ask it again."""
        self._down.pop(address, None)

    def close(self) -> None:
        self._closed = True
        for address in list(self._idle):
            self._forget(address)

    def _send(self, address: str, question: Message, deadline: float) -> tuple[Lane, bool]:
        """Returns the lane and whether it was used before."""
        idle = self._idle.get(address)
        while idle:
            try:
                lane = idle.pop()
                lane.send(question, deadline)
                return lane, True
            except IndexError:
                break
            except Unavailable:
                continue
        until, span = self._down.get(address, (0.0, 0.0))
        now = time.monotonic()
        if now < until:
            reason = self._reasons.get(address)
            if isinstance(reason, Refused):
                raise Refused(str(reason), denied=reason.denied) from reason
            raise Unavailable(f"{reason} ({span:.1f} s ago or less; it is asked again soon)")
        if span:
            self._down[address] = (deadline, span)
        try:
            lane = Lane(address, deadline, self._dial)
            lane.send(question, deadline)
        except Unavailable as error:
            self._mark(address, error)
            raise
        return lane, False

    def _mark(self, address: str, reason: Unavailable) -> None:
        self._reasons[address] = reason
        span = min(LONGEST_DOWN_S, max(DOWN_S, 2 * self._down.get(address, (0.0, 0.0))[1]))
        self._down[address] = (time.monotonic() + span, span)

    def _put(self, lane: Lane) -> None:
        idle = self._idle.setdefault(lane.address, deque())
        if self._closed or len(idle) >= POOLED:
            lane.close()
        else:
            idle.append(lane)

    def _forget(self, address: str) -> None:
        idle = self._idle.get(address)
        while idle:
            idle.pop().close()
