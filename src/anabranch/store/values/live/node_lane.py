"""A node's end of a lane: messages in, frames and raw bytes out, one thread.

Waits end in the kernel (SO_RCVTIMEO, SO_SNDTIMEO). Between messages a lane may be silent for ever; in the middle of one
it is closed after STALL_S without a byte, or if one message takes longer than MESSAGE_S: raises Unavailable.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from anabranch.core.errors import Unavailable, WireError
from anabranch.core.live.tls import is_tls
from anabranch.core.messages import Message
from anabranch.core.wire import HEADER, MAX_FRAME_BYTES, encode
from anabranch.store.values.messages import ClientToNode
from anabranch.transfer.live.rails import Permit

SOCKET_BYTES = 4 << 20
BUFFER_BYTES = 64 << 10
STALL_S = 10.0
MESSAGE_S = 60.0
STRANGER_FRAME_BYTES = 16 << 10
GROW_BYTES = 1 << 20
MAX_VECTORS = 512  # below IOV_MAX (1024)
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ClientToNode)


class NodeLane:
    """`max_frame_bytes`: small until the caller is let in, so that strangers cost no memory."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.tls = is_tls(sock)
        self.permit: Permit | None = None
        """Asked before bytes of values are sent, where the link is shaped."""
        self.trace = ""
        self.max_frame_bytes = STRANGER_FRAME_BYTES
        self.bytes_in = 0
        self.bytes_out = 0
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._stopped = False
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        timeval = struct.pack("ll", int(STALL_S), 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, timeval)
        self._fd = sock.fileno()

    def shut(self) -> None:
        """Make every wait, now or later, end at once. Any thread may call it."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stopped = True
        self.sock.close()

    @property
    def pending(self) -> bool:
        """Bytes of a further message are here already."""
        return self._start < self._end

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, *, patient: bool = True) -> Any:
        """The next message, None when the other side has closed the lane between two. `patient`: its first byte may
        take any time."""
        started = 0.0
        while self._end - self._start < HEADER.size:
            if not self._fill(patient and self._start == self._end):
                return None
        (length,) = HEADER.unpack_from(self._buffer, self._start)
        if length > self.max_frame_bytes:
            raise WireError(f"frame of {length} bytes exceeds {self.max_frame_bytes}")
        whole = HEADER.size + int(length)
        if whole > BUFFER_BYTES:
            return self._decoded(memoryview(self._large(int(length))))
        while self._end - self._start < whole:
            started = started or time.monotonic()
            self._fill(False)
            self._check_time(started)
        at = self._start
        self._start += whole
        return self._decoded(self._view[at + HEADER.size : at + whole])

    def receive_into(self, view: memoryview) -> None:
        """Fill the view with what follows the last message."""
        size = len(view)
        at = min(size, self._end - self._start)
        if at:
            view[:at] = self._view[self._start : self._start + at]
            self._start += at
        started = 0.0
        while at < size:
            got = self._receive(view[at:] if at else view, socket.MSG_WAITALL)
            if not got:
                raise Unavailable("the caller closed the lane in the middle of its bytes")
            at += got
            if at < size:
                started = started or time.monotonic()
                self._check_time(started)
        self.bytes_in += size

    def receive_many(self, views: Sequence[memoryview]) -> None:
        """Fill all views, in order, in as few calls as possible."""
        views = [view for view in views if len(view)]  # a call that wants no bytes waits for some
        at, offset = 0, 0
        while at < len(views) and self._start < self._end:
            view = views[at]
            count = min(len(view) - offset, self._end - self._start)
            view[offset : offset + count] = self._view[self._start : self._start + count]
            self._start += count
            offset += count
            if offset == len(view):
                at, offset = at + 1, 0
        started = 0.0
        while at < len(views):
            batch = list(views[at : at + MAX_VECTORS])
            batch[0] = batch[0][offset:]
            got = self._receive_many(batch)
            offset += got
            while at < len(views) and offset >= len(views[at]):
                offset -= len(views[at])
                at += 1
            if at < len(views):
                started = started or time.monotonic()
                self._check_time(started)

    def discard(self, size: int) -> None:
        """Read past bytes that nobody wants."""
        scratch = memoryview(bytearray(min(size, 256 << 10)))
        while size:
            part = scratch[: min(size, len(scratch))]
            self.receive_into(part)
            size -= len(part)

    # --- sending --------------------------------------------------------------------------------------------------

    def send(self, message: Message, views: Sequence[bytes | memoryview] = ()) -> None:
        """A frame, and raw bytes after it, copied into the socket."""
        frame = encode(message)
        if not views:
            self._send_one(frame)
        elif len(views) == 1:
            self._send_views([frame, views[0]])
        else:
            self._send_views([frame, *views])

    def send_raw(self, views: Sequence[bytes | bytearray | memoryview]) -> None:
        self._send_views(list(views))

    def send_pages(self, head: bytes, source: int, data: memoryview, ranges: Sequence[tuple[int, int]]) -> None:
        """`head`, then (start, length) ranges of the file `source`, whose bytes are `data`, by reference: they must not
        change until the other side has them."""
        if self.tls:
            self._send_views([head, *(data[start : start + length] for start, length in ranges)])
            return
        if self.permit is not None:
            self.permit(sum(length for _, length in ranges), STALL_S)
        try:
            more = socket.MSG_MORE if ranges else 0
            sent = self.sock.send(head, more)
            while sent < len(head):
                sent += self.sock.send(head[sent:], more)
            for start, length in ranges:
                end = start + length
                while start < end:
                    count = os.sendfile(self._fd, source, start, end - start)
                    if not count:
                        raise Unavailable("the arena's file is shorter than it was")
                    start += count
                self.bytes_out += length
        except OSError as error:
            raise Unavailable(f"the caller does not read: {error}") from error

    def _send_one(self, frame: bytes) -> None:
        try:
            sent = self.sock.send(frame)
            while sent < len(frame):
                sent += self.sock.send(memoryview(frame)[sent:])
        except OSError as error:
            raise Unavailable(f"the caller does not read: {error}") from error

    def _send_views(self, views: list[bytes | bytearray | memoryview]) -> None:
        at, offset = 0, 0
        started = 0.0
        if self.permit is not None:
            self.permit(sum(map(len, views)), STALL_S)
        while at < len(views):
            batch = views[at : at + MAX_VECTORS]
            if offset:
                batch[0] = memoryview(batch[0])[offset:]
            try:
                sent = self.sock.sendmsg(batch)
            except OSError as error:
                raise Unavailable(f"the caller does not read: {error}") from error
            self.bytes_out += sent
            sent += offset
            while at < len(views) and sent >= len(views[at]):
                sent -= len(views[at])
                at += 1
            offset = sent
            if at < len(views):
                started = started or time.monotonic()
                self._check_time(started)

    # --- buffer ---------------------------------------------------------------------------------------------------

    def _decoded(self, body: memoryview) -> Any:
        try:
            return _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise WireError(f"malformed message: {error}") from error

    def _large(self, length: int) -> bytearray:
        """A frame that the buffer does not hold; memory grows with what has arrived, not with what was announced."""
        if length > MAX_FRAME_BYTES:
            raise WireError(f"frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
        self._start += HEADER.size
        body = bytearray()
        while len(body) < length:
            part = bytearray(min(GROW_BYTES, length - len(body)))
            with memoryview(part) as view:
                self.receive_into(view)
            body += part
        return body

    def _fill(self, patient: bool) -> bool:
        """Read ahead; False when the other side has closed and nothing of a message is here."""
        left = self._end - self._start
        if self._start:
            if left:
                self._buffer[:left] = self._buffer[self._start : self._end]
            self._start, self._end = 0, left
        got = self._receive(self._view[left:], 0, patient)
        self._end += got
        if not got and left:
            raise Unavailable("the caller closed the lane in the middle of a message")
        return got > 0

    def _receive(self, view: memoryview, flags: int, patient: bool = False) -> int:
        while True:
            try:
                return self.sock.recv_into(view, 0, flags)
            except BlockingIOError as error:
                if not patient or self._stopped:
                    raise Unavailable(
                        f"the caller was silent for {STALL_S:.0f} s in the middle of a message"
                    ) from error
            except OSError as error:
                raise Unavailable(f"the caller is gone: {error}") from error

    def _receive_many(self, batch: list[memoryview]) -> int:
        try:
            got = self.sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
        except OSError as error:
            raise Unavailable(f"the caller is gone or silent: {error}") from error
        if not got and any(map(len, batch)):
            raise Unavailable("the caller closed the lane in the middle of its bytes")
        self.bytes_in += got
        return got

    def _check_time(self, started: float) -> None:
        if time.monotonic() - started > MESSAGE_S:
            raise Unavailable(f"one message took longer than {MESSAGE_S:.0f} s")
