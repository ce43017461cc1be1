"""The nodes that a client knows: which one is its home, who else may have a value, who is resting after a failure."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence

from anabranch.core.authentication import is_local
from anabranch.core.errors import AccessDenied, ConfigError, Retryable, Unavailable, WireError
from anabranch.store.live.directory_link import DirectoryLink
from anabranch.store.live.directory_refusal import Refused
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.lanes import LanePool
from anabranch.store.values.live.session import Session
from anabranch.store.values.messages import Welcome
from anabranch.store.values.scope import Scope
from anabranch.transfer.live.workers import Workers

DIRECTORY_S = 1.0
"""How long the directory may think."""


class Nodes:
    """Thread-safe. The home node is the first of the configured ones (those on this host first) that does not rest;
    with a directory and no configured node, the first that the directory lists."""

    def __init__(
        self,
        session: Session,
        addresses: Sequence[str],
        directory: DirectoryLink | None,
        workers: Workers,
        on_home: Callable[[LanePool, Welcome], None],
    ) -> None:
        self.directory = directory
        self._session = session
        self._workers = workers
        self._on_home = on_home
        self._lock = threading.Lock()
        self._pools: dict[str, LanePool] = {}
        self._probing: set[str] = set()
        self._order = sorted(addresses, key=_distance)
        self._salt: bytes | None = None
        self._name_key = b""
        self._closed = False
        self._first: LanePool | None = None

    def name_key(self, call: Call) -> bytes:
        """The key of this client's names; a node has to be reached once. Raises Unavailable, AccessDenied."""
        if self._salt is None:
            self.exchange(call, lambda pool: None)
        return self._name_key

    def home(self, call: Call) -> LanePool:
        """Raises Unavailable if there is no node at all."""
        if self._first is not None and not self._first.suspect:
            return self._first
        return self.candidates(call)[0]

    def candidates(self, call: Call) -> list[LanePool]:
        """The configured nodes, best first; those that failed last. If all failed, others that the directory knows come
        before them. Raises Unavailable if there are none."""
        if not self._order:
            self._discover(call)
        pools = [self.pool(address) for address in self._order]
        self._first = pools[0]
        well = [pool for pool in pools if not self._suspect(pool)]
        if not well:
            well = [pool for pool in self.others(call) if not pool.suspect]
            return well + pools
        return well + [pool for pool in pools if pool not in well] if len(well) < len(pools) else well

    def others(self, call: Call) -> list[LanePool]:
        """Nodes that take values and are not configured, as the directory has them; the emptiest first."""
        if self.directory is None:
            return []
        try:
            rows = self.directory.nodes(timeout_s=max(0.05, min(DIRECTORY_S, call.left_s)))
        except (Retryable, WireError):
            return []
        ours = {pool.welcome.node_id for pool in map(self.pool, self._order) if pool.welcome is not None}
        rows = [
            row
            for row in rows
            if row.accepts and not row.layout and row.node_id not in ours and row.address not in self._order
        ]
        rows.sort(key=lambda row: (_distance(row.address), -row.free_bytes))
        return [self.pool(row.address) for row in rows]

    def everybody(self, call: Call) -> Iterator[LanePool]:
        """`candidates`, then `others`: who might take a value."""
        asked = self.candidates(call)
        yield from asked
        yield from (pool for pool in self.others(call) if pool not in asked)

    def pool(self, address: str) -> LanePool:
        pool = self._pools.get(address)
        if pool is None:
            with self._lock:
                if self._closed:
                    raise Unavailable("the client is closed")
                pool = self._pools.setdefault(
                    address, LanePool(address, self._session, self._welcomed, self._workers.submit)
                )
        return pool

    def exchange(self, call: Call, use: Callable[[LanePool], None]) -> LanePool:
        """`use` the home node (a lane to it can be had); if that fails the next one. Raises Unavailable naming all."""
        reasons = []
        for pool in self.candidates(call):
            try:
                with pool.lane(call):
                    pass
                use(pool)
                return pool
            except (Retryable, WireError) as error:
                reasons.append(str(error))
                if call.over:
                    break
        raise Unavailable(f"no node of the store can be reached: {'; '.join(reasons)}")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()
        if self.directory is not None:
            self.directory.close()

    @property
    def several(self) -> bool:
        """There may be another node than the first."""
        return len(self._order) > 1 or self.directory is not None

    @property
    def known(self) -> list[LanePool]:
        return list(self._pools.values())

    @property
    def lanes(self) -> int:
        return sum(pool.lanes for pool in self.known)

    def _suspect(self, pool: LanePool) -> bool:
        """Whether to ask others first. A node whose rest is over is tried in the background, not by a call."""
        if not pool.suspect:
            return False
        if not pool.resting and self.several:
            with self._lock:
                if self._closed or pool.address in self._probing:
                    return True
                self._probing.add(pool.address)
            if not self._workers.submit(lambda: self._probe(pool)):
                self._probing.discard(pool.address)
        return pool.resting or self.several

    def _probe(self, pool: LanePool) -> None:
        try:
            pool.probe()
        finally:
            with self._lock:
                self._probing.discard(pool.address)

    def _discover(self, call: Call) -> None:
        if self.directory is None:
            raise ConfigError("the client has no node: give nodes or directory, or set ANABRANCH_STORE")
        try:
            rows = self.directory.nodes(timeout_s=max(0.05, min(DIRECTORY_S, call.left_s)))
        except Refused as error:
            raise (AccessDenied(str(error)) if error.denied else error) from error
        self._order = sorted((row.address for row in rows if not row.layout and row.accepts), key=_distance)
        if not self._order:
            raise Unavailable("the directory knows no store node that takes values")

    def _welcomed(self, pool: LanePool, welcome: Welcome) -> None:
        """Raises AccessDenied if the node belongs to another store."""
        with self._lock:
            if self._salt is None:
                credentials = self._session.credentials
                scope = Scope(credentials.tenant, credentials.namespace, credentials.epoch)
                self._name_key = scope.name_key(welcome.salt)
                self._salt = welcome.salt
            elif self._salt != welcome.salt:
                raise AccessDenied(
                    f"node {welcome.node_id} at {pool.address} names this tenant's values otherwise than the nodes "
                    "before it: its security.secret_file or tenants_file differs"
                )
        if self._order and pool.address in self._order:
            self._on_home(pool, welcome)


def _distance(address: str) -> int:
    """UNIX sockets, then loopback, then this host's other addresses, then the rest."""
    if address.startswith("unix:"):
        return 0
    return 1 if is_local(address) else 2 if _own(address) else 3


def _own(address: str) -> bool:
    """One of this host's own addresses: packets to it would leave from it. Nothing is sent."""
    host = address.split("+")[0].rpartition(":")[0]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return bool(probe.getsockname()[0] == host)
    except (OSError, UnicodeError):
        return False
