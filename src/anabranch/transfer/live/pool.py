"""Connections to peers, kept for the next use."""

from __future__ import annotations

import threading

from anabranch.core.live.link import connect
from anabranch.transfer.live.stream import Stream

IDLE_A_PEER = 2


class StreamPool:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: dict[str, list[Stream]] = {}
        self._closed = False

    def take(self, address: str) -> Stream:
        """An idle or a new connection. Raises Unavailable."""
        with self._lock:
            idle = self._idle.get(address, [])
            while idle:
                stream = idle.pop()
                if stream.quiet:
                    return stream
                stream.close()
        return Stream(connect(address, timeout_s=self._timeout_s), self._timeout_s)

    def give(self, address: str, stream: Stream) -> None:
        """Give back a connection on which nothing is outstanding."""
        with self._lock:
            idle = self._idle.setdefault(address, [])
            if not self._closed and stream.quiet and len(idle) < IDLE_A_PEER:
                idle.append(stream)
                return
        stream.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for idle in self._idle.values():
                for stream in idle:
                    stream.close()
            self._idle.clear()
