"""Hints to survivors to make lost replicas again: gathered by sender and target, few under way at a time, watched until
they are followed."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable

import msgspec

from anabranch.core.messages import Message
from anabranch.store.members import Member, Members
from anabranch.store.messages import REPAIR_NAMES, Repair
from anabranch.store.values.contracts import KeyTable
from anabranch.store.values.key_table import HOLDERS
from anabranch.store.values.scope import NAME_BYTES

UNDER_WAY = 4
"""Hints that a survivor has at a time: what is lost may be more than it can copy in a minute."""
LOOK_S = 0.25
LOOKS = 4
"""Hints looked at in one step."""
RECHECK_S = 10.0
"""A hint without progress for this long is not followed: the target was lost, or is full."""
TRIES = 3


class Owed(msgspec.Struct, frozen=True):
    """Names to plan for; `tries`: hints that were given for them in vain."""

    tries: int
    names: bytes


class _Hint(msgspec.Struct):
    source: str
    target: str
    tries: int
    names: bytes
    look: float = 0.0
    due: float = 0.0
    left: int = 0


class Hints:
    """Time is the caller's. Nodes are named by their ids: a hint outlives a connection."""

    def __init__(self, members: Members, counters: Counter[str]) -> None:
        self._members = members
        self._counters = counters
        self._open: dict[tuple[str, str, int], list[bytes]] = defaultdict(list)
        self._ready: dict[str, deque[_Hint]] = defaultdict(deque)
        self._under_way: dict[str, list[_Hint]] = defaultdict(list)

    def __len__(self) -> int:
        """Hints that are not followed yet."""
        return sum(map(len, self._ready.values())) + sum(map(len, self._under_way.values()))

    def add(self, source: str, target: str, tries: int, name: bytes) -> None:
        names = self._open[source, target, tries]
        names.append(name)
        if len(names) == REPAIR_NAMES:
            self._close(source, target, tries)

    def flush(self) -> None:
        for key in list(self._open):
            self._close(*key)

    def tick(self, table: KeyTable, now: float) -> tuple[list[tuple[Hashable, Message]], list[Owed]]:
        """What to send, and names for which a hint was given in vain."""
        again = self._look(table, now)
        messages: list[tuple[Hashable, Message]] = []
        for source, ready in list(self._ready.items()):
            while ready and len(self._under_way[source]) < UNDER_WAY:
                hint = ready.popleft()
                sender, target = self._members.named(hint.source), self._members.named(hint.target)
                if sender is None or target is None:
                    again.append(Owed(hint.tries, hint.names))
                    continue
                hint.look, hint.due, hint.left = now + LOOK_S, now + RECHECK_S, len(hint.names) // NAME_BYTES
                self._under_way[source].append(hint)
                message = Repair(names=hint.names, target=hint.target, address=target.join.address)
                messages.append((self._members.connection(sender), message))
                self._counters["repairs"] += hint.left
            if not ready:
                del self._ready[source]
        return messages, again

    def _close(self, source: str, target: str, tries: int) -> None:
        names = self._open.pop((source, target, tries))
        self._ready[source].append(_Hint(source, target, tries, b"".join(names)))

    def _look(self, table: KeyTable, now: float) -> list[Owed]:
        again: list[Owed] = []
        looked = 0
        for source, hints in list(self._under_way.items()):
            for hint in [hint for hint in hints if hint.look <= now]:
                if looked == LOOKS:
                    return again
                looked += 1
                hint.look = now + LOOK_S
                target = self._members.named(hint.target)
                lacking = hint.names if target is None else _lacking(hint.names, target, table)
                left = len(lacking) // NAME_BYTES
                if left < hint.left:
                    hint.left, hint.due = left, now + RECHECK_S
                if left and now < hint.due and target is not None and self._members.named(source) is not None:
                    continue
                hints.remove(hint)
                if left and hint.tries + 1 < TRIES:
                    again.append(Owed(hint.tries + 1, lacking))
                else:
                    self._counters["repairs_given_up"] += left
            if not hints:
                del self._under_way[source]
        return again


def _lacking(names: bytes, target: Member, table: KeyTable) -> bytes:
    """Those of the names that the target does not hold."""
    rows = memoryview(table.places(names)).cast("H")
    own = {1 + (target.number << 3 | bits) for bits in range(1, 8)}
    columns = zip(*(rows[column::HOLDERS].tolist() for column in range(HOLDERS)), strict=True)
    lacking = [i for i, entries in enumerate(columns) if own.isdisjoint(entries)]
    if len(lacking) * NAME_BYTES == len(names):
        return names
    return b"".join([names[i * NAME_BYTES : (i + 1) * NAME_BYTES] for i in lacking])
