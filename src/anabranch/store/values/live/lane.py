"""One connection to a node: frames and raw bytes over a blocking socket, used by one thread at a time.

Waits end in the kernel (SO_RCVTIMEO, SO_SNDTIMEO): no poll before each call, and MSG_WAITALL fills a slice in one call.
Raises Unavailable when the peer is gone, DeadlineExceeded when it stays silent for the lane's patience or the deadline
of the call passes, WireError on a malformed frame. After any of them, or any other exception in the middle of an
exchange, the lane is out of step and must be closed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from anabranch.core.errors import AccessDenied, AnabranchError, DeadlineExceeded, Overloaded, Unavailable, WireError
from anabranch.core.handshake import Challenge
from anabranch.core.live.tls import is_tls
from anabranch.core.messages import Message
from anabranch.core.wire import HEADER, MAX_FRAME_BYTES, encode
from anabranch.store.values.messages import Denied, NodeToClient, Put, Trace
from anabranch.store.values.parts import Parts, sum_of
from anabranch.store.values.slices import SLICE_BYTES, slice_bounds
from anabranch.transfer.live.rails import Permit, Rail

BUFFER_BYTES = 4 << 20
READ_AHEAD = 16 << 10
"""Bytes of a frame and of what follows it that one receive takes; what is not the frame's is copied once more."""
MAX_VECTORS = 512  # below IOV_MAX (1024)
SILENCE_S = 0.5
M = TypeVar("M")
_TIMEVAL = struct.Struct("ll")
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(NodeToClient | Challenge)


