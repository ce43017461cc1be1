"""A node's connection to the directory: joins, reconnects by itself, never blocks the node."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from anabranch.core.errors import Unavailable
from anabranch.core.faults import Faults
from anabranch.core.live.link import Link, connect
from anabranch.core.messages import Message
from anabranch.store.actions import DirectoryDown, DirectoryMessage, DirectoryUp, NodeEvent
from anabranch.store.announcer import Announcer
from anabranch.store.messages import Announce, DirectoryToNode, Holders, Join, Lookup, Resync

RETRY_S = 0.1


class DirectoryClient:
    def __init__(self, address: str, node: Announcer, faults: Faults, post: Callable[[NodeEvent], None]) -> None:
        self._address = address
        self._join = Join(node_id=node.node_id, epoch=secrets.randbits(62), address=node.address, layout=node.layout)
        self._faults = faults
        self._post = post
        self._link: Link | None = None
        self._lost = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="directory-client", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """What cannot be sent is lost: the reset after the next connect says everything again."""
        step = "directory.lookup" if isinstance(message, Lookup) else "directory.announce"
        if isinstance(message, Lookup | Announce) and self._faults.at(step):
            return
        link = self._link
        if link is not None:
            link.send(message)

    def close(self) -> None:
        self._closing.set()
        self._lost.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                sock = connect(self._address)
            except Unavailable:
                self._closing.wait(RETRY_S)
                continue
            self._lost.clear()
            link = Link(sock, DirectoryToNode, self._received, self._closed, name="directory")
            self._link = link
            link.start()
            link.send(self._join)
            self._post(DirectoryUp())
            self._lost.wait()
            self._link = None
            link.close()
            link.join()
            self._post(DirectoryDown())
            self._closing.wait(RETRY_S)

    def _received(self, link: Link, message: Message) -> None:
        if isinstance(message, Holders | Resync):
            self._post(DirectoryMessage(message))

    def _closed(self, link: Link, reason: str) -> None:
        self._lost.set()
