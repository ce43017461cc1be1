"""A directory process: `store.directory` behind a listener."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from anabranch.core.live.link import Link, Listener
from anabranch.store.config import DirectoryConfig
from anabranch.store.directory import Directory
from anabranch.store.messages import NodeToDirectory, Stat, StatRequest


class DirectoryServer:
    """Listens on `config.listen` (`host:port` or `unix:/path`); `address` says where after `start`.

    Raises Unavailable if the address is in use.
    """

    def __init__(self, config: DirectoryConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self.directory = Directory(config.node_ttl_s, time.monotonic())
        self.address = ""

    def start(self) -> DirectoryServer:
        self._listener = Listener(self._config.listen, self._on_socket, name="directory")
        self.address = self._listener.address
        return self

    def stop(self) -> None:
        self._listener.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close("directory stops")
        for link in links:
            link.join()

    def stat(self) -> Stat:
        with self._lock:
            census = self.directory.census()
            counters = {name: float(value) for name, value in self.directory.counters.items()}
        return Stat(name="directory", census={**census, "links": len(self._links)}, counters=counters)

    def _on_socket(self, sock: socket.socket) -> None:
        link = Link(sock, NodeToDirectory, self._received, self._closed, name="directory")
        with self._lock:
            self._links.add(link)
        link.start()

    def _received(self, link: Link, message: Any) -> None:
        if isinstance(message, StatRequest):
            link.send(self.stat())
            return
        with self._lock:
            replies = self.directory.handle(link, message, time.monotonic())
        for reply in replies:
            link.send(reply)

    def _closed(self, link: Link, reason: str) -> None:
        with self._lock:
            self._links.discard(link)
            self.directory.gone(link)


def run_directory(config: DirectoryConfig, *, ready: Callable[[DirectoryServer], None] = lambda server: None) -> None:
    """A directory process's main: serve until SIGTERM or SIGINT. Main thread only."""
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    server = DirectoryServer(config).start()
    ready(server)
    done.wait()
    server.stop()
