"""Connections whose callers have not proven themselves yet: few, and silence keeps nobody out."""

from __future__ import annotations

import contextlib
import socket
import threading

MOST = 256


class Strangers:
    """Sockets that somebody else owns. One more than `most`, and the one that has waited longest is disconnected; its
    owner's next wait ends and closes it. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, None] = {}
        self._closed = False

    def add(self, sock: socket.socket) -> bool:
        """False: nobody is let in any more."""
        with self._lock:
            if self._closed:
                return False
            if len(self._waiting) >= self._most:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                _hang_up(oldest)
            self._waiting[sock] = None
            return True

    def replace(self, raw: socket.socket, wrapped: socket.socket) -> None:
        """`wrapped` took the descriptor of `raw` over (TLS)."""
        with self._lock:
            if raw in self._waiting:
                del self._waiting[raw]
                self._waiting[wrapped] = None

    def remove(self, sock: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(sock, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for sock in self._waiting:
                _hang_up(sock)


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
