"""Prefix look-ups and the loads that follow them: acquire → (directory) → plan → segments → usable prefix.

One acquire: the resident run is ready at once. What follows it comes from this node's SSD and from peers, in as few
segments as `policy.paths` can find. A second acquire whose next block is being loaded already waits for that load
and starts over. A load ends when every segment ended; segments are stopped at the deadline. What is usable is the
longest run of good blocks; blocks behind a hole are freed unpublished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from anabranch.policy.paths import OWN_SSD, Source, longest_runs
from anabranch.store.actions import (
    FetchPeer,
    NodeAction,
    ReadSsd,
    SegmentEnded,
    SegmentLayers,
    SendDirectory,
    StopSegment,
)
from anabranch.store.leases import Leases
from anabranch.store.messages import Holders, Holding, Lookup
from anabranch.store.slots import Named, SlotBook
from anabranch.store.ssd_index import SsdIndex

SUSPECT_S = 2.0
LOOKUP_S = 0.5


class Want(msgspec.Struct):
    """One acquire under way. `requester`: a session; `until`: when the answer and the load must be over."""

    requester: bytes
    op: int
    keys: list[bytes]
    tenant: bytes
    load: bool
    peers: bool
    until: float
    ready: list[int] = []


class Segment(msgspec.Struct):
    node: str
    first: int
    slots: list[int]
    ssd_slots: list[int] = []
    layers: int = 0
    sums: list[int | None] | None = None
    reason: str = ""


class Load(msgspec.Struct):
    want: Want
    keys: list[bytes]
    slots: list[int]
    segments: list[Segment]
    layers: int = 0
    reason: str = ""


class Reply(msgspec.Struct, frozen=True):
    """What the requester is told: exactly one `Found`-like answer, then, if anything is loading, progress and end."""

    want: Want
    kind: str  # "acquired" | "layers" | "ended"
    loading: list[int] = []
    layers: int = 0
    usable: int = 0
    tiers: list[str] = []
    reason: str = ""


class LoadBook:
    """All look-ups and loads of one node. `reply` and `act` are called while an event is handled."""

    def __init__(
        self,
        book: SlotBook,
        ssd: SsdIndex | None,
        layers: int,
        layout: bytes,
        counters: Counter[str],
        act: Callable[[NodeAction], None],
        reply: Callable[[Reply], None],
    ) -> None:
        self._book = book
        self._ssd = ssd
        self._layers = layers
        self._layout = layout
        self._counters = counters
        self._act = act
        self._reply = reply
        self._ids = 0
        self.loads: dict[int, Load] = {}
        self.lookups: dict[int, Want] = {}
        self._behind: dict[int, list[Want]] = {}
        self._loading: dict[bytes, int] = {}
        self._ends: Leases[int] = Leases()
        self._suspects: dict[str, float] = {}
        self.directory_up = False
        self.ssd_up = True

    def acquire(self, want: Want, now: float) -> None:
        """Find the ready run, then look further if the want says so."""
        want.ready = self._book.acquire(want.requester, want.keys, want.tenant)
        rest = want.keys[len(want.ready) :]
        if not rest or not want.load or want.until <= now:
            self._answer(want)
            return
        shared = self._loading.get(rest[0])
        if shared is not None:
            self._book.free(want.requester, want.ready)
            want.ready = []
            self._behind.setdefault(shared, []).append(want)
            return
        on_disk = len(self._on_disk(rest, want.tenant))
        if on_disk < len(rest) and want.peers and self.directory_up:
            self._ids += 1
            self.lookups[self._ids] = want
            self._ends.grant(self._ids, min(want.until, now + LOOKUP_S))
            self._act(SendDirectory(Lookup(op=self._ids, keys=rest, layout=self._layout)))
            return
        self._plan(want, [], now)

    def found(self, holders: Holders, now: float) -> None:
        """The directory answered."""
        want = self.lookups.pop(holders.op, None)
        if want is None:
            return
        self._ends.end(holders.op)
        fresh = [h for h in holders.holdings if self._suspects.get(h.node_id, 0.0) <= now]
        self._plan(want, fresh, now)

    def cancel(self, requester: bytes, op: int, reason: str = "cancelled") -> None:
        """Stop early; the answer or the end still comes."""
        for name, want in list(self.lookups.items()):
            if (want.requester, want.op) == (requester, op):
                del self.lookups[name]
                self._ends.end(name)
                self._answer(want)
        for waiting in self._behind.values():
            for want in [w for w in waiting if (w.requester, w.op) == (requester, op)]:
                waiting.remove(want)
                self._answer(want)
        for name, load in list(self.loads.items()):
            if (load.want.requester, load.want.op) == (requester, op):
                self._stop(name, reason)

    def drop(self, requester: bytes) -> None:
        """The requester is gone: stop its loads, forget its look-ups."""
        for name in [n for n, want in self.lookups.items() if want.requester == requester]:
            del self.lookups[name]
            self._ends.end(name)
        for waiting in self._behind.values():
            waiting[:] = [want for want in waiting if want.requester != requester]
        for name in [n for n, load in self.loads.items() if load.want.requester == requester]:
            self._stop(name, "requester gone")

    def layers_ready(self, event: SegmentLayers) -> None:
        load = self.loads.get(event.load)
        if load is None:
            return
        load.segments[event.segment].layers = event.layers
        layers = min(segment.layers for segment in load.segments)
        if layers > load.layers:
            load.layers = layers
            self._reply(Reply(load.want, "layers", layers=layers))

    def segment_ended(self, event: SegmentEnded, now: float) -> None:
        load = self.loads.get(event.load)
        if load is None or load.segments[event.segment].sums is not None:
            return
        segment = load.segments[event.segment]
        segment.sums, segment.reason = event.sums, event.reason
        load.reason = load.reason or event.reason
        self._counters["integrity_errors"] += len(event.corrupt)
        for index in event.corrupt:
            if segment.node == OWN_SSD and self._ssd is not None:
                self._ssd.remove(load.keys[segment.first + index])
        if event.reason and segment.node != OWN_SSD:
            self._suspects[segment.node] = now + SUSPECT_S
            self._counters["fetch_failures"] += 1
        if all(part.sums is not None for part in load.segments):
            self._finish(event.load, load, now)

    def tick(self, now: float) -> None:
        for name in self._ends.expired(now):
            if name in self.loads:
                self._counters["load_deadlines"] += 1
                self._stop(name, "deadline passed")
            elif (want := self.lookups.pop(name, None)) is not None:
                self._counters["lookup_timeouts"] += 1
                self._plan(want, [], now)
        for waiting in self._behind.values():
            for want in [w for w in waiting if w.until <= now]:
                waiting.remove(want)
                self._answer(want)

    # --- planning -----------------------------------------------------------------------------------------------

    def _on_disk(self, keys: list[bytes], tenant: bytes) -> list[int]:
        return self._ssd.run(keys, tenant) if self._ssd is not None and self.ssd_up else []

    def _plan(self, want: Want, holdings: list[Holding], now: float) -> None:
        rest = want.keys[len(want.ready) :]
        on_disk = self._on_disk(rest, want.tenant)
        sources = [Source(OWN_SSD, [(0, len(on_disk))])] if on_disk else []
        for holding in holdings:
            tiers = [tier for _, _, tier in holding.runs]
            cost = 2.0 if "ssd" in tiers else 1.0
            sources.append(Source(holding.node_id, _joined(holding.runs), cost))
        plan = longest_runs(len(rest), sources)
        wanted = sum(run.count for run in plan)
        count = min(wanted, self._book.pool.free + self._book.pool.evictable)
        slots = self._book.reserve(want.requester, count) if count else None
        if not slots:
            self._answer(want)
            return
        if count < wanted:
            self._counters["loads_shortened"] += 1
        segments = [
            Segment(run.node, run.first, slots[run.first : run.first + run.count]) for run in plan if run.first < count
        ]
        self._ids += 1
        load = Load(want, rest[:count], slots, segments)
        self.loads[self._ids] = load
        self._ends.grant(self._ids, want.until)
        self._loading.update(dict.fromkeys(load.keys, self._ids))
        self._book.pin(slots)
        self._book.busy.update(slots)
        self._counters["loads"] += 1
        self._reply(Reply(want, "acquired", loading=slots))
        addresses = {holding.node_id: holding.address for holding in holdings}
        for index, segment in enumerate(segments):
            self._start(index, segment, load, on_disk, addresses, now)

    def _start(
        self, index: int, segment: Segment, load: Load, on_disk: list[int], addresses: dict[str, str], now: float
    ) -> None:
        at = slice(segment.first, segment.first + len(segment.slots))
        if segment.node == OWN_SSD and self._ssd is not None:
            segment.ssd_slots = on_disk[at]
            self._ssd.pin(segment.ssd_slots)
            blocks = [self._ssd.blocks[slot] for slot in segment.ssd_slots]
            self._act(ReadSsd(self._ids, index, segment.ssd_slots, blocks, segment.slots))
            return
        wait = max(load.want.until - now, 0.0)
        self._act(
            FetchPeer(self._ids, index, addresses[segment.node], load.keys[at], segment.slots, load.want.tenant, wait)
        )

    def _stop(self, name: int, reason: str) -> None:
        load = self.loads[name]
        load.reason = load.reason or reason
        for index, segment in enumerate(load.segments):
            if segment.sums is None:
                self._act(StopSegment(name, index))

    def _finish(self, name: int, load: Load, now: float) -> None:
        del self.loads[name]
        self._ends.end(name)
        for key in load.keys:
            if self._loading.get(key) == name:
                del self._loading[key]
        self._book.busy.difference_update(load.slots)
        sums = [value for segment in load.segments for value in segment.sums or []]
        usable = next((i for i, value in enumerate(sums) if value is None), len(sums))
        tiers = ["ssd" if s.node == OWN_SSD else "peer" for s in load.segments for _ in s.slots][:usable]
        before = load.want.keys[len(load.want.ready) - 1] if load.want.ready else b""
        for i in range(usable):
            block = Named(load.keys[i], load.keys[i - 1] if i else before, load.want.tenant, sums[i] or 0)
            self._book.publish(load.slots[i], block)
        for tier in tiers:
            self._counters[f"hits_{tier}"] += 1
        self._book.unpin(load.slots)
        reason = "" if usable == len(load.slots) else load.reason or "blocks missing"
        self._reply(Reply(load.want, "ended", usable=usable, tiers=tiers, reason=reason))
        for want in self._behind.pop(name, []):
            self.acquire(want, now)

    def _answer(self, want: Want) -> None:
        self._reply(Reply(want, "acquired"))


def _joined(runs: list[tuple[int, int, str]]) -> list[tuple[int, int]]:
    """Runs of any tier, with neighbours joined."""
    joined: list[tuple[int, int]] = []
    for first, count, _ in sorted(runs):
        if joined and first <= sum(joined[-1]):
            start = joined[-1][0]
            joined[-1] = (start, max(sum(joined[-1]), first + count) - start)
        else:
            joined.append((first, count))
    return joined
