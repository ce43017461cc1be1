"""How values leave a node: whole behind an answer, slice by slice under a lease, or as places in the arena."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence

from anabranch.core.errors import WireError
from anabranch.core.faults import Faults
from anabranch.core.wire import encode
from anabranch.store.values.entries import Entry, ScopeState
from anabranch.store.values.live.node_custody import Custody, NodeSession, split_names
from anabranch.store.values.live.node_lane import NodeLane
from anabranch.store.values.messages import INLINE_BYTES, TIERS, Damaged, Found, Get, Read, Return
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.reads import Lease
from anabranch.store.values.slices import SLICE_BYTES, slice_sums

COPIED_BYTES = 64 << 10
"""Answers up to this size are copied at once, under the lock; larger ones are held while they are sent."""
FOUND_AT_ONCE = 256
"""Names that are looked up before others get the lock."""
BY_REFERENCE_BYTES = 64 << 10
"""Items from this size on go by reference: below, the copy costs less than the call."""
_LENGTH = struct.Struct("<Q")
_OVER = _LENGTH.pack(0)
OK, MISSING, DENIED = Outcome.OK, Outcome.MISSING, Outcome.DENIED

Loaded = tuple[Outcome, int, Entry | None]
"""Outcome, index of the tier, and the entry, with a reference that is the caller's to give back."""
Load = Callable[[Sequence[tuple[ScopeState, bytes]]], list[Loaded]]


class _Answer:
    """`data`: bytes that follow. `lease`: instead of them, the entries to send from, held until it ends."""

    __slots__ = ("data", "found", "lease")

    def __init__(self, found: Found, data: list[bytes], lease: Lease | None) -> None:
        self.found = found
        self.data = data
        self.lease = lease


