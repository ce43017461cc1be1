"""A node among others: copies to them and from them, removal and invalidation everywhere, and how it leaves."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from anabranch.core.authentication import Access
from anabranch.core.errors import AnabranchError
from anabranch.core.live.tls import Tls
from anabranch.policy.placement import choose
from anabranch.store.messages import NodeRow, Repair
from anabranch.store.values.config import StoreConfig, WriteConfig
from anabranch.store.values.entries import Entry, ScopeState
from anabranch.store.values.live.node_copies import Copies
from anabranch.store.values.live.node_custody import Custody, NodeSession, split_names
from anabranch.store.values.live.node_directory import NodeDirectory, candidates
from anabranch.store.values.live.node_drain import NodeDrain
from anabranch.store.values.live.node_imports import Imports
from anabranch.store.values.live.node_lane import NodeLane
from anabranch.store.values.live.node_lanes import PEER_PREFIX, NodeLanes
from anabranch.store.values.live.node_missed import NodeMissed
from anabranch.store.values.live.node_pool import Work, WorkPool
from anabranch.store.values.live.node_tiers import NodeTiers
from anabranch.store.values.messages import Done, Drain, Invalidate, Prefetch, Remove
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.puts import Put
from anabranch.store.values.scope import NAME_BYTES, Scope
from anabranch.transfer.classes import TrafficClass
from anabranch.transfer.live.rails import Links

if TYPE_CHECKING:
    from anabranch.store.values.live.node_calls import CallDesk

PUSH_S = 10.0
PUSHED_BYTES = 64 << 20
PEER_THREADS = 4
MAX_REPAIRS = 1000
log = logging.getLogger(__name__)


class NodePeers:
    def __init__(
        self,
        node_id: str,
        config: StoreConfig,
        writes: WriteConfig,
        custody: Custody,
        tiers: NodeTiers,
        access: Access,
        tls: Tls | None,
        links: Links,
        data_dir: str,
    ) -> None:
        self._node_id = node_id
        self._replicas = writes.replicas
        self._custody = custody
        self._tiers = tiers
        self._lanes = NodeLanes(node_id, access, tls, links)
        self._pool = WorkPool("peers", PEER_THREADS, stuck_s=60.0)
        self._repairs = 0
        self.directory = NodeDirectory(node_id, config, writes, custody, tiers, access, tls)
        self.missed = NodeMissed(node_id, data_dir, custody, tiers, self.directory, self._lanes)
        self._imports = Imports(custody, self._lanes)
        self._copies = Copies()
        self._drain = NodeDrain(
            node_id,
            custody,
            tiers,
            self.directory,
            lambda address, names: self._hand_over(address, names, "handed_over"),
        )
        self.drained = self._drain.done
        """This node has left: the process may end."""

    def start(self, address: str) -> None:
        self.directory.start(address, self._repair)
        self.missed.start()

    def close(self) -> None:
        self.missed.close()
        self.directory.leave()
        self._lanes.close()
        self._pool.close()
        self._drain.close()

    # --- replicas -------------------------------------------------------------------------------------------------

    def stored(self, put: Put, entries: list[Entry]) -> None:
        """Under the lock: these are new here."""
        if put.replicas and put.replicas != self._replicas and not _of_peer(put):
            for entry in entries:
                self._custody.shelf.wanted[entry.name] = put.replicas
        self._tiers.stored(entries)
        self.directory.changed()

    def used(self, session: NodeSession, entries: list[Entry]) -> None:
        """Under the lock: these were read, perhaps by another node."""
        if session.peer:
            self._copies.gave([entry.name for entry in entries], session.peer, self._custody.now())
        self._tiers.used(entries)

    def unfinished(self, put: Put) -> bool:
        """It is not over when its values are in this node's DRAM."""
        return put.durable or ((put.replicas or self._replicas) > 1 and not _of_peer(put))

    def finish(self, put: Put, entries: list[Entry]) -> None:
        """Durable and replicated, as the put asks; outside the lock, the entries held."""
        if put.durable:
            self._tiers.make_durable(put, entries)
        count = put.replicas or self._replicas
        if count > 1 and entries and not _of_peer(put):
            self._replicate(entries, count)

    def _replicate(self, entries: list[Entry], count: int) -> None:
        counters = self._custody.shelf.counters
        try:
            rows = {row.node_id: row for row in self.directory.others()}
        except AnabranchError:
            rows = {}
        left: dict[bytes, int] = {entry.name: count - 1 for entry in entries}
        tried: dict[bytes, set[str]] = defaultdict(set)
        for _ in range(2):
            plan: dict[str, list[Entry]] = defaultdict(list)
            for entry in entries:
                free = [row for row in rows.values() if row.node_id not in tried[entry.name]]
                for chosen in choose(candidates(free), left[entry.name], "", entry.name):
                    plan[chosen.node_id].append(entry)
                    tried[entry.name].add(chosen.node_id)
            for name in self._push_all([(rows[node_id], batch) for node_id, batch in plan.items()]):
                left[name] -= 1
            if not any(left.values()):
                break
        short = sum(left.values())
        with self._custody.lock:
            counters["replicas_stored"] += (count - 1) * len(entries) - short
            counters["replicas_short"] += short

    def _push_all(self, batches: list[tuple[NodeRow, list[Entry]]]) -> list[bytes]:
        """To all nodes at once; the names that arrived, one for each copy."""
        arrived: list[bytes] = []
        works: list[Work] = []
        for row, batch in batches[1:]:

            def push(address: str = row.address, entries: list[Entry] = batch) -> None:
                arrived.extend(self._push(address, entries))

            work = self._pool.submit(push)
            if work is not None:
                works.append(work)
        if batches:
            arrived.extend(self._push(batches[0][0].address, batches[0][1]))
        for work in works:
            work.wait(PUSH_S)
        return arrived

    def _push(self, address: str, entries: list[Entry], traffic: TrafficClass = TrafficClass.WRITEBACK) -> list[bytes]:
        """The names that are there now. The entries are held."""
        arrived: list[bytes] = []
        for state, mine in _by_scope(entries).items():
            scope = state.scope
            if scope is None:
                continue
            outcomes = self._lanes.push(address, scope, mine, self._custody.memory.data, PUSH_S, traffic)
            there = [name for name, outcome in outcomes.items() if outcome.stored]
            with self._custody.lock:
                self._copies.gave(there, address, self._custody.now())
            arrived += there
            # What was removed here meanwhile was perhaps removed there before it came.
            gone = b"".join([entry.name for entry in mine if not entry.live])
            if gone:
                self._ask_remove(address, scope, gone)
        return arrived

    def _repair(self, repair: Repair) -> None:
        """On a thread of the directory's: make replicas of what a lost node had."""
        if self._repairs >= MAX_REPAIRS:
            self._custody.shelf.counters["repairs_dropped"] += len(repair.names) // NAME_BYTES
            return

        def job() -> None:
            try:
                self._hand_over(repair.address, split_names(repair.names), "repaired")
            finally:
                self._repairs -= 1

        self._repairs += 1
        if self._pool.submit(job) is None:
            self._repairs -= 1

    def _hand_over(self, address: str, names: list[bytes], counter: str) -> int:
        """Copy values to a node, some at a time; how many are there now."""
        return sum(self._hand_over_some(address, names[at : at + 256], counter) for at in range(0, len(names), 256))

    def _hand_over_some(self, address: str, names: list[bytes], counter: str) -> int:
        custody = self._custody
        held: list[Entry] = []
        with custody.lock:
            for state in custody.shelf.scopes.states():
                for name in names:
                    entry = state.entries.get(name)
                    if entry is not None:
                        custody.shelf.hold(entry)
                        held.append(entry)
        below = self._from_below(set(names) - {entry.name for entry in held})
        held += below
        try:
            arrived = len(self._push(address, held, TrafficClass.MIGRATE)) if held else 0
        finally:
            with custody.lock:
                for entry in reversed(held):
                    custody.shelf.release(entry)
                custody.notice()
        with custody.lock:
            custody.shelf.counters[counter] += arrived
        return arrived

    def _from_below(self, names: Iterable[bytes]) -> list[Entry]:
        disk, loader = self._tiers.disk, self._tiers.loader
        if disk is None or loader is None:
            return []
        wanted = [(self._custody.shelf.scopes.known(r.scope), r.name) for name in names if (r := disk.record(name))]
        return [entry for _, _, entry in loader.load(wanted) if entry is not None]

    # --- everywhere -----------------------------------------------------------------------------------------------

    def remove(self, lane: NodeLane, session: NodeSession, message: Remove, calls: CallDesk) -> None:
        names = split_names(message.names)
        scope = session.scope.scope
        self._imports.cancel(names)
        ident = self.missed.heard(message.ident if session.peer else b"", names=message.names) if names else b""
        outcomes = bytearray(calls.remove(session, names))
        if scope is not None:
            self._remove_copies(scope, names, outcomes, ident)
        if message.everywhere and scope is not None and not self.directory.alone:
            for i, outcome in self._remove_elsewhere(scope, message.names, ident).items():
                if outcome is Outcome.UNREACHABLE or outcomes[i] == Outcome.MISSING:
                    outcomes[i] = outcome
        self.directory.changed()
        lane.send(Done(op=message.op, outcomes=bytes(outcomes)))

    def _remove_copies(self, scope: Scope, names: list[bytes], outcomes: bytearray, ident: bytes) -> None:
        """From nodes that got a copy here so lately that nobody else may know of it."""
        with self._custody.lock:
            copies = self._copies.take(names)
        if not copies:
            return
        try:
            addresses = {PEER_PREFIX + row.node_id: row.address for row in self.directory.others()}
        except AnabranchError:
            addresses = {}
        gone: set[bytes] = set()
        for to, mine in copies.items():
            address = addresses.get(to, "" if to.startswith(PEER_PREFIX) else to)
            results = self._ask_remove(address, scope, b"".join(mine), ident) if address else [Outcome.UNREACHABLE]
            if Outcome.UNREACHABLE in results:
                gone.update(mine)
        for i, name in enumerate(names):
            if name in gone:
                outcomes[i] = Outcome.UNREACHABLE

    def _remove_elsewhere(self, scope: Scope, names: bytes, ident: bytes) -> dict[int, Outcome]:
        count = len(names) // NAME_BYTES
        found = self.directory.where(names)
        holders: dict[str, list[int]] = defaultdict(list)
        if found is None or found.unknown:
            # Nobody can say who has them: ask everybody.
            try:
                holders.update((row.address, list(range(count))) for row in self.directory.others())
            except AnabranchError:
                return dict.fromkeys(range(count), Outcome.UNREACHABLE)
            for address in holders:
                self._ask_remove(address, scope, names, ident)
            # Somebody who may have them could not be asked, and brings them back when it returns.
            return dict.fromkeys(range(count), Outcome.UNREACHABLE)
        for i in range(len(found)):
            for node_id, address, _ in found.holders(i):
                if node_id != self._node_id:
                    holders[address].append(i)
        outcomes: dict[int, Outcome] = {}
        for address, items in holders.items():
            asked = b"".join([names[i * NAME_BYTES : (i + 1) * NAME_BYTES] for i in items])
            results = self._ask_remove(address, scope, asked, ident)
            for i, result in zip(items, results, strict=True):
                if outcomes.get(i) is not Outcome.UNREACHABLE:
                    outcomes[i] = result if result is not Outcome.MISSING else outcomes.get(i, Outcome.MISSING)
        return outcomes

    def _ask_remove(self, address: str, scope: Scope, names: bytes, ident: bytes = b"") -> list[Outcome]:
        count = len(names) // NAME_BYTES
        try:
            done = self._lanes.ask(address, scope, Remove(op=0, names=names, everywhere=False, ident=ident), Done)
        except AnabranchError:
            return [Outcome.UNREACHABLE] * count
        results = [Outcome(byte) for byte in done.outcomes]
        return results if len(results) == count else [Outcome.UNREACHABLE] * count

    def invalidate(self, lane: NodeLane, session: NodeSession, message: Invalidate) -> None:
        tenant = message.tenant or session.caller.tenant
        if tenant != session.caller.tenant and not session.caller.trusted:
            lane.send(Done(op=message.op, outcomes=bytes([Outcome.DENIED])))
            return
        ident = self.missed.heard(message.ident if session.peer else b"", tenant=tenant, epoch=message.epoch)
        with self._custody.lock:
            if message.epoch is not None and session.scope.scope is not None:
                # Perhaps other tiers have values of it that this process has not heard of.
                self._tiers.open_scope(Scope(tenant, session.scope.scope.namespace, message.epoch))
            states = self._custody.shelf.scopes.of(tenant, message.epoch)
            barred_until = self._custody.bar(tenant, message.epoch)
        gone = self._tiers.invalidate(states)
        if message.epoch is None and self._tiers.keys is not None:
            gone["keys"] = self._tiers.keys.renew(tenant, [state.digest for state in states])
        places = {f"{self._node_id}/{tier}": count for tier, count in gone.items()}
        if message.everywhere:
            places.update(self._invalidate_elsewhere(tenant, message.epoch, ident))
            if self._custody.now() > barred_until:
                # It took so long that the first may have taken copies from the last again.
                places.update((place, -1) for place in places if place.startswith(f"{self._node_id}/"))
        self.directory.changed()
        lane.send(Done(op=message.op, places=places))

    def _invalidate_elsewhere(self, tenant: str, epoch: str | None, ident: bytes) -> dict[str, int]:
        places: dict[str, int] = {}
        try:
            rows = self.directory.others()
        except AnabranchError:
            return {"directory": -1}
        for row in rows:
            message = Invalidate(op=0, tenant=tenant, epoch=epoch, everywhere=False, ident=ident)
            try:
                done = self._lanes.ask(row.address, Scope(tenant, epoch=epoch or ""), message, Done, 30.0)
                places.update(done.places)
            except AnabranchError:
                places[f"{row.node_id}/node"] = -1
        return places

    # --- prefetch -------------------------------------------------------------------------------------------------

    def prefetch(self, lane: NodeLane, session: NodeSession, message: Prefetch) -> None:
        """OK: it is in DRAM or on its way there."""
        names = split_names(message.names)
        custody = self._custody
        with custody.lock:
            custody.ledger.asked("prefetch", session.caller.tenant, len(names))
        outcomes = self._tiers.prefetch(session.scope, names)
        missing = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.MISSING]
        coming = self._import(session.scope, missing) if missing else {}
        outcomes = [coming.get(name, outcome) for name, outcome in zip(names, outcomes, strict=True)]
        with custody.lock:
            custody.ledger.answered_all("prefetch", session.caller.tenant, bytes(outcomes))
        lane.send(Done(op=message.op, outcomes=bytes(outcomes)))

    def _import(self, state: ScopeState, names: list[bytes]) -> dict[bytes, Outcome]:
        found = self.directory.where(b"".join(names))
        with self._custody.lock:
            barred = self._custody.barred(state)
        if found is None or state.scope is None or barred:
            return {}
        sources: dict[str, list[bytes]] = defaultdict(list)
        outcomes: dict[bytes, Outcome] = {}
        for i, name in enumerate(names[: len(found)]):
            holders = sorted(
                (bits & 1 == 0, address) for node, address, bits in found.holders(i) if node != self._node_id
            )
            if holders:
                sources[holders[0][1]].append(name)
            elif found.unknown:
                outcomes[name] = Outcome.UNKNOWN
        for address, mine in sources.items():
            job = self._imports.begin(state, address, mine, self.directory.changed)
            accepted = self._pool.submit(job) is not None
            if not accepted:
                self._imports.forget(mine)
            outcomes.update(dict.fromkeys(mine, Outcome.OK if accepted else Outcome.UNREACHABLE))
        return outcomes

    # --- leaving --------------------------------------------------------------------------------------------------

    def drain(self, lane: NodeLane, session: NodeSession, message: Drain) -> None:
        """Answered when everything worth it was handed over, or the deadline passed; then the node leaves."""
        if not session.caller.trusted:
            lane.send(Done(op=message.op, outcomes=bytes([Outcome.DENIED])))
            return
        handed, left = self._drain.run(message.deadline_s)
        lane.send(
            Done(op=message.op, places={f"{self._node_id}/handed_over": handed, f"{self._node_id}/left_behind": left})
        )

    def state(self) -> dict[str, str]:
        state = {}
        if self._drain.begun:
            state["drain"] = "left" if self.drained.is_set() else "takes no new values"
        if not self.directory.alone and not self.directory.joined:
            state["directory"] = "not joined: other nodes and clients do not hear of this node's values"
        return state

    def census(self) -> dict[str, int]:
        alone = int(self.directory.alone and not self._drain.begun)
        return {"imports": len(self._imports), "repairs_waiting": self._repairs, "alone": alone}


def _of_peer(put: Put) -> bool:
    return isinstance(put.session, NodeSession) and bool(put.session.peer)


def _by_scope(entries: Sequence[Entry]) -> dict[ScopeState, list[Entry]]:
    grouped: dict[ScopeState, list[Entry]] = defaultdict(list)
    for entry in entries:
        grouped[entry.scope].append(entry)
    return grouped
