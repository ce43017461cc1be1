"""What a node tells the directory, and asks it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from anabranch.core.authentication import Access, Credentials
from anabranch.core.errors import AnabranchError
from anabranch.core.live.handshake import Dialer
from anabranch.core.live.tls import Tls
from anabranch.policy.placement import Candidate
from anabranch.store.live.directory_feed import AnnouncingNode
from anabranch.store.live.directory_link import DirectoryLink
from anabranch.store.messages import Join, NodeRow, Repair
from anabranch.store.outbox import Holdings
from anabranch.store.shards import Whereabouts
from anabranch.store.values.config import StoreConfig, WriteConfig
from anabranch.store.values.live.node_custody import Custody
from anabranch.store.values.live.node_tiers import NodeTiers

GATHER_S = 0.002
"""Changes of this long are announced together."""


class NodeDirectory:
    """Without a directory the node is alone: nobody is told, and nobody else holds anything."""

    def __init__(
        self,
        node_id: str,
        config: StoreConfig,
        writes: WriteConfig,
        custody: Custody,
        tiers: NodeTiers,
        access: Access,
        tls: Tls | None,
    ) -> None:
        self.node_id = node_id
        self.replicas = writes.replicas
        self._config = config
        self._custody = custody
        self._tiers = tiers
        self._dial = Dialer(Credentials(secret=access.cluster_secret), tls)
        self._link: DirectoryLink | None = None
        self._news = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, address: str, repair: Callable[[Repair], None]) -> None:
        """Join. `address`: where this node listens."""
        if not self._config.directory:
            return
        with self._custody.lock:
            self._custody.shelf.changed = {}
            self._tiers.ssd_changed = {}
        join = Join(
            node_id=self.node_id,
            epoch=time.time_ns(),
            address=self._config.advertise or advertised(address),
            layout=b"",
            replicas=self.replicas,
        )
        node = AnnouncingNode(join, self._holdings, self._space, repair, self._config.heartbeat_s)
        self._link = DirectoryLink(self._config.directory, node, self._dial)
        self._thread = threading.Thread(target=self._announce, name=f"{self.node_id}-announce", daemon=True)
        self._thread.start()

    @property
    def joined(self) -> bool:
        return self._link is not None and self._link.joined

    @property
    def alone(self) -> bool:
        return self._link is None

    @property
    def configured(self) -> bool:
        return bool(self._config.directory)

    def peek(self, timeout_s: float) -> list[NodeRow]:
        """`others` as of now, also before this node has joined. Raises Unavailable."""
        link = DirectoryLink(self._config.directory, None, self._dial)
        try:
            return [row for row in link.nodes(timeout_s) if row.node_id != self.node_id and not row.layout]
        finally:
            link.close()

    def changed(self) -> None:
        """Something came or went: the directory hears of it within some milliseconds."""
        if self._link is not None and not self._news.is_set():
            self._news.set()

    def others(self) -> list[NodeRow]:
        """The other nodes with values. Raises Unavailable."""
        if self._link is None:
            return []
        return [row for row in self._link.nodes() if row.node_id != self.node_id and not row.layout]

    def where(self, names: bytes) -> Whereabouts | None:
        """None: nobody else is there, or nobody can say."""
        if self._link is None or not names:
            return None
        try:
            return self._link.where(names)
        except AnabranchError:
            return None

    def leave(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._closing = True
        self._news.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _holdings(self) -> Holdings:
        custody = self._custody
        dram: list[bytes] = []
        for state in list(custody.shelf.scopes.states()):
            with custody.lock:
                dram.append(b"".join(state.entries))
        wanted: dict[int, list[bytes]] = {}
        with custody.lock:
            for name, count in custody.shelf.wanted.items():
                wanted.setdefault(count, []).append(name)
        disk = self._tiers.disk
        tiers = {"dram": b"".join(dram), "ssd": b"".join(disk.names()) if disk is not None else b""}
        return Holdings(tiers, {count: b"".join(names) for count, names in wanted.items()})

    def _space(self) -> tuple[int, int, bool]:
        custody = self._custody
        return custody.shelf.free_bytes, self._config.dram_bytes, not custody.puts.closing

    def _announce(self) -> None:
        custody, shelf = self._custody, self._custody.shelf
        while True:
            self._news.wait()
            self._news.clear()
            link = self._link
            if self._closing or link is None:
                return
            time.sleep(GATHER_S)
            with custody.lock:
                dram, shelf.changed = shelf.changed or {}, {}
                ssd, self._tiers.ssd_changed = self._tiers.ssd_changed or {}, {}
                if not dram and not ssd:
                    continue
                wanted: dict[int, list[bytes]] = {}
                for name in shelf.wanted.keys() & dram.keys() if shelf.wanted else ():
                    wanted.setdefault(shelf.wanted[name], []).append(name)
            changes = {"dram": dram, "ssd": ssd}
            link.announce(
                {tier: _names(these, True) for tier, these in changes.items() if any(these.values())},
                {tier: _names(these, False) for tier, these in changes.items() if not all(these.values())},
                {count: b"".join(names) for count, names in wanted.items()},
            )


def advertised(address: str) -> str:
    """Where others reach what listens on every interface: this host's name."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("", "0.0.0.0", "[::]", "::") else address


def candidates(rows: list[NodeRow]) -> list[Candidate]:
    return [Candidate(row.node_id, row.free_bytes, row.total_bytes) for row in rows if row.accepts]


def _names(changes: dict[bytes, bool], there: bool) -> bytes:
    return b"".join([name for name, is_there in changes.items() if is_there is there])
