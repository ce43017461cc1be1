"""A node of the value store: DRAM that clients reach over TCP, a UNIX socket and shared memory, and the tiers below.

**Covers** start, stop, warm restart, lanes and their threads. **Does not cover** what is where (`store.values.shelf`),
putting and getting (`node_puts`, `node_gets`), lower tiers (`node_tiers`), other nodes (`node_peers`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.core.authentication import OPEN, Access, Caller, must_authenticate
from anabranch.core.errors import AnabranchError, Unavailable
from anabranch.core.faults import NO_FAULTS, Faults
from anabranch.core.live.link import Listener
from anabranch.core.live.tls import Tls
from anabranch.paging.extents import Extents
from anabranch.policy.eviction.choice import eviction_policy
from anabranch.store.messages import Stat, StatRequest
from anabranch.store.values.config import StoreConfig, WriteConfig
from anabranch.store.values.contracts import BackingTier, DiskTier
from anabranch.store.values.live.index import SharedIndexWriter
from anabranch.store.values.live.node_calls import CallDesk
from anabranch.store.values.live.node_custody import Custody, NodeSession
from anabranch.store.values.live.node_door import Door
from anabranch.store.values.live.node_gets import GetDesk
from anabranch.store.values.live.node_lane import NodeLane
from anabranch.store.values.live.node_memory import NodeMemory
from anabranch.store.values.live.node_mirror import NodeMirror
from anabranch.store.values.live.node_peers import NodePeers
from anabranch.store.values.live.node_puts import PutDesk
from anabranch.store.values.live.node_records import Found, NodeRecords
from anabranch.store.values.live.node_scopes import ScopeFile
from anabranch.store.values.live.node_tiers import NodeTiers
from anabranch.store.values.live.request_log import LOGGED, logged
from anabranch.store.values.live.session import boot_id
from anabranch.store.values.messages import (
    Abandon,
    Damaged,
    Drain,
    Exists,
    Get,
    Introduce,
    Invalidate,
    Listing,
    Missed,
    Offer,
    Pin,
    Prefetch,
    Put,
    Read,
    Remove,
    Return,
    Seal,
    Slice,
    Trace,
    Verify,
    Welcome,
)
from anabranch.store.values.shelf import Shelf
from anabranch.transfer.live.rails import Links
from anabranch.transfer.topology import split_addresses

if TYPE_CHECKING:
    from anabranch.store.values.live.request_spans import NodeSpans
    from anabranch.store.values.live.tenant_keys import TenantKeys

MAX_LANES = 1024
TICK_S = 0.05
FRAME_BYTES = 16 << 20
CONTEXT_VALUES = 4096.0
"""Depth in its chain at which a value is worth twice as much as the first (`policy.eviction.cost`)."""
LARGE_VALUE_BYTES, SMALL_VALUE_BYTES = 512 << 10, 16 << 10
"""What eviction's statistics take a value for, to know how many there are."""
RECLAIMED_AT_ONCE = 256
LISTED_AT_ONCE = 512
SPANNED: tuple[type, ...] = (Get, Put, Offer, Seal, Exists, Remove, Invalidate, Pin, Prefetch, Verify, Drain)
"""What a trace shows of a node; slices are too many."""
log = logging.getLogger(__name__)