class GetDesk:
    """`load` brings values that are not in DRAM there (None: there is nothing else); it is called outside the lock.
    `used` is called under it with who read which entries."""

    def __init__(
        self,
        custody: Custody,
        faults: Faults,
        load: Load | None,
        used: Callable[[NodeSession, list[Entry]], None],
    ) -> None:
        self._custody = custody
        self._faults = faults
        self._load = load
        self._used = used

    def get(self, lane: NodeLane, session: NodeSession, message: Get) -> int:
        """Returns the lease that holds what was sent by reference, 0 if none does: it ends with the lane's next
        message."""
        names = split_names(message.names)
        custody = self._custody
        answer = None
        with custody.lock:
            custody.ledger.asked("get", session.caller.tenant, len(names))
            scopes = custody.scopes_of(session, message.scopes, len(names))
            if scopes is None:
                answer = _Answer(Found(op=message.op, outcomes=bytes([DENIED]) * len(names)), [], None)
                custody.ledger.answered("get", session.caller.tenant, DENIED, items=len(names))
            elif len(names) <= FOUND_AT_ONCE:
                entries, outcomes = self._find(scopes, names, message.run)
                if self._load is None or len(entries) == len(names):
                    answer = self._answer(session, message, entries, outcomes, bytes(len(entries)))
        if answer is None and scopes is not None:
            answer = self._get_held(session, message, scopes, names)
        return self._send(lane, message, answer) if answer is not None else 0

    def read(self, lane: NodeLane, session: NodeSession, message: Read) -> None:
        """No lock: a lease that ends meanwhile shows in the slice's sum."""
        lease = self._custody.reads.get(session, message.lease)
        if lease is None:
            lane.send_pages(_OVER, -1, self._custody.memory.data, ())
            return
        if not 0 <= message.item < len(lease.entries):
            raise WireError(f"lease {message.lease} has no item {message.item}")
        entry = lease.entries[message.item]
        at = message.slice * SLICE_BYTES
        if not 0 <= at < entry.size:
            raise WireError(f"item {message.item} has no slice {message.slice}")
        length = min(SLICE_BYTES, entry.size - at)
        if self._faults.at("node.read.slice") == "flip":
            data = bytearray(self._custody.memory.data[entry.offset + at : entry.offset + at + length])
            data[0] ^= 1
            lane.send_raw([_LENGTH.pack(length), data])
            return
        memory = self._custody.memory
        lane.send_pages(_LENGTH.pack(length), memory.fd, memory.data, ((entry.offset + at, length),))

    def give_back(self, session: NodeSession, message: Return) -> None:
        with self._custody.lock:
            self._custody.reads.give_back(session, message.lease)
            self._custody.notice()

    def damaged(self, session: NodeSession, message: Damaged) -> None:
        """Somebody received wrong bytes twice: look whether they are wrong here."""
        custody = self._custody
        lease = custody.reads.get(session, message.lease)
        if lease is None:
            return
        for item in message.items:
            if not 0 <= item < len(lease.entries):
                raise WireError(f"lease {message.lease} has no item {item}")
            self.check(lease.entries[item])

    def check(self, entry: Entry) -> bool:
        """Compare a held value with its sums; a damaged one is dropped."""
        custody = self._custody
        view = custody.memory.data[entry.offset : entry.offset + entry.size]
        if tuple(slice_sums(view) if entry.size else ()) == entry.sums:
            return True
        with custody.lock:
            if not entry.removed:
                custody.shelf.counters["damaged"] += 1
                custody.shelf.drop(entry)
            custody.notice()
        return False

    # --- parts ----------------------------------------------------------------------------------------------------

    def _find(
        self, scopes: ScopeState | list[ScopeState], names: list[bytes], run: bool
    ) -> tuple[list[Entry], bytearray]:
        """Under the lock: what is in DRAM, and an outcome for each name."""
        entries: list[Entry] = []
        outcomes = bytearray(len(names))
        one = scopes.entries if isinstance(scopes, ScopeState) else None
        for i, name in enumerate(names):
            entry = one.get(name) if one is not None else scopes[i].entries.get(name)  # type: ignore[index]
            if entry is not None:
                entries.append(entry)
                continue
            outcomes[i] = MISSING
            if run:
                outcomes[i:] = bytes([MISSING]) * (len(names) - i)
                break
        return entries, outcomes

    def _get_held(
        self, session: NodeSession, message: Get, scopes: ScopeState | list[ScopeState], names: list[bytes]
    ) -> _Answer:
        """Many values, or some that may be in other tiers: each is held as it is found."""
        wanted = [(scopes if isinstance(scopes, ScopeState) else scopes[i], name) for i, name in enumerate(names)]
        found: list[Loaded] = []
        rest = MISSING
        for at in range(0, len(wanted), FOUND_AT_ONCE):
            part = wanted[at : at + FOUND_AT_ONCE]
            found += self._load(part) if self._load is not None else self._hold(part)
            if message.run and any(entry is None for _, _, entry in found[at:]):
                break
            if all(outcome is Outcome.FULL for outcome, _, _ in found[at:]):
                rest = Outcome.FULL
                break
        custody = self._custody
        with custody.lock:
            entries: list[Entry] = []
            outcomes = bytearray([rest]) * len(names)
            tiers = bytearray()
            ended = False
            for i, (outcome, tier, entry) in enumerate(found):
                if not ended and entry is not None and not entry.removed:
                    outcomes[i] = OK
                    entries.append(entry)
                    tiers.append(tier)
                    continue
                if entry is not None:
                    custody.shelf.release(entry)
                outcomes[i] = MISSING if ended or outcome is OK else outcome
                ended = ended or message.run
            answer = self._answer(session, message, entries, outcomes, bytes(tiers), held=True)
            if answer.lease is None:
                for entry in reversed(entries):
                    custody.shelf.release(entry)
            custody.notice()
        return answer

    def _hold(self, wanted: Sequence[tuple[ScopeState, bytes]]) -> list[Loaded]:
        found: list[Loaded] = []
        with self._custody.lock:
            for scope, name in wanted:
                entry = scope.entries.get(name)
                if entry is not None:
                    self._custody.shelf.hold(entry)
                found.append((OK if entry is not None else MISSING, 0, entry))
        return found

    def _answer(
        self,
        session: NodeSession,
        message: Get,
        entries: list[Entry],
        outcomes: bytearray,
        tiers: bytes,
        *,
        held: bool = False,
    ) -> _Answer:
        """Under the lock. `held`: the entries have a reference each, which a lease takes over."""
        custody = self._custody
        shelf = custody.shelf
        sizes = [entry.size for entry in entries]
        total = sum(sizes)
        for entry in entries:
            shelf.touch(entry)
        self._used(session, entries)
        self._count(session, outcomes, tiers, sizes)
        lease: Lease | None = None
        data: list[bytes] = []
        inline = not message.views and total <= min(message.limit, INLINE_BYTES)
        if inline and total <= COPIED_BYTES:
            arena = custody.memory.data
            data = [bytes(arena[entry.offset : entry.offset + entry.size]) for entry in entries]
        elif entries:
            lease = custody.reads.grant(session, entries, custody.now(), views=message.views, held=held)
        leased = lease is not None and not inline
        found = Found(
            op=message.op,
            outcomes=bytes(outcomes),
            sizes=sizes,
            sums=list(entries[0].sums) if len(entries) == 1 else [sum_ for entry in entries for sum_ in entry.sums],
            offsets=[entry.offset for entry in entries] if message.views else [],
            tiers=tiers,
            inline=inline and bool(entries),
            lease=lease.number if lease is not None and leased else 0,
            lease_s=max(0.0, lease.until - custody.now()) if lease is not None and leased else 0.0,
        )
        return _Answer(found, data, lease)

    def _count(self, session: NodeSession, outcomes: bytearray, tiers: bytes, sizes: list[int]) -> None:
        ledger, tenant = self._custody.ledger, session.caller.tenant
        if len(outcomes) == 1 and sizes:
            ledger.answered("get", tenant, OK, TIERS[tiers[0]], size=sizes[0])
            return
        by_tier: Counter[int] = Counter()
        for tier, size in zip(tiers, sizes, strict=True):
            by_tier[tier] += size
        for tier, items in Counter(tiers).items():
            ledger.answered("get", tenant, OK, TIERS[tier], items=items, size=by_tier[tier])
        for outcome, items in Counter(outcomes).items():
            if outcome != OK:
                ledger.answered("get", tenant, outcome, items=items)

    def _send(self, lane: NodeLane, message: Get, answer: _Answer) -> int:
        found, lease = answer.found, answer.lease
        if lease is None or not found.inline:
            lane.send(found, answer.data)
            return 0
        memory = self._custody.memory
        ranges = [(entry.offset, entry.size) for entry in lease.entries if entry.size]
        if sum(found.sizes) >= BY_REFERENCE_BYTES * len(ranges):
            lane.send_pages(encode(found), memory.fd, memory.data, ranges)
        else:
            lane.send(found, [memory.data[start : start + length] for start, length in ranges])
        return lease.number
