"""A node among others: what it tells the directory, what it copies to other nodes, and how it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anabranch.store.values.config import WriteConfig
from anabranch.store.values.entries import Entry
from anabranch.store.values.live.node_custody import Custody, NodeSession, split_names
from anabranch.store.values.live.node_lane import NodeLane
from anabranch.store.values.live.node_tiers import NodeTiers
from anabranch.store.values.messages import Done, Drain, Invalidate, Prefetch, Remove
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.puts import Put

if TYPE_CHECKING:
    from anabranch.store.values.live.node_calls import CallDesk
    from anabranch.store.values.live.node_server import ValueNode


class NodePeers:
    def __init__(self, node: ValueNode, custody: Custody, tiers: NodeTiers, writes: WriteConfig) -> None:
        self._node = node
        self._custody = custody
        self._tiers = tiers
        self._writes = writes

    def start(self) -> None: ...

    def finish(self, put: Put, entries: list[Entry]) -> None:
        """Durable and replicated, as the put asks."""
        if put.durable:
            self._tiers.make_durable(put, entries)

    def remove(self, lane: NodeLane, session: NodeSession, message: Remove, calls: CallDesk) -> None:
        lane.send(Done(op=message.op, outcomes=calls.remove(session, split_names(message.names))))

    def invalidate(self, lane: NodeLane, session: NodeSession, message: Invalidate) -> None:
        tenant = message.tenant or session.caller.tenant
        if tenant != session.caller.tenant and not session.caller.trusted:
            lane.send(Done(op=message.op, outcomes=bytes([Outcome.DENIED])))
            return
        with self._custody.lock:
            states = self._custody.shelf.scopes.of(tenant, message.epoch)
        places = {f"{self._node.node_id}/{tier}": gone for tier, gone in self._tiers.invalidate(states).items()}
        lane.send(Done(op=message.op, places=places))

    def prefetch(self, lane: NodeLane, session: NodeSession, message: Prefetch) -> None:
        names = split_names(message.names)
        loader = self._tiers.loader
        if loader is None:
            entries = session.scope.entries
            outcomes = [Outcome.OK if name in entries else Outcome.MISSING for name in names]
        else:
            outcomes = loader.prefetch([(session.scope, name) for name in names])
        lane.send(Done(op=message.op, outcomes=bytes(outcomes)))

    def drain(self, lane: NodeLane, session: NodeSession, message: Drain) -> None:
        if not session.caller.trusted:
            lane.send(Done(op=message.op, outcomes=bytes([Outcome.DENIED])))
            return
        with self._custody.lock:
            self._custody.puts.closing = True
        lane.send(Done(op=message.op))

    def tick(self) -> None: ...

    def state(self) -> dict[str, str]:
        return {}

    def close(self) -> None: ...