class ValueNode:
    """`data_dir` keeps what must survive a restart; `arena_path` and, beside it, `.index` and `.records` are shared
    memory, which outlives a killed process and is found again. `disk` and `backing` are the node's from now on: `stop`
    closes them; `keys`: those that they seal with. `spans`: for tracing. Raises ConfigError for what cannot be."""

    def __init__(
        self,
        node_id: str,
        config: StoreConfig,
        writes: WriteConfig | None = None,
        *,
        unix_address: str = "",
        arena_path: str,
        data_dir: str,
        access: Access = OPEN,
        tls: Tls | None = None,
        disk: DiskTier | None = None,
        backing: BackingTier | None = None,
        faults: Faults = NO_FAULTS,
        links: Links | None = None,
        keys: TenantKeys | None = None,
        spans: NodeSpans | None = None,
    ) -> None:
        must_authenticate(split_addresses(config.listen), access)
        self._links = links or Links()
        self.node_id = node_id
        self.config = config
        self._access = access
        self._tls = tls
        self._unix_address = unix_address
        self._boot = boot_id()
        self._memory = NodeMemory(arena_path, config.dram_bytes)
        Path(data_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._scopes = ScopeFile(str(Path(data_dir) / "scopes"))
        entries = max(4096, config.dram_bytes // 256)
        self._records = NodeRecords(arena_path + ".records", config.dram_bytes, entries)
        self._index_path = arena_path + ".index"
        self._index = self._make_index(max(4096, config.dram_bytes // 4096))
        found = self._records.take_all() if self._memory.kept and self._records.kept else []
        self.custody = Custody(self._shelf(found, entries), self._memory, config)
        self._tiers = NodeTiers(self.custody, self._scopes, writes or WriteConfig(), disk, backing)
        self._tiers.keys = keys
        self._peers = NodePeers(
            node_id, config, writes or WriteConfig(), self.custody, self._tiers, access, tls, self._links, data_dir
        )
        self._adopt(found)
        self._gets = GetDesk(self.custody, faults, self._tiers.load if self._tiers.there else None, self._peers.used)
        self._puts = PutDesk(
            self.custody,
            faults,
            self._peers.unfinished,
            self._peers.finish,
            self._peers.stored,
            durable=self._tiers.there,
        )
        if self._tiers.there:
            self.custody.puts.below = self._tiers.locate
        self._calls = CallDesk(self.custody, self._gets, self._tiers)
        self._listeners: list[Listener] = []
        self._stopping = threading.Event()
        self._broken = ""
        self.failure: BaseException | None = None
        self._ticker = threading.Thread(target=self._tick, name=f"{node_id}-tick", daemon=True)
        handlers = self._make_handlers()
        for kind in LOGGED:
            handlers[kind] = logged(node_id, kind.__name__, handlers[kind])
        if spans is not None:
            for kind in SPANNED:
                handlers[kind] = spans.around(kind.__name__, handlers[kind])
        self._door = Door(
            node_id, self.custody, self._tiers, access, tls, self._links, handlers, self._welcome, self.stat
        )

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises Unavailable if an address is taken."""
        self._memory.touch()
        self._peers.missed.catch_up()
        try:
            for address in (*split_addresses(self.config.listen), self._unix_address):
                if address:
                    self._listeners.append(Listener(address, self._door.accept, name=self.node_id))
        except Unavailable:
            self.stop(keep=self._memory.kept)
            raise
        self._ticker.start()
        self._peers.start(self.address)

    def stop(self, *, keep: bool = False) -> None:
        """Ends all lanes; once. `keep`: what DRAM holds is left for a successor, as after a kill."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        for listener in self._listeners:
            listener.close()
        self._door.close()
        if self._ticker.is_alive():
            self._ticker.join(5.0)
        self._peers.close()
        if not self._tiers.close():
            log.warning("node %s: a call to a slower tier does not return; it is left behind", self.node_id)
        if self._index is not None:
            if not keep:
                self._index.retire()
            self._index.close()
            if not keep:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._index_path)
        self._records.close(remove=not keep)
        self._memory.close(remove=not keep)
        self._scopes.close()

    @property
    def address(self) -> str:
        """Where callers connect; valid after `start`."""
        return "+".join(one.address for one in self._listeners if not one.address.startswith("unix:"))

    @property
    def local_address(self) -> str:
        return self._unix_address

    @property
    def joined(self) -> bool:
        """The directory has been told what this node holds."""
        return self._peers.directory.joined

    @property
    def drained(self) -> threading.Event:
        """Set when the node has left its store and its readers are done: the process may end."""
        return self._peers.drained

    def stat(self) -> Stat:
        custody = self.custody
        with custody.lock:
            shelf = custody.shelf
            census = {
                "values": len(shelf),
                "used_bytes": shelf.used_bytes,
                "free_bytes": shelf.free_bytes,
                "held_bytes": shelf.held_bytes,
                "reserved_bytes": shelf.reserved_bytes,
                "capacity_bytes": self.config.dram_bytes,
                "leases": len(custody.reads),
                "pins": len(custody.pins),
                "puts": len(custody.puts),
                **self._door.census(),
                "waiting": custody.waiting,
                "to_verify": custody.to_verify,
                "verified": min(custody.verified, custody.to_verify),
                "unreclaimed": sum(map(len, shelf.scopes.reclaim)),
                **self._tiers.census(),
                **self._peers.census(),
            }
            counters: dict[str, float] = {**shelf.counters, **custody.ledger.counters}
            counters["bytes_in"], counters["bytes_out"] = self._door.bytes_moved()
        state = {**self._tiers.state(), **self._peers.state()}
        if self._broken:
            state["node"] = f"something went wrong: {self._broken}"
        return Stat(name=self.node_id, census=census, counters=counters, state=state)

    # --- start ----------------------------------------------------------------------------------------------------

    def _make_index(self, capacity: int) -> SharedIndexWriter | None:
        """None: no index here, callers on this host ask the node."""
        try:
            index = SharedIndexWriter.reopen(self._index_path) if self._memory.kept and self._records.kept else None
            if index is not None:
                return index
            return SharedIndexWriter.create(self._index_path, capacity)
        except Unavailable as error:
            log.warning("node %s: %s", self.node_id, error)
            return None

    def _shelf(self, found: list[Found], entries: int) -> Shelf:
        extents, kept = Extents.around(self.config.dram_bytes, [(f.offset, f.record.size) for f in found])
        found[:] = [one for one, whole in zip(found, kept, strict=True) if whole]
        large, small = (
            eviction_policy(self.config.eviction, max(64, self.config.dram_bytes // typical), CONTEXT_VALUES)
            for typical in (LARGE_VALUE_BYTES, SMALL_VALUE_BYTES)
        )
        mirror = NodeMirror(self._memory, self._records, self._index, self._scopes)
        return Shelf(
            self.config.dram_bytes,
            large,
            small,
            max_entries=entries,
            first_generation=self._records.first_generation,
            mirror=mirror,
            extents=extents,
        )

    def _adopt(self, found: list[Found]) -> None:
        """A former process's values are ours again, but for what was invalidated."""
        shelf = self.custody.shelf
        stale = []
        if self._index is not None and len(self._index):
            dead = self._scopes.dead
            kept = {one.record.name for one in found if one.generation > dead.get(one.record.scope, 0)}
            stale = [name for name, _, _ in self._index.entries() if name not in kept]
            for name in stale:
                self._index.discard(name)
        for scope in self._scopes.scopes:
            shelf.scopes.open(scope).filed = True
        adopted = []
        for one in sorted(found, key=lambda one: one.generation):
            record = one.record
            if one.generation <= self._scopes.dead.get(record.scope, 0):
                shelf.give_up(one.offset, record.size)
                continue
            adopted.append(shelf.adopt(record, one.offset))
        shelf.adopted(adopted)
        shelf.counters["adopted"] = len(adopted)
        if adopted:
            size = sum(entry.size for entry in adopted)
            log.info("node %s has found %d values of its former life, %d bytes", self.node_id, len(adopted), size)

    def _make_handlers(self) -> dict[type, Callable[[NodeLane, NodeSession, Any], Any]]:
        puts, gets, calls, peers = self._puts, self._gets, self._calls, self._peers
        return {
            Get: gets.get,
            Put: puts.put,
            Offer: puts.offer,
            Slice: puts.slice,
            Seal: puts.seal,
            Abandon: lambda lane, session, message: puts.abandon(session, message),
            Read: gets.read,
            Return: lambda lane, session, message: gets.give_back(session, message),
            Damaged: lambda lane, session, message: gets.damaged(session, message),
            Exists: calls.exists,
            Pin: calls.pin,
            Introduce: lambda lane, session, message: calls.introduce(session, message),
            Listing: calls.listing,
            Verify: calls.verify,
            Remove: lambda lane, session, message: peers.remove(lane, session, message, calls),
            Invalidate: peers.invalidate,
            Prefetch: peers.prefetch,
            Drain: peers.drain,
            Missed: peers.missed.answer,
            Trace: lambda lane, session, message: setattr(lane, "trace", message.context),
            StatRequest: lambda lane, session, message: lane.send(self.stat()),
        }

    def _welcome(self, caller: Caller, proof: bytes) -> Welcome:
        here = caller.trusted and bool(self._unix_address)
        return Welcome(
            node_id=self.node_id,
            salt=caller.salt,
            trusted=caller.trusted,
            proof=proof,
            max_value_bytes=min(self.custody.shelf.capacity, caller.quota_bytes or self.custody.shelf.capacity),
            boot=self._boot if here else "",
            local_address=self._unix_address if here else "",
            arena_path=self._memory.path if here else "",
            arena_inode=self._memory.inode if here else 0,
            index_path=self._index_path if here and self._index is not None else "",
            index_inode=self._index.inode if here and self._index is not None else 0,
        )

    def _tick(self) -> None:
        try:
            self._tick_until_stopped()
        except BaseException as error:
            # Without its clock nothing would ever expire again: better an end that a supervisor sees.
            self.failure = error
            raise

    def _tick_until_stopped(self) -> None:
        while not self._stopping.wait(TICK_S):
            try:
                self._tick_once()
            except AnabranchError as error:
                # A bug, or a tier that is broken: leases must end all the same.
                self._broken = str(error)
                log.exception("node %s: %s", self.node_id, error)

    def _tick_once(self) -> None:
        custody = self.custody
        with custody.lock:
            over = custody.expire(custody.now())
            custody.shelf.catch_up(LISTED_AT_ONCE)
            custody.shelf.drain_reclaim(RECLAIMED_AT_ONCE)
            stuck = [lane for put in over if isinstance(put.session, NodeSession) for lane in put.session.lanes]
            busy = any(item.writing for put in over for item in put.items)
        for lane in stuck if busy else ():
            lane.shut()
        self._tiers.tick()
        self._peers.directory.changed()
