"""Leases on values: their bytes stay as they are until the lease is given back or its time is up."""

from __future__ import annotations

from anabranch.store.leases import Leases
from anabranch.store.values.entries import Entry
from anabranch.store.values.shelf import Shelf


class Lease:
    """`views`: the reader maps the arena; it may still read after its connection broke, until the lease's end."""

    __slots__ = ("entries", "number", "session", "until", "views")

    def __init__(self, number: int, session: object, entries: list[Entry], until: float, views: bool) -> None:
        self.number = number
        self.session = session
        self.entries = entries
        self.until = until
        self.views = views


class Reads:
    def __init__(self, shelf: Shelf, lease_s: float) -> None:
        self._shelf = shelf
        self._lease_s = lease_s
        self._leases: dict[int, Lease] = {}
        self._ends: Leases[int] = Leases()
        self._next = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self, session: object, entries: list[Entry], now: float, *, views: bool = False, held: bool = False
    ) -> Lease:
        """Each entry is held (`held`: already, by the caller, who gives that up); mark it as read with
        `Shelf.touch`."""
        if not held:
            for entry in entries:
                self._shelf.hold(entry)
        self._next += 1
        lease = Lease(self._next, session, entries, now + self._lease_s, views)
        self._leases[lease.number] = lease
        self._ends.grant(lease.number, lease.until)
        return lease

    def get(self, session: object, number: int) -> Lease | None:
        """A lease of this session that is not over. Safe to call without the owner's lock."""
        lease = self._leases.get(number)
        return lease if lease is not None and lease.session is session else None

    def give_back(self, session: object, number: int) -> bool:
        lease = self.get(session, number)
        if lease is None:
            return False
        self._ends.end(number)
        self._end(lease)
        return True

    def end_session(self, session: object) -> None:
        for lease in [lease for lease in self._leases.values() if lease.session is session and not lease.views]:
            self.give_back(session, lease.number)

    def expire(self, now: float) -> int:
        """End the leases whose time is up; how many."""
        over = self._ends.expired(now)
        for number in over:
            self._end(self._leases[number])
        return len(over)

    @property
    def next_end(self) -> float | None:
        return self._ends.next_end()

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.number]
        # Last item first: a chain's children became unused before their parents, so they go first.
        for entry in reversed(lease.entries):
            self._shelf.release(entry)
