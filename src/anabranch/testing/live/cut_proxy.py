"""A TCP proxy between a client and a node that cuts connections, or stops forwarding, when a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading

from anabranch.core.live.link import Listener, connect


class CutProxy:
    """Forwards `address` to `target`. `cut_after(n)`: the connection that forwards the n-th byte from the client, from
    now on, is cut there, once. `stalled`: bytes of the node are swallowed."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._budget: int | None = None
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.cuts = 0
        self.connections = 0
        self.stalled = False
        self._listener = Listener("127.0.0.1:0", self._accept, name="cut-proxy")
        self.address = self._listener.address

    def cut_after(self, count: int) -> None:
        with self._lock:
            self._budget = count

    def cut(self) -> None:
        """All connections, now."""
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            _shut(sock)

    def close(self) -> None:
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def _accept(self, client: socket.socket) -> None:
        node = connect(self._target)
        with self._lock:
            self.connections += 1
            self._sockets |= {client, node}
        back = threading.Thread(target=self._forward, args=(node, client, False), daemon=True)
        there = threading.Thread(target=self._serve, args=(client, node, back), daemon=True)
        self._threads += [there, back]
        back.start()
        there.start()

    def _serve(self, client: socket.socket, node: socket.socket, back: threading.Thread) -> None:
        self._forward(client, node, True)
        back.join()
        with self._lock:
            self._sockets -= {client, node}
        client.close()
        node.close()

    def _forward(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counted and not self._within_budget(len(data)):
                    break
                if counted or not self.stalled:
                    sink.sendall(data)
        _shut(source)
        _shut(sink)

    def _within_budget(self, count: int) -> bool:
        with self._lock:
            if self._budget is None:
                return True
            self._budget -= count
            if self._budget > 0:
                return True
            self._budget = None
            self.cuts += 1
            return False


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
