"""Who holds which value or block. Soft state: everything here is what nodes announced, and can be announced again.

Connections are opaque names. `handle(connection, message, now)` → replies; time is the caller's. A node is listened
to while its connection is open and it was heard within `ttl_s`; it is vouched for once it announced everything.

**See also** `store.members` for the nodes' states, `store.repair` for what follows the loss of one.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator

from anabranch.core.errors import WireError
from anabranch.core.messages import Message
from anabranch.store.members import Member, Members
from anabranch.store.messages import (
    Announce,
    Heartbeat,
    Holders,
    Holding,
    Join,
    ListNodes,
    Lookup,
    NameTaken,
    NodeList,
    Places,
    Resync,
    Where,
)
from anabranch.store.repair import Recovery
from anabranch.store.values.contracts import KeyTable
from anabranch.store.values.key_table import ALL_TIERS, HOLDERS, DictKeyTable
from anabranch.store.values.scope import NAME_BYTES

TIER_BITS = {"dram": 1, "ssd": 2, "backing": 4}
TIER_OF = {bits: next(tier for tier, bit in TIER_BITS.items() if bits & bit) for bits in range(1, 8)}
STEP_NAMES = 4096
"""Names worked on at once: about a millisecond."""
FEW_NODES = 32
Replies = list[Message]


class Directory:
    """One table for the keys of all nodes. `handle` does a message's work at once, `steps` in small pieces between
    which other messages may be handled; `tick` does in small pieces what follows from the passing of time."""

    def __init__(self, ttl_s: float, now: float, make_table: Callable[[], KeyTable] = DictKeyTable) -> None:
        self._ttl_s = ttl_s
        self._born = now
        self._make_table = make_table
        self.table = make_table()
        self.members = Members(ttl_s, now)
        self.counters: Counter[str] = Counter()
        self._recovery = Recovery(self.members, self.counters)
        self._audited = False
        self._hints: list[tuple[Hashable, Message]] = []

    def handle(self, connection: Hashable, message: Message, now: float) -> Replies:
        return [reply for replies in self.steps(connection, message, now) for reply in replies]

    def steps(self, connection: Hashable, message: Message, now: float) -> Iterator[Replies]:
        """Raises WireError for names that are none, Overloaded for too many nodes."""
        if isinstance(message, Where):
            yield from self._where(message, now)
            return
        if isinstance(message, ListNodes):
            yield [self._list_nodes(message, now)]
            return
        if isinstance(message, Join):
            rival = self.members.rival(connection, message, now)
            if rival is not None:
                self.counters["names_taken"] += 1
                yield [NameTaken(address=rival.join.address)]
                return
            self.members.join(connection, message, now)
            self.counters["joins"] += 1
            return
        member = self.members.get(connection)
        if member is None:
            return
        self.members.hear(member, now)
        if isinstance(message, Announce):
            yield from self._announce(connection, member, message, now)
        elif isinstance(message, Heartbeat):
            yield self._heartbeat(member, message, now)
        elif isinstance(message, Lookup):
            yield [self.lookup(connection, message, now)]

    def gone(self, connection: Hashable, now: float | None = None) -> None:
        """The connection closed: what the node held cannot be fetched."""
        self.members.gone(connection, self._born if now is None else now)

    def expect(self, node_ids: set[str]) -> None:
        """Exactly these nodes exist: until each of them has announced everything, absence proves nothing."""
        self.members.expect(node_ids)
        self.members.trust()

    def tick(self, now: float) -> tuple[list[tuple[Hashable, Message]], bool]:
        """One small piece of what is due: (messages to send, there is more to do at once)."""
        self.counters["given_up"] += self.members.expire(now)
        if self.members.dead and not self.members.numbers_in_use:
            self.table = self._make_table()
            self._recovery.reset()
            self.members.bury(set(self.members.dead))
        self.members.refresh(now)
        if not self._audited and self.members.sure(now):
            self._audited = True
            self._recovery.audit()
        more = self._recover(now)
        hints, self._hints = self._hints, []
        return hints, more

    def lookup(self, asker: Hashable, message: Lookup, now: float) -> Holders:
        """Runs of the asked keys at every other node, up to the first key that nobody holds."""
        self.counters["lookups"] += 1
        self.members.refresh(now)
        others = [
            member
            for connection, member in self.members.items()
            if connection != asker and member.join.layout == message.layout and now - member.heard <= self._ttl_s
        ]
        complete = now - self._born >= self._ttl_s and all(member.synced for member in others)
        runs: dict[int, list[tuple[int, int, str]]] = {
            member.number: [] for member in others if member.number in self.members.speaking
        }
        for at in range(0, len(message.keys), STEP_NAMES):
            keys = message.keys[at : at + STEP_NAMES]
            if not self._extend_runs(runs, at, self.table.places(_checked(b"".join(keys)))):
                break
        holdings = [
            Holding(member.join.node_id, member.join.address, own)
            for member in others
            if (own := runs.get(member.number))
        ]
        return Holders(op=message.op, holdings=holdings, complete=complete)

    def census(self) -> dict[str, int]:
        """`blocks`: keys known to be held, each node's counted."""
        return {
            "nodes": len(self.members),
            "synced_nodes": sum(member.synced for member in self.members),
            "blocks": sum(member.keys for member in self.members),
        }

    # --- answers ------------------------------------------------------------------------------------------------

    def _where(self, message: Where, now: float) -> Iterator[Replies]:
        self.counters["wheres"] += 1
        names, rows = _checked(message.names), b""
        for at in range(0, len(names), STEP_NAMES * NAME_BYTES):
            if at:
                yield []
            clean = self.members.refresh(now)
            part = self.table.places(names[at : at + STEP_NAMES * NAME_BYTES])
            part = part if clean else self._spoken(part)
            rows = part if not rows else rows + part
            if message.run and (held := _run(part)) * HOLDERS * 2 < len(part):
                rows = rows[: len(rows) - len(part) + held * HOLDERS * 2]
                break
        self.members.refresh(now)
        members = self.members.addresses
        if len(members) > FEW_NODES:
            numbers = {(entry - 1) >> 3 for entry in memoryview(rows).cast("H") if entry}
            members = {number: members[number] for number in numbers if number in members}
        yield [Places(op=message.op, places=rows, members=members, unknown=not self.members.sure(now))]

    def _spoken(self, rows: bytes) -> bytes:
        """Only the entries that may be named, each name's zeros last."""
        speaking = self.members.speaking
        entries, out = memoryview(rows).cast("H"), array("H", bytes(len(rows)))
        for at in range(0, len(entries), HOLDERS):
            free = at
            for entry in entries[at : at + HOLDERS]:
                if not entry:
                    break
                if (entry - 1) >> 3 in speaking:
                    out[free] = entry
                    free += 1
        return out.tobytes()

    def _list_nodes(self, message: ListNodes, now: float) -> NodeList:
        self.members.refresh(now)
        rows = [member.row for member in self.members if now - member.heard <= self._ttl_s]
        return NodeList(op=message.op, nodes=rows, unknown=not self.members.sure(now))

    def _extend_runs(self, runs: dict[int, list[tuple[int, int, str]]], first: int, rows: bytes) -> bool:
        """False at the first key that none of these nodes holds."""
        entries = memoryview(rows).cast("H")
        for at in range(0, len(entries), HOLDERS):
            found = False
            for entry in entries[at : at + HOLDERS]:
                own = runs.get((entry - 1) >> 3) if entry else None
                if own is not None:
                    found = True
                    _extend(own, first + at // HOLDERS, TIER_OF[(entry - 1) & 7])
            if not found:
                return False
        return True

    # --- what nodes say -----------------------------------------------------------------------------------------

    def _announce(self, connection: Hashable, member: Member, message: Announce, now: float) -> Iterator[Replies]:
        if message.reset:
            if member.resetting or member.synced or member.keys:
                self.members.renumber(member)
            member.resetting, member.synced = True, False
            self.members.changed()
        elif message.seq != member.seq + 1:
            self.counters["gaps"] += 1
            yield self._resync(member, now)
            return
        elif not (member.synced or member.resetting):
            yield self._resync(member, now)
            return
        member.seq = message.seq
        for add, bits, names in _changes(message):
            for at in range(0, len(names), STEP_NAMES * NAME_BYTES):
                part = names[at : at + STEP_NAMES * NAME_BYTES]
                if self.members.get(connection) is not member:
                    return
                if add:
                    # A name has room for few numbers: the void ones must not take it from this one.
                    for number in self.members.void(member):
                        self.table.discard(number, ALL_TIERS, part)
                    member.keys += self.table.add(member.number, bits, part)
                else:
                    member.keys -= self.table.discard(member.number, bits, part)
                    self._recovery.removed(part, self.table)
                yield []
        for count, names in message.wanted.items():
            self._recovery.want(count, _checked(names), self._make_table)
        if message.last and member.resetting and self.members.get(connection) is member:
            member.resetting, member.synced = False, True
            self.members.changed()
            self.members.expire(now)
            while len(self.table) <= STEP_NAMES and self._recover(now):
                pass

    def _recover(self, now: float) -> bool:
        self.members.refresh(now)
        hints, more = self._recovery.step(self.table, now)
        self._hints += hints
        return more

    def _heartbeat(self, member: Member, message: Heartbeat, now: float) -> Replies:
        member.free_bytes, member.total_bytes = message.free_bytes, message.total_bytes
        member.accepts = message.accepts
        current = message.seq == member.seq and (member.synced or member.resetting)
        return [] if current else self._resync(member, now)

    def _resync(self, member: Member, now: float) -> Replies:
        """Ask for everything, but not again while the answer may be on its way."""
        member.resetting = member.synced = False
        self.members.changed()
        if now - member.asked < self._ttl_s / 2:
            return []
        member.asked = now
        self.counters["resyncs"] += 1
        return [Resync()]


def _changes(message: Announce) -> Iterable[tuple[bool, int, bytes]]:
    """(added?, tier bits, names) in the order that counts: what is removed first."""
    for add, lists, packed in (
        (False, message.removed, message.removed_names),
        (True, message.added, message.added_names),
    ):
        for tier, keys in lists.items():
            if tier in TIER_BITS:
                yield add, TIER_BITS[tier], _checked(b"".join(keys))
        for tier, names in packed.items():
            if tier in TIER_BITS:
                yield add, TIER_BITS[tier], _checked(names)


def _checked(names: bytes) -> bytes:
    if len(names) % NAME_BYTES:
        raise WireError(f"names are {NAME_BYTES} bytes each; {len(names)} bytes are no whole number of them")
    return names


def _run(rows: bytes) -> int:
    """How many names come before the first that nobody holds."""
    firsts = memoryview(rows).cast("H")[::HOLDERS].tolist()
    return firsts.index(0) if 0 in firsts else len(firsts)


def _extend(runs: list[tuple[int, int, str]], index: int, tier: str) -> None:
    if runs:
        first, count, last = runs[-1]
        if first + count == index and last == tier:
            runs[-1] = (first, count + 1, tier)
            return
    runs.append((index, 1, tier))
