"""Who holds which slot of a node's arena, and what the slots hold.

Wraps a `SlotPool` with what the pool does not know: the sessions behind the references, tenants, checksums, the
records that go to the arena's table, and what the directory must hear. `take_records` and `take_changes` hand over
what piled up; the driver writes records before it sends any answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from anabranch.core.errors import InvalidInput
from anabranch.paging.pool import SlotPool
from anabranch.transfer.records import COMMITTED, FREE, RESERVED, SlotRecord, owner_of

KEY_BYTES = 32
UNOWNED = 0  # a committed block that lost its name in a restart: any session that used it may keep it


class Changes(msgspec.Struct):
    """Keys that became findable in, or vanished from, one tier. A key is never in both."""

    added: dict[bytes, None] = {}
    removed: dict[bytes, None] = {}

    def add(self, key: bytes) -> None:
        if key in self.removed:
            del self.removed[key]
        else:
            self.added[key] = None

    def remove(self, key: bytes) -> None:
        if key in self.added:
            del self.added[key]
        else:
            self.removed[key] = None


class Named(msgspec.Struct, frozen=True):
    """A committed block. `tenant`: digest; `block_sum` 0: not computed yet."""

    key: bytes
    parent: bytes
    tenant: bytes
    block_sum: int = 0


class SlotBook:
    """Slots of one arena. Not a session: references without a holder ("pins") belong to transfers of this node."""

    def __init__(self, pool: SlotPool, slots: int, counters: Counter[str]) -> None:
        self.pool = pool
        self.slots = slots
        self.held: dict[bytes, Counter[int]] = {}
        self.named: dict[int, Named] = {}
        self.private: dict[int, int] = {}
        self.busy: set[int] = set()
        self.changes = Changes()
        self._records: dict[int, SlotRecord] = {}
        self._counters = counters

    # --- references of sessions ---------------------------------------------------------------------------------

    def open(self, session: bytes) -> None:
        self.held.setdefault(session, Counter())

    def reserve(self, session: bytes, count: int) -> list[int] | None:
        """`count` private slots for the session, or None and nothing changed."""
        slots = self.pool.reserve(count)
        self._forget_evicted()
        if slots is None:
            return None
        owner = owner_of(session)
        for slot in slots:
            self.private[slot] = owner
            self._record(slot)
        self.held[session].update(slots)
        return slots

    def acquire(self, session: bytes, keys: Sequence[bytes], tenant: bytes) -> list[int]:
        """The longest run of `keys` that is resident and the tenant's, with one reference each."""
        run = self.pool.match(keys)
        for i, slot in enumerate(run):
            if self.named[slot].tenant != tenant:
                self._counters["tenant_refusals"] += 1
                run = run[:i]
                break
        slots = self.pool.acquire(keys[: len(run)])
        self.held[session].update(slots)
        return slots

    def free(self, session: bytes, slots: Iterable[int]) -> None:
        """One reference less per mention; what the session does not hold is counted and ignored."""
        held = self.held[session]
        for slot in slots:
            if held[slot] <= 0:
                del held[slot]
                self._counters["bad_frees"] += 1
                continue
            held[slot] -= 1
            if not held[slot]:
                del held[slot]
            self.unpin([slot])

    def reconcile(self, session: bytes, claimed: dict[int, int]) -> list[int]:
        """The session says what it holds. What it does not claim is freed (a grant it never saw); what it claims
        without having been given is returned as lost."""
        held = self.held[session]
        surplus: list[int] = []
        for slot, count in list(held.items()):
            surplus += [slot] * (count - claimed.get(slot, 0))
        lost = [slot for slot, count in claimed.items() if held[slot] < count]
        self.free(session, surplus)
        for slot in lost:
            self.free(session, [slot] * held[slot])
        return lost

    def drop(self, session: bytes) -> None:
        """The session is over: all its references go."""
        for slot, count in self.held.pop(session, Counter[int]()).items():
            self._unref(slot, count)

    # --- pins of the node's own transfers -----------------------------------------------------------------------

    def pin(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.pool.ref(slot)

    def unpin(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._unref(slot, 1)

    # --- names --------------------------------------------------------------------------------------------------

    def commit(self, session: bytes, slot: int, block: Named) -> bool:
        """Publish a slot that the session holds privately; False (counted) if it may not or the key is resident."""
        sound = slot in self.private and slot not in self.busy and len(block.key) == KEY_BYTES
        if not sound or not self.held.get(session, Counter())[slot]:
            self._counters["commits_refused"] += 1
            return False
        return self.publish(slot, block)

    def publish(self, slot: int, block: Named) -> bool:
        """Publish a private slot. False if its key is resident already or impossible; it then stays private."""
        try:
            outcome = self.pool.commit(slot, block.key, block.parent)
        except InvalidInput:
            self._counters["commits_refused"] += 1
            return False
        if outcome == "duplicate":
            self._counters["commit_duplicates"] += 1
            return False
        del self.private[slot]
        self.named[slot] = block
        self.changes.add(block.key)
        self._record(slot)
        self._counters["committed"] += 1
        return True

    def seal(self, slot: int, key: bytes, block_sum: int) -> bool:
        """Record a block's checksum; False if the slot does not hold it any more."""
        block = self.named.get(slot)
        if block is None or block.key != key:
            return False
        self.named[slot] = msgspec.structs.replace(block, block_sum=block_sum)
        self._record(slot)
        return True

    def remove(self, key: bytes) -> None:
        """Forget a name whose bytes are bad."""
        slot = self.pool.remove(key)
        if slot is not None:
            self._unname(slot)
            self._record(slot)

    # --- recovery -----------------------------------------------------------------------------------------------

    def recover(self, records: dict[int, SlotRecord], keep_private: bool) -> list[int]:
        """Take over what a former node process left. Committed blocks must have been verified: those with
        block_sum 0 lose their name. Each slot kept gets one reference (a quarantine), to be given up with `unpin`;
        returns those slots. `keep_private`: a former session may still come back for unnamed ones."""
        kept = [slot for slot, r in records.items() if r.state != FREE and (keep_private or r.state == COMMITTED)]
        for slot in kept:
            self.pool.claim(slot)
            self.private[slot] = records[slot].owner
        for slot in _parents_first({slot: records[slot] for slot in kept}):
            record = records[slot]
            if record.block_sum and self.pool.commit(slot, record.key, record.parent) == "published":
                del self.private[slot]
                # A missing parent is zeros in the table.
                parent = record.parent if any(record.parent) else b""
                self.named[slot] = Named(record.key, parent, record.tenant, record.block_sum)
                self.changes.add(record.key)
        for slot in range(self.slots):
            self._record(slot)
        return kept

    def confirm(self, session: bytes, claimed: dict[int, int]) -> list[int]:
        """A session from before the restart claims slots out of quarantine. Returns what is not confirmed."""
        owner = owner_of(session)
        lost: list[int] = []
        for slot, count in claimed.items():
            if count > 0 and (slot in self.named or self.private.get(slot) in (owner, UNOWNED)):
                self.pool.ref(slot, count)
                self.held[session][slot] += count
            else:
                lost.append(slot)
        return lost

    # --- what the driver and the directory must know ------------------------------------------------------------

    def take_records(self) -> dict[int, SlotRecord]:
        records, self._records = self._records, {}
        return records

    def take_changes(self) -> Changes:
        changes, self.changes = self.changes, Changes(added={}, removed={})
        return changes

    def _unref(self, slot: int, count: int) -> None:
        if self.pool.unref(slot, count):
            self.private.pop(slot, None)
            self._record(slot)

    def _forget_evicted(self) -> None:
        for evicted in self.pool.drain_evicted():
            self._counters["evicted_dram"] += 1
            self._unname(evicted.slot)
            self._record(evicted.slot)

    def _unname(self, slot: int) -> None:
        block = self.named.pop(slot, None)
        if block is not None:
            self.changes.remove(block.key)

    def _record(self, slot: int) -> None:
        generation = self.pool.generation(slot)
        block = self.named.get(slot)
        if block is not None:
            self._records[slot] = SlotRecord(
                COMMITTED, generation, 0, block.block_sum, block.tenant, block.key, block.parent
            )
        elif slot in self.private:
            self._records[slot] = SlotRecord(RESERVED, generation, self.private[slot])
        else:
            self._records[slot] = SlotRecord(FREE, generation)


def _parents_first(records: dict[int, SlotRecord]) -> list[int]:
    """Committed slots, every parent before its children."""
    committed = {r.key: slot for slot, r in records.items() if r.state == COMMITTED}
    order: dict[int, None] = {}
    for slot in committed.values():
        chain: dict[int, None] = {}
        at: int | None = slot
        while at is not None and at not in order and at not in chain:
            chain[at] = None
            at = committed.get(records[at].parent)
        order.update(dict.fromkeys(reversed(chain)))
    return list(order)
