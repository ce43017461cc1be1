"""What follows when a node's keys are void: their entries go, and who is left is told to make lost replicas again.

All in small steps, so that a look-up never waits for a whole pass over the table.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable

import msgspec

from anabranch.core.messages import Message
from anabranch.policy.placement import Candidate, heir, shares
from anabranch.store.hints import Hints, Owed
from anabranch.store.members import Member, Members
from anabranch.store.values.contracts import KeyTable
from anabranch.store.values.key_table import ALL_TIERS, HOLDERS
from anabranch.store.values.scope import NAME_BYTES

STEP_ENTRIES = 1024
PLAN_NAMES = 128
"""Names planned for in one step: less than a millisecond."""
HINTS_S = 0.05


class Recovery:
    """Passes over the table. A name that a void number held, that lives on at fewer nodes than wanted, is repaired:
    one survivor (drawn by the name) is told one target for each missing replica. An *audit* looks at every name."""

    def __init__(self, members: Members, counters: Counter[str]) -> None:
        self._members = members
        self._counters = counters
        self._wanted: KeyTable | None = None
        self._counts: set[int] = set()
        self._auditing = False
        self._hints = Hints(members, counters)
        self._hints_at = -1e9
        self.reset()

    def reset(self) -> None:
        """The table is a new one."""
        self._numbers: set[int] = set()
        self._sweeping: set[int] = set()
        self._at = 0
        self._todo: deque[Owed] = deque()

    def audit(self) -> None:
        """Look at all names once: nodes may have been lost while there was no directory."""
        self._auditing = True

    def want(self, count: int, names: bytes, make_table: Callable[[], KeyTable]) -> None:
        """These names shall be on `count` nodes, whatever their node's setting says; kept while somebody has them."""
        if self._wanted is None:
            self._wanted = make_table()
        self._counts.add(count)
        self._wanted.add(count, 1, names)

    def removed(self, names: bytes, table: KeyTable) -> None:
        """A node does not hold these any more."""
        if self._wanted is not None:
            firsts = memoryview(table.places(names)).cast("H")[::HOLDERS].tolist()
            self._unwant([_name(names, i) for i, entry in enumerate(firsts) if not entry])

    def step(self, table: KeyTable, now: float) -> tuple[list[tuple[Hashable, Message]], bool]:
        """One piece of work: (hints to send, there is more to do)."""
        more = self._work(table)
        if not more:
            self._hints.flush()
        if more and now - self._hints_at < HINTS_S:
            return [], True
        self._hints_at = now
        messages, again = self._hints.tick(table, now)
        self._todo.extend(again)
        return messages, more or bool(again)

    def _work(self, table: KeyTable) -> bool:
        """False: there is none."""
        if self._todo:
            self._plan(self._take(), table)
            return True
        if not self._numbers and not self._begin():
            return False
        if self._replicated:
            names, _ = table.held(self._numbers, self._at, STEP_ENTRIES)
            if names:
                self._todo.append(Owed(0, names))
        self._at = table.sweep(self._sweeping, self._at, STEP_ENTRIES)
        if self._at == 0:
            self._members.bury(self._sweeping)
            self._numbers, self._sweeping = set(), set()
        return True

    def _begin(self) -> bool:
        self._sweeping, self._at = set(self._members.dead), 0
        self._numbers = set(self._sweeping)
        if self._auditing and self._replicated:
            self._numbers |= self._members.speaking.keys()
        self._auditing = False
        return bool(self._numbers)

    def _take(self) -> Owed:
        first = self._todo.popleft()
        rest = first.names[PLAN_NAMES * NAME_BYTES :]
        if rest:
            self._todo.appendleft(msgspec.structs.replace(first, names=rest))
        return msgspec.structs.replace(first, names=first.names[: PLAN_NAMES * NAME_BYTES])

    @property
    def _replicated(self) -> bool:
        return self._wanted is not None or any(m.join.replicas > 1 for m in self._members.speaking.values())

    def _plan(self, owed: Owed, table: KeyTable) -> None:
        names = owed.names
        speaking, pasts = self._members.speaking, self._members.pasts
        rows = memoryview(table.places(names)).cast("H")
        wishes = memoryview(self._wanted.places(names)).cast("H") if self._wanted is not None else None
        targets = _Targets(speaking.values())
        orphans = []
        for i in range(len(names) // NAME_BYTES):
            name, at = _name(names, i), i * HOLDERS
            numbers = [(entry - 1) >> 3 for entry in rows[at : at + HOLDERS] if entry]
            live = [number for number in numbers if number in speaking]
            # Who may come back counts: if it does not, its own pass finds what is missing then.
            holders = frozenset([speaking[n].join.node_id for n in live] + [pasts[n] for n in numbers if n in pasts])
            if not live:
                orphans += [] if holders else [name]
                continue
            wish = max(((entry - 1) >> 3 for entry in wishes[at : at + HOLDERS] if entry), default=0) if wishes else 0
            wanted = wish or max(speaking[number].join.replicas for number in live)
            source = speaking[live[name[-1] % len(live)]]
            for target in targets.pick(source, name, holders, wanted - len(holders)):
                self._hints.add(source.join.node_id, target.node_id, owed.tries, name)
        self._unwant(orphans)
        self._counters["names_lost"] += len(orphans)

    def _unwant(self, names: list[bytes]) -> None:
        if self._wanted is not None and names:
            for count in self._counts:
                self._wanted.discard(count, ALL_TIERS, b"".join(names))


class _Targets:
    """Who may get copies, for each layout."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._by_layout: dict[bytes, tuple[list[Candidate], list[float]]] = {}
        groups: dict[bytes, list[Candidate]] = defaultdict(list)
        for member in members:
            if member.accepts:
                join = member.join
                groups[join.layout].append(Candidate(join.node_id, member.free_bytes, member.total_bytes))
        for layout, candidates in groups.items():
            self._by_layout[layout] = (candidates, shares(candidates))

    def pick(self, source: Member, name: bytes, holders: frozenset[str], count: int) -> list[Candidate]:
        candidates, weights = self._by_layout.get(source.join.layout, ([], []))
        picked: list[Candidate] = []
        while len(picked) < count:
            target = heir(candidates, weights, name, holders)
            if target is None:
                break
            picked.append(target)
            holders |= {target.node_id}
        return picked


def _name(names: bytes, index: int) -> bytes:
    return names[index * NAME_BYTES : (index + 1) * NAME_BYTES]
