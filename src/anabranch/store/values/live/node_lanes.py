"""A node as a client of other nodes: copies of its values to them, theirs to it, and words about both.

Lanes are per node, scope and traffic class: a trusted caller speaks for any tenant, so what it stores counts as that
tenant's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeVar

from anabranch.core.authentication import Access, Credentials
from anabranch.core.errors import WireError
from anabranch.core.live.tls import Tls
from anabranch.core.messages import Message
from anabranch.store.values.entries import Entry
from anabranch.store.values.got import Got
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.deposit import Deposit, PutOptions
from anabranch.store.values.live.fetch import Fetch
from anabranch.store.values.live.lanes import LanePool
from anabranch.store.values.live.session import Session
from anabranch.store.values.live.sinks import Sink
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.parts import Parts
from anabranch.store.values.scope import Scope
from anabranch.transfer.classes import TrafficClass
from anabranch.transfer.live.rails import Links
from anabranch.transfer.live.workers import Workers

PEER_PREFIX = "node:"
"""How a node names itself in its Hello: what it stores it does not want replicated again."""
MAX_POOLS = 128
ASK_S = 5.0
M = TypeVar("M", bound=Message)


class NodeLanes:
    def __init__(self, node_id: str, access: Access, tls: Tls | None, links: Links) -> None:
        self._links = links
        self._name = PEER_PREFIX + node_id
        self._secret = access.cluster_secret
        self._tls = tls
        self._lock = threading.Lock()
        self._pools: OrderedDict[tuple[str, Scope, TrafficClass], LanePool] = OrderedDict()
        self.workers = Workers("peer", 8)

    def push(
        self,
        address: str,
        scope: Scope,
        entries: Sequence[Entry],
        data: memoryview,
        timeout_s: float,
        traffic: TrafficClass = TrafficClass.WRITEBACK,
    ) -> dict[bytes, Outcome]:
        """Copies of held values; what became of each name."""
        pool = self._pool(address, scope, traffic)
        outcomes: dict[bytes, Outcome] = {}
        loose = [entry for entry in entries if not entry.parent]
        hanging = chains([entry for entry in entries if entry.parent])
        for run in [loose, *hanging] if loose else hanging:
            options = PutOptions(replicas=1, chain=bool(run[0].parent), parent=run[0].parent)
            values = [Parts([data[e.offset : e.offset + e.size]]) for e in run]
            names = b"".join([entry.name for entry in run])
            results = Deposit(pool, self.workers, names, values, options, Call(timeout_s), lanes=2).run()
            outcomes.update(zip((entry.name for entry in run), results, strict=True))
        return outcomes

    def fetch(self, address: str, scope: Scope, names: bytes, sinks: Sequence[Sink], timeout_s: float) -> list[Got]:
        pool = self._pool(address, scope, TrafficClass.PREFETCH)
        return Fetch(pool, self.workers, names, sinks, Call(timeout_s), lanes=2).run()

    def ask(self, address: str, scope: Scope, message: Message, kind: type[M], timeout_s: float = ASK_S) -> M:
        """One request. Raises Unavailable, DeadlineExceeded, WireError, AccessDenied."""
        with self._pool(address, scope, TrafficClass.LOAD).lane(Call(timeout_s)) as lane:
            lane.send(message)
            answer = lane.receive()
            if not isinstance(answer, kind):
                raise WireError(f"{address} answers {type(message).__name__} with {type(answer).__name__}")
            return answer

    def close(self) -> None:
        with self._lock:
            pools, self._pools = list(self._pools.values()), OrderedDict()
        for pool in pools:
            pool.close()
        self.workers.close(2.0)

    def _pool(self, address: str, scope: Scope, traffic: TrafficClass) -> LanePool:
        key = address, scope, traffic
        with self._lock:
            pool = self._pools.get(key)
            if pool is not None:
                self._pools.move_to_end(key)
                return pool
            credentials = Credentials(
                secret=self._secret, tenant=scope.tenant, namespace=scope.namespace, epoch=scope.epoch
            )
            session = Session(credentials, tls=self._tls, name=self._name, links=self._links, traffic=traffic)
            pool = self._pools[key] = LanePool(address, session, lambda pool, welcome: None, self.workers.submit)
            dropped = self._pools.popitem(last=False)[1] if len(self._pools) > MAX_POOLS else None
        if dropped is not None:
            dropped.close()
        return pool


def chains(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Runs of values of which each hangs on the one before it."""
    runs: list[list[Entry]] = []
    for entry in entries:
        if runs and entry.parent and entry.parent == runs[-1][-1].name:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs
