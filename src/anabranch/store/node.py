"""The decisions of a node: `handle(event, now)` → actions.

**Covers** sessions of engines, what they hold, look-ups and loads (`store.loads`), hand-offs (`store.handoffs`),
serving peers under a lease, write-back to SSD, and what the directory hears. **Does not cover** bytes, sockets,
threads and the clock: `store.live.node_server` acts, and writes `take_records()` to the arena before it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from anabranch.blocks.layout import KvLayout
from anabranch.store.actions import (
    DirectoryDown,
    DirectoryMessage,
    DirectoryUp,
    FetchAsked,
    FetchServed,
    InboundDone,
    NodeAction,
    NodeEvent,
    OutboundDone,
    PortAttached,
    PortLeft,
    PortMessage,
    Recovered,
    SaveSessions,
    Sealed,
    SegmentEnded,
    SegmentLayers,
    ServeFetch,
    SessionGone,
    SsdReleased,
    SsdWritten,
    Tell,
    Tick,
)
from anabranch.store.announcer import Announcer
from anabranch.store.config import NodeConfig
from anabranch.store.handoffs import HandoffBook
from anabranch.store.leases import Leases
from anabranch.store.loads import LoadBook, Reply, Want
from anabranch.store.messages import (
    Abandon,
    Acquire,
    AcquiredReply,
    Attached,
    CancelLoad,
    Commit,
    Detach,
    FinishOutbound,
    Free,
    Holders,
    LayersReadyReply,
    LoadEndedReply,
    OpenInbound,
    OpenOutbound,
    PushLayer,
    Reserve,
    ReservedReply,
)
from anabranch.store.slots import Named, SlotBook
from anabranch.store.ssd_index import SsdIndex
from anabranch.store.writeback import WriteBack
from anabranch.transfer.api import Address
from anabranch.transfer.layouts import layout_digest, tenant_digest
from anabranch.transfer.records import AttachedSession, SlotRecord

PEER = b"peer:"


class ArenaName(msgspec.Struct, frozen=True):
    path: str
    inode: int
    epoch: int


class Node:
    """One node's brain. `secret()` gives fresh random bytes."""

    def __init__(
        self,
        node_id: str,
        layout: KvLayout,
        config: NodeConfig,
        arena: ArenaName,
        address: Address,
        book: SlotBook,
        ssd: SsdIndex | None,
        counters: Counter[str],
        secret: Callable[[], bytes],
    ) -> None:
        self.node_id = node_id
        self.arena = arena
        self.counters = counters
        self.book = book
        self.ssd = ssd
        self._config = config
        self._actions: list[NodeAction] = []
        act = self._actions.append
        digest = layout_digest(layout)
        self.loads = LoadBook(book, ssd, layout.layers, digest, counters, act, self._load_reply)
        self.handoffs = HandoffBook(
            book, address, layout.layers, counters, secret, act, lambda session, m: act(Tell(session, m))
        )
        self.writeback = WriteBack(book, ssd, config.write_queue_bytes // layout.full_block_bytes, counters, act)
        self.announcer = Announcer(node_id, str(address), digest, config.heartbeat_s, act)
        self.sessions: dict[bytes, AttachedSession] = {}
        self.awaited: dict[bytes, AttachedSession] = {}
        self._quarantine: list[int] = []
        self.fetches: Leases[int] = Leases()
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            Recovered: self._recovered,
            PortMessage: self._port_message,
            PortAttached: self._attached,
            PortLeft: lambda e, now: self._stop_transfers(e.session),
            SessionGone: lambda e, now: self._gone(e.session),
            SegmentLayers: lambda e, now: self.loads.layers_ready(e),
            SegmentEnded: lambda e, now: self.loads.segment_ended(e, now),
            SsdReleased: lambda e, now: self.ssd.unpin(e.slots) if self.ssd else None,
            Sealed: lambda e, now: self.writeback.sealed(e),
            SsdWritten: lambda e, now: self.writeback.written(e, now),
            FetchAsked: self._fetch_asked,
            FetchServed: self._fetch_served,
            InboundDone: lambda e, now: self.handoffs.inbound_done(e),
            OutboundDone: lambda e, now: self.handoffs.outbound_done(e),
            DirectoryUp: self._directory_up,
            DirectoryDown: self._directory_down,
            DirectoryMessage: self._directory_message,
            Tick: self._tick,
        }
        self._ports: dict[type, Callable[[bytes, Any, float], None]] = {
            Acquire: self._acquire,
            CancelLoad: lambda s, m, now: self.loads.cancel(s, m.op),
            Reserve: self._reserve,
            Commit: self._commit,
            Free: lambda s, m, now: self.book.free(s, m.slots),
            OpenInbound: lambda s, m, now: self.handoffs.open_inbound(s, m, now),
            OpenOutbound: lambda s, m, now: self.handoffs.open_outbound(s, m, now),
            PushLayer: lambda s, m, now: self.handoffs.push(s, m),
            FinishOutbound: lambda s, m, now: self.handoffs.finish(s, m.handoff),
            Abandon: lambda s, m, now: self.handoffs.abandon(s, m.handoff),
            Detach: lambda s, m, now: self._gone(s),
        }

    def handle(self, event: NodeEvent, now: float) -> list[NodeAction]:
        """Decide. `now`: seconds on a monotonic clock."""
        self._handlers[type(event)](event, now)
        self.announcer.changed("dram", self.book.take_changes())
        if self.ssd is not None:
            self.announcer.changed("ssd", self.ssd.take_changes())
        self.announcer.flush(now)
        actions = self._actions[:]
        self._actions.clear()
        return actions

    def take_records(self) -> dict[int, SlotRecord]:
        """Changed slot records; to be written before the actions of the same event are carried out."""
        return self.book.take_records()

    def census(self) -> dict[str, int]:
        """What is held right now. All but `cached_slots`, `ssd_blocks` and `sessions` return to their start."""
        pool = self.book.pool
        return {
            "free_slots": pool.free,
            "private_slots": len(self.book.private),
            "cached_slots": len(self.book.named),
            "evictable_slots": pool.evictable,
            "held_references": sum(sum(held.values()) for held in self.book.held.values()),
            "sessions": len(self.sessions),
            "awaited_sessions": len(self.awaited),
            "loads": len(self.loads.loads),
            "lookups": len(self.loads.lookups),
            "fetch_leases": len(self.fetches),
            "inbound": len(self.handoffs.inbound),
            "outbound": len(self.handoffs.outbound),
            "writes_queued": self.writeback.pending,
            "ssd_blocks": len(self.ssd.blocks) if self.ssd else 0,
        }

    # --- sessions -----------------------------------------------------------------------------------------------

    def _recovered(self, event: Recovered, now: float) -> None:
        self.awaited = {s.session: s for s in event.sessions}
        self._quarantine = self.book.recover(event.records, keep_private=bool(event.sessions))
        self.counters["recovered_dram"] += len(self.book.named)
        self._end_quarantine()
        self.writeback.recovered()

    def _attached(self, event: PortAttached, now: float) -> None:
        name = event.session.session
        if name in self.sessions:
            # The engine takes its transfers for ended once this is answered.
            self._stop_transfers(name)
            lost = self.book.reconcile(name, event.held)
        else:
            self.book.open(name)
            lost = self.book.confirm(name, event.held) if name in self.awaited else list(event.held)
            self.sessions[name] = event.session
        self.counters["slots_lost"] += len(lost)
        attached = Attached(
            node_id=self.node_id,
            arena_path=self.arena.path,
            arena_inode=self.arena.inode,
            slots=self.book.slots,
            epoch=self.arena.epoch,
            lost=lost,
        )
        self._actions.append(Tell(name, attached))
        if self.awaited.pop(name, None) is not None:
            self._end_quarantine()
        self._save_sessions()

    def _gone(self, session: bytes) -> None:
        if self.awaited.pop(session, None) is not None:
            self._end_quarantine()
        if self.sessions.pop(session, None) is not None:
            self._stop_transfers(session)
            self.book.drop(session)
            self.counters["sessions_gone"] += 1
        self._save_sessions()

    def _stop_transfers(self, session: bytes) -> None:
        self.loads.drop(session)
        self.handoffs.drop(session)

    def _end_quarantine(self) -> None:
        if not self.awaited:
            self.book.unpin(self._quarantine)
            self._quarantine = []

    def _save_sessions(self) -> None:
        self._actions.append(SaveSessions([*self.sessions.values(), *self.awaited.values()]))

    # --- engine ports -------------------------------------------------------------------------------------------

    def _port_message(self, event: PortMessage, now: float) -> None:
        if event.session in self.sessions:
            self._ports[type(event.message)](event.session, event.message, now)

    def _acquire(self, session: bytes, m: Acquire, now: float) -> None:
        want = Want(session, m.op, m.keys, tenant_digest(m.tenant), m.load, True, now + m.deadline_s)
        self.loads.acquire(want, now)

    def _reserve(self, session: bytes, m: Reserve, now: float) -> None:
        slots = self.book.reserve(session, m.count) if m.count >= 0 else None
        if slots is None:
            self.counters["reserves_refused"] += 1
        self._actions.append(Tell(session, ReservedReply(op=m.op, slots=slots or [])))

    def _commit(self, session: bytes, m: Commit, now: float) -> None:
        tenant = tenant_digest(m.tenant)
        for slot, key, parent in m.blocks:
            if self.book.commit(session, slot, Named(key, parent, tenant)):
                self.writeback.committed(slot, key)
            elif slot in self.book.private and (resident := self.book.pool.get(key)) is not None:
                self.writeback.compare(slot, key, resident)

    def _load_reply(self, reply: Reply) -> None:
        want = reply.want
        if reply.kind == "acquired":
            self.counters["hits_dram"] += len(want.ready)
        if want.requester.startswith(PEER):
            self._fetch_found(reply)
        elif reply.kind == "acquired":
            self._actions.append(
                Tell(want.requester, AcquiredReply(op=want.op, ready=want.ready, loading=reply.loading))
            )
        elif reply.kind == "layers":
            self._actions.append(Tell(want.requester, LayersReadyReply(op=want.op, layers=reply.layers)))
        else:
            ended = LoadEndedReply(op=want.op, usable=reply.usable, tiers=reply.tiers, reason=reply.reason)
            self._actions.append(Tell(want.requester, ended))

    # --- peers --------------------------------------------------------------------------------------------------

    def _fetch_asked(self, event: FetchAsked, now: float) -> None:
        """A peer is a session of its own, with a lease; what it wants may first have to come from our SSD."""
        session = PEER + str(event.fetch).encode()
        self.book.open(session)
        until = now + min(event.deadline_s, self._config.lease_s)
        self.fetches.grant(event.fetch, until)
        self.loads.acquire(Want(session, event.fetch, event.keys, event.tenant, True, False, until), now)

    def _fetch_found(self, reply: Reply) -> None:
        want, slots = reply.want, list(reply.want.ready)
        waiting = reply.kind == "layers" or (reply.kind == "acquired" and reply.loading)
        if waiting or want.requester not in self.book.held:
            return
        if reply.kind == "ended":
            found = self.book.pool.match(want.keys[len(slots) :])[: reply.usable]
            self.book.held[want.requester].update(found)
            self.book.pin(found)
            slots += found
        blocks = [self.book.named[slot] for slot in slots]
        self._actions.append(
            ServeFetch(
                want.op,
                slots,
                [self.book.pool.generation(slot) for slot in slots],
                [block.block_sum for block in blocks],
                reply.reason,
            )
        )

    def _fetch_served(self, event: FetchServed, now: float) -> None:
        self.counters["stale_sends"] += event.lost
        held = self.book.held.get(PEER + str(event.fetch).encode(), Counter())
        for slot in event.damaged:
            block = self.book.named.get(slot)
            if block is not None and held[slot]:
                self.counters["integrity_errors"] += 1
                self.book.remove(block.key)
        self.fetches.end(event.fetch)
        self._drop_fetch(event.fetch)

    def _drop_fetch(self, fetch: int) -> None:
        session = PEER + str(fetch).encode()
        self.loads.drop(session)
        self.book.drop(session)

    # --- directory ----------------------------------------------------------------------------------------------

    def _directory_up(self, event: DirectoryUp, now: float) -> None:
        self.loads.directory_up = True
        self._announce_all(now)

    def _directory_down(self, event: DirectoryDown, now: float) -> None:
        self.loads.directory_up = False
        self.announcer.down()

    def _directory_message(self, event: DirectoryMessage, now: float) -> None:
        if isinstance(event.message, Holders):
            self.loads.found(event.message, now)
        else:
            self.counters["resyncs"] += 1
            self._announce_all(now)

    def _announce_all(self, now: float) -> None:
        self.book.take_changes()
        tiers = {"dram": [block.key for block in self.book.named.values()]}
        if self.ssd is not None:
            self.ssd.take_changes()
            tiers["ssd"] = [block.key for block in self.ssd.blocks.values()]
        self.announcer.reset(tiers, now)

    def _tick(self, event: Tick, now: float) -> None:
        self.loads.tick(now)
        self.handoffs.tick(now)
        self.writeback.tick(now)
        for fetch in self.fetches.expired(now):
            self.counters["leases_expired"] += 1
            self._drop_fetch(fetch)
