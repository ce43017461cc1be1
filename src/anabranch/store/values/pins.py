"""Pins: values that stay until a time, against a quota of the tenant's."""

from __future__ import annotations

from anabranch.paging.extents import rounded
from anabranch.store.leases import Leases
from anabranch.store.values.entries import Entry
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.shelf import Shelf


class Pins:
    """`quota_bytes`: of a tenant that has no quota of pins of its own. A pinned value that is removed or invalidated is
    gone, whatever was promised."""

    def __init__(self, shelf: Shelf, *, quota_bytes: int, max_pin_s: float) -> None:
        self._shelf = shelf
        self._quota_bytes = quota_bytes
        self._max_pin_s = max_pin_s
        self._ends: Leases[Entry] = Leases()
        shelf.unpin = self.unpin

    def __len__(self) -> int:
        return len(self._ends)

    def pin(self, entry: Entry, seconds: float, now: float) -> Outcome:
        """OK, or FULL if the tenant's pins use up its quota. The later end counts; never more than `max_pin_s`."""
        if not seconds > 0:  # what a caller sends may be no number
            self.unpin(entry)
            return Outcome.OK
        until = now + min(seconds, self._max_pin_s)
        if entry in self._ends:
            entry.pin = max(entry.pin, until)
            self._ends.extend(entry, until)
            return Outcome.OK
        tenant, need = entry.scope.tenant, rounded(entry.size)
        if tenant.pinned_bytes + need > (tenant.pin_quota_bytes or self._quota_bytes):
            return Outcome.FULL
        tenant.pinned_bytes += need
        entry.pin = until
        self._shelf.hold(entry)
        self._ends.grant(entry, until)
        return Outcome.OK

    def unpin(self, entry: Entry) -> None:
        if self._ends.end(entry):
            self._over(entry)

    def expire(self, now: float) -> int:
        over = self._ends.expired(now)
        for entry in over:
            self._over(entry)
        return len(over)

    @property
    def next_end(self) -> float | None:
        return self._ends.next_end()

    def _over(self, entry: Entry) -> None:
        entry.pin = 0.0
        entry.scope.tenant.pinned_bytes -= rounded(entry.size)
        self._shelf.release(entry)
