"""What became of one item of a call. A batch answers with one outcome per item, in order; none is dropped."""

from __future__ import annotations

from enum import IntEnum


class Outcome(IntEnum):
    """One byte on the wire; numbers are never reused."""

    OK = 0
    """Stored, found, removed, pinned: what was asked for is done."""
    PRESENT = 1
    """Put: a value with the same bytes is there already (also when an equal writer was faster)."""
    DIFFERS = 2
    """Put: refused and counted, other bytes are stored under this key; remove it first."""
    MISSING = 3
    """Nobody reachable holds it."""
    UNKNOWN = 4
    """It was not found, but some node has not announced what it holds: ask again later, or recompute."""
    FULL = 5
    """Put: no room before the deadline; everything in the way is leased or pinned, or the tenant's quota is used up."""
    TOO_BIG = 6
    """Put: larger than the arena or the tenant's quota; it can never fit. Get: larger than the caller's buffer."""
    STALE = 7
    """The lease ended, or the scope was invalidated, while the bytes were on their way."""
    DAMAGED = 8
    """Every replica that could be read failed its checksum; the node has dropped them."""
    DENIED = 9
    """The caller may not do this (another tenant's value, an admin's call)."""
    UNREACHABLE = 10
    """The node that has it, or should take it, did not answer before the deadline."""
    SEND = 11
    """Only between client and node: this item's bytes are wanted."""

    @property
    def stored(self) -> bool:
        """The value is there now."""
        return self in (Outcome.OK, Outcome.PRESENT)

    def __bool__(self) -> bool:
        """What was asked for is so: `if store.put(…)`, `all(store.put_many(…))`."""
        return self.stored

    def __str__(self) -> str:
        return self.name.lower()
