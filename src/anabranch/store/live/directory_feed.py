"""A node's announcements to one directory shard: one thread that sends, one that listens."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping

from anabranch.core.errors import AccessDenied, Unavailable, WireError
from anabranch.core.live.handshake import OPEN_DIALER, Dialer
from anabranch.core.live.seldom import Seldom
from anabranch.core.messages import Message
from anabranch.core.wire import FrameDecoder, encode
from anabranch.store.live.directory_refusal import FromDirectory, refusal
from anabranch.store.messages import Heartbeat, Join, NameTaken, Repair, Resync
from anabranch.store.outbox import Holdings, Outbox

RETRY_S = 0.05
GATHER_S = 0.001
"""Changes of this long travel together; a wake-up for each would slow down who makes them."""
SILENCE_MS = 3000
"""A host that acknowledges nothing for this long is gone."""
DENIED_S = 60.0
"""How often it is said that the directory does not let this node in."""
TAKEN_S = 0.5
"""How soon to try again while another node has the name."""
log = logging.getLogger(__name__)


class AnnouncingNode:
    """What a node shows to the directory. The callbacks run on the feeds' threads and must not block for long.

    `holdings`: everything it holds now, at the latest when it is called. `space`: (free bytes, total bytes, takes new
    values). `repair`: a hint to make replicas; only to be queued.
    """

    def __init__(
        self,
        join: Join,
        holdings: Callable[[], Holdings],
        space: Callable[[], tuple[int, int, bool]] = lambda: (0, 0, True),
        repair: Callable[[Repair], None] = lambda repair: None,
        heartbeat_s: float = 0.5,
    ) -> None:
        self.join = join
        self.holdings = holdings
        self.space = space
        self.repair = repair
        self.heartbeat_s = heartbeat_s


class Feed:
    """Joins the shard at `address()` ("" = nobody leads it now), announces everything, then every change; again after
    every loss, and when the address changes. `connected(address)` is told of each success."""

    def __init__(
        self,
        node: AnnouncingNode,
        shard: int,
        shards: int,
        address: Callable[[], str],
        connected: Callable[[str], None],
        dial: Dialer = OPEN_DIALER,
    ) -> None:
        self._node = node
        self._dial = dial
        self._address = address
        self._connected = connected
        self._outbox = Outbox(shard, shards)
        self._seldom = Seldom(DENIED_S)
        self._wake = threading.Condition()
        self._closing = False
        self._open = False
        self._lost = False
        self._resync = False
        self._retry_s = RETRY_S
        self._sock: socket.socket | None = None
        self._name = f"directory-feed-{shard}"
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    @property
    def joined(self) -> bool:
        """The shard has been told everything; it hears of changes."""
        return self._open and not self._lost and not self._resync

    def changed(self, added: Mapping[str, bytes], removed: Mapping[str, bytes], wanted: Mapping[int, bytes]) -> None:
        with self._wake:
            if self._open:
                self._outbox.changed(added, removed, wanted)
                self._wake.notify()

    def nudge(self) -> None:
        """Look at the address again."""
        with self._wake:
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            self._wake.notify()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closing:
            address = self._address()
            try:
                if not address:
                    raise Unavailable("nobody leads this shard of the directory")
                sock = self._dial(address)
            except (Unavailable, AccessDenied) as error:
                if isinstance(error, AccessDenied):
                    self._denied(f"directory {address}: {error}")
                elif self._seldom.due("away"):
                    log.warning(
                        "node %s: the directory cannot be reached, it is tried again; until then other nodes and "
                        "clients do not hear of this node's values: %s",
                        self._node.join.node_id,
                        error,
                    )
                with self._wake:
                    if not self._closing:
                        self._wake.wait(RETRY_S)
                continue
            with self._wake:
                self._lost, self._sock = False, sock
            reader = threading.Thread(target=self._read, args=(sock,), name=f"{self._name}-read", daemon=True)
            reader.start()
            try:
                self._serve(sock, address)
            except OSError as error:
                log.info("directory %s: %s", address, error)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            reader.join(5.0)
            with self._wake:
                self._open, self._sock = False, None
                sock.close()
                if not self._closing:
                    self._wake.wait(self._retry_s)
                self._retry_s = RETRY_S

    def _denied(self, reason: str) -> None:
        if self._seldom.due():
            log.error(
                "%s; this node is not in the store until that is put right (security.secret_file is the same file "
                "everywhere)",
                reason,
            )

    def _taken(self, address: str) -> None:
        if self._seldom.due("name"):
            log.error(
                "another node named '%s' is there, at %s, and the directory listens to that one: choose another name "
                "for this one (--name), or stop the other; a former life of this node that is gone gives way by itself",
                self._node.join.node_id,
                address,
            )
        with self._wake:
            self._lost, self._retry_s = True, TAKEN_S
            self._wake.notify()

    def _serve(self, sock: socket.socket, address: str) -> None:
        """Until the connection, the address or this object is gone."""
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
        sock.sendall(encode(self._node.join))
        self._connected(address)
        self._resync, beat, beats = True, 0.0, 0
        while not self._lost and not self._closing and self._address() == address:
            messages: list[Message] = []
            if self._resync:
                self._announce_all(sock)
            with self._wake:
                messages += self._outbox.take()
                seq = self._outbox.seq
            now = time.monotonic()
            if now >= beat:
                beat, beats = now + self._node.heartbeat_s, beats + 1
                if beats == 2:  # by now it would have said no
                    log.info("node %s joined the directory at %s", self._node.join.node_id, address)
                free, total, accepts = self._node.space()
                messages.append(Heartbeat(seq=seq, free_bytes=free, total_bytes=total, accepts=accepts))
            for message in messages:
                sock.sendall(encode(message))
            if messages:
                time.sleep(GATHER_S)
            with self._wake:
                if not (self._outbox or self._resync or self._lost or self._closing):
                    self._wake.wait(max(0.0, beat - time.monotonic()))

    def _announce_all(self, sock: socket.socket) -> None:
        """What changes from here on is said afterwards, whether or not it is part of what the node says it holds."""
        with self._wake:
            self._resync = False
            self._open = True
            self._outbox.clear()
        holdings = self._node.holdings()
        for message in self._outbox.reset(holdings):
            sock.sendall(encode(message))

    def _read(self, sock: socket.socket) -> None:
        decoder: FrameDecoder[Message] = FrameDecoder(FromDirectory)
        try:
            while data := sock.recv(1 << 16):
                for message in decoder.feed(data):
                    if refused := refusal(self._address(), message):
                        self._denied(str(refused))
                        with self._wake:
                            self._lost = True
                    elif isinstance(message, NameTaken):
                        self._taken(message.address)
                    elif isinstance(message, Repair):
                        self._node.repair(message)
                    elif isinstance(message, Resync):
                        with self._wake:
                            self._resync = True
                            self._wake.notify()
        except (OSError, WireError) as error:
            log.info("directory: %s", error)
        with self._wake:
            self._lost = True
            self._wake.notify()
