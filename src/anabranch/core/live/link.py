"""Duplex message connections over TCP or UNIX sockets, with threads.

**Covers** connecting, listening, framing, and sends that never block the caller.
**Does not cover** bulk bytes (`transfer/live`) or asyncio (the gateway has its own reader).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from anabranch.core.errors import AnabranchError, Unavailable, WireError
from anabranch.core.messages import Message
from anabranch.core.wire import FrameDecoder, encode

MAX_QUEUED_BYTES = 64 << 20


def parse_address(address: str) -> tuple[int, Any]:
    """`unix:/path` or `host:port` → (family, socket address)."""
    if address.startswith("unix:"):
        return socket.AF_UNIX, address[5:]
    host, _, port = address.rpartition(":")
    return socket.AF_INET, (host, int(port))


def connect(address: str, *, timeout_s: float = 2.0) -> socket.socket:
    """A connected, blocking socket. Raises Unavailable."""
    family, where = parse_address(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(where)
        sock.settimeout(None)
        if family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        sock.close()
        raise Unavailable(f"cannot connect to {address}: {error}") from error
    return sock


class Link:
    """One connection. `on_message(link, message)` and, exactly once, `on_close(link, reason)` run on the reader thread.

    `send` is thread-safe and never blocks: what the socket does not take at once is queued for a writer thread, and
    a peer that leaves more than MAX_QUEUED_BYTES unread is disconnected.
    """

    def __init__(
        self,
        sock: socket.socket,
        incoming: Any,
        on_message: Callable[[Link, Any], None],
        on_close: Callable[[Link, str], None],
        *,
        name: str = "link",
    ) -> None:
        self._sock = sock
        self._decoder: FrameDecoder[Any] = FrameDecoder(incoming)
        self._on_message = on_message
        self._on_close = on_close
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._closed = False
        self._close_reason = ""
        self.name = name
        self._reader = threading.Thread(target=self._read, name=f"{name}-read", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"{name}-write", daemon=True)

    def start(self) -> None:
        # A reader that finds the peer gone waits for the writer, which must have been started by then.
        self._writer.start()
        self._reader.start()

    @property
    def peer_pid(self) -> int | None:
        """Process id of a UNIX-socket peer, None over TCP."""
        if self._sock.family != socket.AF_UNIX:
            return None
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(raw[:4], "little")

    def send(self, message: Message) -> bool:
        """Queue a message; False when the link is closed (its on_close has run or will)."""
        frame = encode(message)
        with self._lock:
            if self._closed:
                return False
            if not self._queue:
                try:
                    sent = self._sock.send(frame, socket.MSG_DONTWAIT)
                except (BlockingIOError, InterruptedError):
                    sent = 0
                except OSError as error:
                    self._shut(f"send failed: {error}")
                    return False
                if sent == len(frame):
                    return True
                frame = frame[sent:]
            self._queue.append(frame)
            self._queued_bytes += len(frame)
            if self._queued_bytes > MAX_QUEUED_BYTES:
                self._shut("peer does not read")
                return False
            self._wake.notify()
            return True

    def close(self, reason: str = "closed here") -> None:
        with self._lock:
            self._shut(reason)

    def join(self, timeout_s: float = 2.0) -> None:
        """Wait for the link's threads; never from one of them."""
        for thread in (self._reader, self._writer):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout_s)

    @property
    def closed(self) -> bool:
        return self._closed

    def _shut(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            self._close_reason = reason
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._wake.notify_all()

    def _write(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                data = b"".join(self._queue)
            try:
                self._sock.sendall(data)
            except OSError as error:
                self.close(f"send failed: {error}")
                return
            with self._lock:
                taken = 0
                while taken < len(data):
                    taken += len(self._queue.popleft())
                self._queued_bytes -= taken

    def _read(self) -> None:
        reason = "peer closed"
        try:
            while data := self._sock.recv(1 << 18):
                for message in self._decoder.feed(data):
                    self._on_message(self, message)
        except WireError as error:
            reason = str(error)
        except OSError as error:
            reason = f"receive failed: {error}"
        self.close(reason)
        self._writer.join(2.0)
        self._sock.close()
        self._on_close(self, self._close_reason)


class Listener:
    """Accepts connections on `host:port` (port 0 = any) or `unix:/path` and hands each socket to `on_socket`."""

    def __init__(self, address: str, on_socket: Callable[[socket.socket], None], *, name: str = "listen") -> None:
        family, where = parse_address(address)
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_UNIX:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(where)
                self._path: str | None = where
                self._sock.bind(where)
                os.chmod(where, 0o600)
            else:
                self._path = None
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._sock.bind(where)
            self._sock.listen(128)
        except OSError as error:
            self._sock.close()
            raise Unavailable(f"cannot listen on {address}: {error}") from error
        self._on_socket = on_socket
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        if self._path is not None:
            return f"unix:{self._path}"
        host, port = self._sock.getsockname()[:2]
        return f"{host}:{port}"

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(2.0)
        self._sock.close()
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                if self._closing:
                    return
                raise
            if sock.family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self._on_socket(sock)
            except AnabranchError:
                sock.close()
