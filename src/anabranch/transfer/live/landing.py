"""Permission to write into arena slots, which can be withdrawn at once.

A thread that fills slots from a disk or a peer may be stuck for any time, and its slots may be somebody else's by
then. So every write goes through a `Landing`: it happens entirely before `close` returns, or not at all.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from anabranch.core.errors import StaleLease


class Landing:
    """`on_close` is called once, by whoever closes it first, after the last write."""

    def __init__(self, on_close: Callable[[str], None]) -> None:
        self._lock = threading.Lock()
        self._open = True
        self._on_close = on_close
        self._wake: Callable[[], None] | None = None

    @property
    def open(self) -> bool:
        return self._open

    def wake_by(self, wake: Callable[[], None]) -> None:
        """What ends a blocking wait of the writer, e.g. shutting its socket down; called on close from outside."""
        self._wake = wake

    def copy(self, target: memoryview, data: memoryview) -> None:
        """target[:] = data. Raises StaleLease after close."""
        with self._lock:
            self._check()
            target[:] = data

    def receive(self, sock: socket.socket, targets: list[memoryview]) -> int:
        """What the socket has now, at most what the targets hold. Raises BlockingIOError if it has nothing, StaleLease
        after close."""
        with self._lock:
            self._check()
            return sock.recvmsg_into(targets, 0, socket.MSG_DONTWAIT)[0]

    def close(self, reason: str = "") -> bool:
        """No write happens after this returns. False if it was closed before."""
        with self._lock:
            if not self._open:
                return False
            self._open = False
        if self._wake is not None:
            self._wake()
        self._on_close(reason)
        return True

    def _check(self) -> None:
        if not self._open:
            raise StaleLease("the slots are not this transfer's any more")
