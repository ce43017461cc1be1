"""One bulk connection between nodes: framed messages, and raw bytes between sockets and arenas.

Blocking sockets, used by one thread at a time. Every wait has the stream's timeout; nothing waits for ever.
Raises Unavailable when the peer is gone, DeadlineExceeded when it stays silent, WireError on a malformed frame.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from anabranch.core.errors import DeadlineExceeded, Unavailable, WireError
from anabranch.core.messages import Message
from anabranch.core.wire import HEADER, MAX_FRAME_BYTES, encode
from anabranch.transfer.live.landing import Landing

BUFFER_BYTES = 4 << 20
MAX_VECTORS = 512  # below IOV_MAX (1024)


class Stream:
    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._dead = False
        sock.setblocking(True)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)

    def shut(self) -> None:
        """Make every wait, now or later, end at once. Any thread may call it."""
        self._dead = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._dead = True
        self._sock.close()

    @property
    def quiet(self) -> bool:
        """Open, and nothing has arrived that nobody asked for."""
        return not self._dead and not self._readable.poll(0)

    def send(self, message: Message) -> None:
        self.send_views([memoryview(encode(message))])

    def send_views(self, views: Sequence[memoryview]) -> None:
        """All bytes of all views, in order."""
        at, offset = 0, 0
        while at < len(views):
            batch = list(views[at : at + MAX_VECTORS])
            batch[0] = batch[0][offset:]
            try:
                sent = self._sock.sendmsg(batch, [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait(self._writable)
                continue
            except OSError as error:
                raise Unavailable(f"peer is gone: {error}") from error
            at, offset = _advance(views, at, offset, sent)

    def receive(self, decoder: msgspec.msgpack.Decoder[Any], timeout_s: float | None = None) -> Any:
        """The next message. `timeout_s`: how long its first byte may take, if not the stream's timeout."""
        if timeout_s is not None:
            self._wait(self._readable, timeout_s)
        (length,) = HEADER.unpack(self._exactly(HEADER.size))
        if length > MAX_FRAME_BYTES:
            raise WireError(f"frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
        try:
            return decoder.decode(self._exactly(length))
        except msgspec.MsgspecError as error:
            raise WireError(f"malformed message: {error}") from error

    def receive_views(self, views: Sequence[memoryview], landing: Landing) -> None:
        """Fill all views, in order, as long as the landing is open. Raises StaleLease when it closes."""
        at, offset = 0, 0
        while at < len(views):
            batch = list(views[at : at + MAX_VECTORS])
            batch[0] = batch[0][offset:]
            try:
                got = landing.receive(self._sock, batch)
            except BlockingIOError:
                self._wait(self._readable)
                continue
            except OSError as error:
                raise Unavailable(f"peer is gone: {error}") from error
            if not got:
                raise Unavailable("peer closed the connection in the middle of a block")
            at, offset = _advance(views, at, offset, got)

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            try:
                got = self._sock.recv_into(view[at:], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(self._readable)
                continue
            except OSError as error:
                raise Unavailable(f"peer is gone: {error}") from error
            if not got:
                raise Unavailable("peer closed the connection")
            at += got
        return data

    def _wait(self, poll: select.poll, timeout_s: float | None = None) -> None:
        wait = self._timeout_s if timeout_s is None else timeout_s
        if self._dead:
            raise Unavailable("the connection was shut down here")
        if not poll.poll(wait * 1000):
            raise DeadlineExceeded(f"peer was silent for {wait:.1f} s")


def _advance(views: Sequence[memoryview], at: int, offset: int, count: int) -> tuple[int, int]:
    """Where `count` bytes further is: (index of the view, offset in it)."""
    count += offset
    while at < len(views) and count >= len(views[at]):
        count -= len(views[at])
        at += 1
    return at, count
