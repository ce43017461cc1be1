"""Who holds which block. Soft state: everything here is what nodes announced, and can be announced again.

Connections are opaque names. `handle(connection, message, now)` → replies; time is the caller's. A node is listened
to while its connection is open and it was heard within `ttl_s`; it is vouched for once it announced everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import msgspec

from anabranch.core.messages import Message
from anabranch.store.messages import Announce, Heartbeat, Holders, Holding, Join, Lookup, Resync

TIER_BITS = {"dram": 1, "ssd": 2}
TIER_OF = {1: "dram", 2: "ssd", 3: "dram"}


class Member(msgspec.Struct):
    """One node. `keys` maps a block key to the bits of its tiers."""

    join: Join
    heard: float
    asked: float = -1e9
    seq: int = 0
    synced: bool = False
    resetting: bool = False
    keys: dict[bytes, int] = {}


class Directory:
    def __init__(self, ttl_s: float, now: float) -> None:
        self._ttl_s = ttl_s
        self._born = now
        self._members: dict[Hashable, Member] = {}
        self.counters: Counter[str] = Counter()

    def handle(self, connection: Hashable, message: Message, now: float) -> list[Message]:
        if isinstance(message, Join):
            self._join(connection, message, now)
            return []
        member = self._members.get(connection)
        if member is None:
            return []
        member.heard = now
        if isinstance(message, Announce):
            return self._announce(member, message, now)
        if isinstance(message, Heartbeat):
            return self._resync(member, now) if not member.synced or message.seq != member.seq else []
        if isinstance(message, Lookup):
            return [self.lookup(connection, message, now)]
        return []

    def gone(self, connection: Hashable) -> None:
        """The connection closed: what the node held cannot be fetched."""
        self._members.pop(connection, None)

    def lookup(self, asker: Hashable, message: Lookup, now: float) -> Holders:
        """Runs of the asked keys at every other node, up to the first key that nobody holds."""
        self.counters["lookups"] += 1
        others = [
            member
            for connection, member in self._members.items()
            if connection != asker and member.join.layout == message.layout and now - member.heard <= self._ttl_s
        ]
        runs: list[list[tuple[int, int, str]]] = [[] for _ in others]
        for i, key in enumerate(message.keys):
            found = False
            for member, own in zip(others, runs, strict=True):
                bits = member.keys.get(key, 0) if member.synced else 0
                if bits:
                    found = True
                    _extend(own, i, TIER_OF[bits])
            if not found:
                break
        holdings = [
            Holding(member.join.node_id, member.join.address, own)
            for member, own in zip(others, runs, strict=True)
            if own
        ]
        complete = now - self._born >= self._ttl_s and all(member.synced for member in others)
        return Holders(op=message.op, holdings=holdings, complete=complete)

    def census(self) -> dict[str, int]:
        return {
            "nodes": len(self._members),
            "synced_nodes": sum(member.synced for member in self._members.values()),
            "blocks": sum(len(member.keys) for member in self._members.values()),
        }

    def _join(self, connection: Hashable, message: Join, now: float) -> None:
        """A node's new connection replaces its former one, and everything said over that."""
        for other, member in list(self._members.items()):
            if member.join.node_id == message.node_id:
                del self._members[other]
        self._members[connection] = Member(message, now)
        self.counters["joins"] += 1

    def _announce(self, member: Member, message: Announce, now: float) -> list[Message]:
        if message.reset:
            member.keys = {}
            member.resetting = True
            member.synced = False
        elif message.seq != member.seq + 1:
            member.resetting = member.synced = False
            self.counters["gaps"] += 1
            return self._resync(member, now)
        elif not (member.synced or member.resetting):
            return self._resync(member, now)
        member.seq = message.seq
        for tier, keys in message.removed.items():
            mask = ~TIER_BITS.get(tier, 0)
            for key in keys:
                if left := member.keys.get(key, 0) & mask:
                    member.keys[key] = left
                else:
                    member.keys.pop(key, None)
        for tier, keys in message.added.items():
            bit = TIER_BITS.get(tier, 0)
            for key in keys:
                member.keys[key] = member.keys.get(key, 0) | bit
        if message.last and member.resetting:
            member.resetting, member.synced = False, True
        return []

    def _resync(self, member: Member, now: float) -> list[Message]:
        """Ask for everything, but not again while the answer may be on its way."""
        member.synced = False
        if now - member.asked < self._ttl_s / 2:
            return []
        member.asked = now
        self.counters["resyncs"] += 1
        return [Resync()]


def _extend(runs: list[tuple[int, int, str]], index: int, tier: str) -> None:
    if runs:
        first, count, last = runs[-1]
        if first + count == index and last == tier:
            runs[-1] = (first, count + 1, tier)
            return
    runs.append((index, 1, tier))
