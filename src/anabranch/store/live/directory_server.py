"""A directory process: `store.directory` behind a listener."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from anabranch.core.authentication import OPEN, Access, Caller, must_authenticate
from anabranch.core.errors import AnabranchError
from anabranch.core.live.handshake import OPEN_DIALER, Dialer, Gate
from anabranch.core.live.link import Link, Listener
from anabranch.core.live.seldom import Seldom
from anabranch.core.live.tls import Tls
from anabranch.store.config import DirectoryConfig
from anabranch.store.directory import Directory
from anabranch.store.live.election import Candidate, check_candidacy
from anabranch.store.messages import Join, ListNodes, NodeToDirectory, Stat, StatRequest, Where
from anabranch.store.values.live.key_table import make_key_table

TICK_S = 0.05
TURN_S = 0.0005
"""How long a thread keeps the interpreter while others wait: a look-up should not wait for an announcement's 5 ms."""
WORK_S = 0.001
BREATH_S = 0.0005
"""After WORK_S of work that is due by itself: those who look something up come first."""
TOLD_S = 60.0
"""How often it is logged that the same node is not let in."""
log = logging.getLogger(__name__)


class DirectoryServer:
    """Listens on `config.listen` (`host:port` or `unix:/path`); `address` says where after `start`.

    With `config.etcd` it stands for election, and answers nothing but StatRequest while another one leads. `access`,
    `tls`: who may ask; a caller that is not trusted may look up and not announce. `dial`: how to ask the other
    candidates. Raises Unavailable if the address is in use, ConfigError for an impossible `config`, or if the address
    can be reached from other hosts and nothing protects it.
    """

    def __init__(
        self,
        config: DirectoryConfig,
        *,
        access: Access = OPEN,
        tls: Tls | None = None,
        dial: Dialer = OPEN_DIALER,
    ) -> None:
        must_authenticate([config.listen], access)
        self._config = config
        self._gate = Gate(access, self._on_caller, tls=tls)
        self._lookers: set[Link] = set()
        self._seldom = Seldom(TOLD_S)
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._leading = not config.etcd
        self._dial = dial
        self._candidate: Candidate | None = None
        self._closing = threading.Event()
        self.directory = self._empty()
        self.address = ""

    def start(self) -> DirectoryServer:
        if self._config.etcd:
            check_candidacy(self._config)
        self._listener = Listener(self._config.listen, self._gate, name="directory")
        self.address = self._listener.address
        self._ticker = threading.Thread(target=self._tick, name="directory-tick", daemon=True)
        self._ticker.start()
        if self._config.etcd:
            self._candidate = Candidate(self, self._config, dial=self._dial)
        return self

    def stop(self) -> None:
        if self._candidate is not None:
            self._candidate.close()
        self._closing.set()
        self._listener.close()
        self._gate.close()
        self._disconnect("directory stops")
        self._ticker.join(5.0)

    @property
    def leading(self) -> bool:
        return self._leading

    def lead(self) -> None:
        """Answer from now on, beginning with an empty directory that says "unknown"."""
        with self._lock:
            self.directory = self._empty()
            self._leading = True

    def resign(self) -> None:
        """Somebody else may answer now: forget everything and hang up."""
        with self._lock:
            self._leading = False
            self.directory = self._empty()
        self._disconnect("not the leader")

    def expect(self, node_ids: set[str]) -> None:
        """The nodes that exist, as the membership service has them."""
        with self._lock:
            self.directory.expect(node_ids)

    def stat(self) -> Stat:
        with self._lock:
            census = self.directory.census()
            counters = {name: float(value) for name, value in self.directory.counters.items()}
            counters["keys"] = float(len(self.directory.table))
            counters["table_bytes"] = float(self.directory.table.memory_bytes)
            role = "leader" if self._leading else "standby"
        return Stat(
            name="directory", census={**census, "links": len(self._links)}, counters=counters, state={"role": role}
        )

    def _empty(self) -> Directory:
        return Directory(self._config.node_ttl_s, time.monotonic(), make_key_table)

    def _disconnect(self, reason: str) -> None:
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close(reason)
        for link in links:
            link.join()

    def _on_caller(self, sock: socket.socket, caller: Caller) -> None:
        link = Link(sock, NodeToDirectory, self._received, self._closed, name="directory")
        with self._lock:
            self._links.add(link)
            if not caller.trusted:
                self._lookers.add(link)
        link.start()
        if self._closing.is_set():
            link.close("directory stops")

    def _received(self, link: Link, message: Any) -> None:
        if isinstance(message, StatRequest):
            link.send(self.stat())
            return
        directory = self.directory
        if link in self._lookers and not isinstance(message, Where | ListNodes):
            link.close("only trusted callers announce: the cluster's secret is needed, or a node's certificate")
            return
        if not self._leading:
            link.close("not the leader")
            return
        steps = directory.steps(link, message, time.monotonic())
        try:
            while True:
                with self._lock:
                    replies = next(steps, None)
                if replies is None:
                    return
                for reply in replies:
                    link.send(reply)
        except AnabranchError as error:
            link.close(str(error))
        finally:
            if isinstance(message, Join):
                self._told(directory, link, message)

    def _told(self, directory: Directory, link: Link, message: Join) -> None:
        if directory.members.get(link) is not None:
            log.info("node %s at %s joins", message.node_id, message.address)
        elif self._seldom.due((message.node_id, message.address)):
            log.warning(
                "node %s at %s is not let in: another one of that name is there; one of them needs another name",
                message.node_id,
                message.address,
            )

    def _closed(self, link: Link, reason: str) -> None:
        with self._lock:
            member = self.directory.members.get(link)
            self._links.discard(link)
            self._lookers.discard(link)
            self.directory.gone(link, time.monotonic())
        if member is not None:
            log.info("node %s at %s leaves: %s", member.join.node_id, member.join.address, reason or "it hung up")

    def _tick(self) -> None:
        while not self._closing.wait(TICK_S):
            more, breath_at = True, time.monotonic() + WORK_S
            while more and not self._closing.is_set():
                with self._lock:
                    messages, more = self.directory.tick(time.monotonic())
                for link, message in messages:
                    if isinstance(link, Link):
                        link.send(message)
                if time.monotonic() >= breath_at:
                    self._closing.wait(BREATH_S)
                    breath_at = time.monotonic() + WORK_S


def run_directory(config: DirectoryConfig, *, ready: Callable[[DirectoryServer], None] = lambda server: None) -> None:
    """A directory process's main: serve until SIGTERM or SIGINT. Main thread only."""
    sys.setswitchinterval(TURN_S)
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    server = DirectoryServer(config).start()
    ready(server)
    done.wait()
    server.stop()