class Lane:
    """`deadline` (monotonic) and `patience_s` bound every wait."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        *,
        rail: Rail | None = None,
        permit: Permit | None = None,
        least_patience_s: float = 0.0,
    ) -> None:
        self.address = address
        self.rail = rail
        self.lost = False
        """The connection broke or fell silent, and not because somebody here ended it."""
        self.slice_s: tuple[float, float] | None = None
        """Seconds that a slice took, and when that was seen; only where there are several rails."""
        self._permit = permit
        self._least_patience_s = least_patience_s
        self.deadline = float("inf")
        self.trace = ""
        self._sock = sock
        self._timeout_s = -1.0
        self._buffer = bytearray(READ_AHEAD)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._dead = False
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self.until(time.monotonic() + 5.0)

    def until(self, deadline: float, patience_s: float = float("inf")) -> None:
        """Every wait from now on ends at `deadline`, and each single one after `patience_s`."""
        self.deadline = deadline
        wait = min(max(deadline - time.monotonic(), 0.001), max(patience_s, self._least_patience_s), 86_400.0)
        # A call to the kernel costs as much as a small exchange: the one in force will do unless it is much off.
        if not 0.8 * self._timeout_s <= wait <= 1.05 * self._timeout_s:
            self._set_timeout(wait)
            self._timeout_s = wait

    @property
    def quiet(self) -> bool:
        """Open, and nothing has arrived that nobody asked for."""
        if self._dead or self._start != self._end:
            return False
        if is_tls(self._sock):
            return True  # TLS itself has things to say (tickets) between answers
        if not self._poll.poll(0):
            return True
        self.lost = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        return False

    def follow(self, trace: str) -> None:
        """What is sent from now on belongs to this trace."""
        self.send(Trace(context=trace))
        self.trace = trace

    @property
    def connected(self) -> bool:
        """The other side has not closed the lane. Any thread may ask, also while another one uses it."""
        try:
            return not self._dead and bool(self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def shut(self) -> None:
        """Make every wait, now or later, end at once. Any thread may call it."""
        self._dead = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._dead = True
        self._sock.close()

    # --- sending --------------------------------------------------------------------------------------------------

    def send(self, *messages: Message, payload: Sequence[memoryview] = ()) -> None:
        """Frames, then raw bytes, in one call where the kernel takes it."""
        frames = encode(messages[0]) if len(messages) == 1 else b"".join([encode(message) for message in messages])
        if payload:
            self.send_views([memoryview(frames), *payload])
        else:
            self.send_views([memoryview(frames)])

    def send_stream(self, put: Put, values: Sequence[Parts]) -> None:
        """A put whose sums come behind its bytes: each piece is summed after it was sent, while the cache has it and
        the node is at work on it."""
        views = [memoryview(encode(put))]
        sums: list[int] = []
        pieces: list[list[memoryview]] = []
        waiting = 0
        for value in values:
            for start, end in slice_bounds(value.size):
                pieces.append(value.cut(start, end))
                views += pieces[-1]
                waiting += end - start
                if waiting >= SLICE_BYTES:
                    self.send_views(views)
                    sums += map(sum_of, pieces)
                    views, pieces, waiting = [], [], 0
        if pieces:
            self.send_views(views)
            sums += map(sum_of, pieces)
            views = []
        self.send_views([*views, memoryview(struct.pack(f"<{len(sums)}Q", *sums))])

    def send_views(self, views: Sequence[memoryview]) -> None:
        at, offset = 0, 0
        if self._permit is not None:
            self._permit(sum(view.nbytes for view in views), max(0.0, self.deadline - time.monotonic()))
        while at < len(views):
            batch = list(views[at : at + MAX_VECTORS])
            if offset:
                batch[0] = batch[0][offset:]
            try:
                sent = self._sock.sendmsg(batch, [], socket.MSG_NOSIGNAL)
            except BlockingIOError as error:
                raise self._silence() from error
            except OSError as error:
                raise self._gone(error) from error
            at, offset = advance(views, at, offset, sent)
            if at < len(views):
                self._check_deadline()

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self) -> Any:
        """The next message."""
        while self._end - self._start < HEADER.size:
            self._fill(HEADER.size)
        (length,) = HEADER.unpack_from(self._buffer, self._start)
        if length > MAX_FRAME_BYTES:
            raise WireError(f"frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
        whole = HEADER.size + int(length)
        while self._end - self._start < whole:
            self._fill(whole)
        start = self._start
        self._start += whole
        try:
            return _decoder.decode(self._view[start + HEADER.size : start + whole])
        except msgspec.MsgspecError as error:
            raise WireError(f"malformed message from {self.address}: {error}") from error

    def answer(self, kind: type[M], op: int | None = None) -> M:
        """The next message, which answers request `op`. Raises WireError for another one, AccessDenied or Overloaded
        if the node refuses."""
        message = self.receive()
        if isinstance(message, Denied):
            raise refusal(self.address, message)
        if not isinstance(message, kind) or getattr(message, "op", None) != op:
            raise WireError(f"{self.address} answers with {type(message).__name__} instead of {kind.__name__} {op}")
        return message

    def receive_into(self, views: Sequence[memoryview]) -> None:
        """Fill all views, in order."""
        at, offset = self._drain(views)
        self._receive_rest(views, at, offset)

    def receive_counted(self, views: Sequence[memoryview], size: int) -> bool:
        """Fill the views (`size` bytes) from an answer that starts with its length. False: the length is 0, nothing
        follows, and what later answers sent meanwhile may be lost: close the lane. Raises WireError for any other
        length."""
        head = memoryview(bytearray(8))
        whole = [head, *views]
        at, offset = self._drain(whole)
        while at == 0:
            # Not MSG_WAITALL: nothing follows a length of 0.
            got = self._receive_once(whole, 0, offset, 0)
            at, offset = advance(whole, 0, offset, got)
        length = int.from_bytes(head, "little")
        if length == 0:
            return size == 0
        if length != size:
            raise WireError(f"{self.address} sent a slice of {length} bytes instead of {size}")
        self._receive_rest(whole, at, offset)
        return True

    def receive_bytes(self, view: memoryview) -> None:
        self.receive_into([view])

    def _drain(self, views: Sequence[memoryview]) -> tuple[int, int]:
        """Give out what was read ahead: (index of the view, offset in it) where it ended."""
        at, offset = 0, 0
        while at < len(views) and (self._start < self._end or offset >= views[at].nbytes):
            count = min(views[at].nbytes - offset, self._end - self._start)
            views[at][offset : offset + count] = self._view[self._start : self._start + count]
            self._start += count
            at, offset = advance(views, at, offset, count)
        return at, offset

    def _receive_rest(self, views: Sequence[memoryview], at: int, offset: int) -> None:
        while at < len(views):
            got = self._receive_once(views, at, offset, socket.MSG_WAITALL)
            at, offset = advance(views, at, offset, got)
            if at < len(views):
                self._check_deadline()

    def _receive_once(self, views: Sequence[memoryview], at: int, offset: int, flags: int) -> int:
        batch = list(views[at : at + MAX_VECTORS])
        if offset:
            batch[0] = batch[0][offset:]
        try:
            if len(batch) == 1:
                got = self._sock.recv_into(batch[0], 0, flags)
            else:
                got = self._sock.recvmsg_into(batch, 0, flags)[0]
        except BlockingIOError as error:
            raise self._silence() from error
        except OSError as error:
            raise self._gone(error) from error
        if not got:
            self.lost = not self._dead
            raise Unavailable(f"{self.address} closed the connection")
        return got

    def _fill(self, wanted: int) -> None:
        """Read ahead so that the buffer may hold `wanted` bytes of one frame."""
        if self._start:
            left = self._end - self._start
            self._buffer[:left] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, left
        if wanted > len(self._buffer):
            grown = bytearray(wanted + READ_AHEAD)
            grown[: self._end] = self._view[: self._end]
            self._buffer, self._view = grown, memoryview(grown)
        self._end += self._receive_once([self._view[self._end :]], 0, 0, 0)
        self._check_deadline()

    def _check_deadline(self) -> None:
        if time.monotonic() > self.deadline:
            raise DeadlineExceeded(f"{self.address} did not finish before the deadline")

    def _gone(self, error: OSError) -> Unavailable:
        self.lost = not self._dead
        return Unavailable(f"{self.address} is gone: {error}")

    def _silence(self) -> DeadlineExceeded:
        # A call that has hardly any time left says nothing about the connection.
        self.lost = not self._dead and self._timeout_s >= SILENCE_S
        return DeadlineExceeded(f"{self.address} was silent for {self._timeout_s:.1f} s")

    def _set_timeout(self, wait: float) -> None:
        value = _TIMEVAL.pack(int(wait), int(wait % 1 * 1e6))
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        except OSError as error:
            raise Unavailable(f"{self.address} is gone: {error}") from error


def refusal(address: str, denied: Denied) -> AnabranchError:
    """What a node's refusal is to the caller."""
    text = f"{address}: {denied.reason}"
    if denied.code == Overloaded.code:
        return Overloaded(text)
    return AccessDenied(text) if denied.code == AccessDenied.code else WireError(text)


def advance(views: Sequence[memoryview], at: int, offset: int, count: int) -> tuple[int, int]:
    """Where `count` bytes further is: (index of the view, offset in it). Empty views are passed over."""
    count += offset
    while at < len(views) and count >= views[at].nbytes:
        count -= views[at].nbytes
        at += 1
    return at, count
