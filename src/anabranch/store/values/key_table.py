"""The directory's table in plain Python: the twin of `live.key_table` where there is no compiler, and for tests."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator

from anabranch.core.errors import InvalidInput
from anabranch.store.values.scope import NAME_BYTES

MAX_MEMBER = 8190
ALL_TIERS = 7
HOLDERS = 4
_PARTS = 256
_NOBODY = (0,) * HOLDERS


class DictKeyTable:
    """`contracts.KeyTable` over dicts; some hundred bytes a name. Raises InvalidInput for a member, tiers or names that
    cannot be."""

    def __init__(self) -> None:
        self._parts: list[dict[bytes, tuple[int, ...]]] = [{} for _ in range(_PARTS)]

    def add(self, member: int, tier: int, names: bytes) -> int:
        check(names, member, tier)
        fresh = 0
        for part, name in self._walk(names):
            holders = part.get(name, ())
            index = _index(holders, member)
            if index is not None:
                changed = 1 + ((holders[index] - 1) | tier)
                part[name] = (*holders[:index], changed, *holders[index + 1 :])
            elif len(holders) < HOLDERS:
                part[name] = (*holders, 1 + (member << 3 | tier))
                fresh += 1
        return fresh

    def discard(self, member: int, tier: int, names: bytes) -> int:
        check(names, member, tier)
        gone = 0
        for part, name in self._walk(names):
            holders = part.get(name, ())
            index = _index(holders, member)
            if index is None:
                continue
            left = (holders[index] - 1) & ~tier
            kept = (1 + left,) if left & ALL_TIERS else ()
            gone += not kept
            _put(part, name, (*holders[:index], *kept, *holders[index + 1 :]))
        return gone

    def places(self, names: bytes) -> bytes:
        check(names)
        answer = array("H")
        for part, name in self._walk(names):
            answer.extend((part.get(name, ()) + _NOBODY)[:HOLDERS])
        return answer.tobytes()

    def held(self, members: Iterable[int], at: int, count: int) -> tuple[bytes, int]:
        wanted, names = known(members), []
        at, end = self._span(at, count)
        for part in self._parts[at:end]:
            names += [name for name, holders in part.items() if any(_member(place) in wanted for place in holders)]
        return b"".join(names), end % _PARTS

    def sweep(self, dead: Iterable[int], at: int, count: int) -> int:
        gone = known(dead)
        at, end = self._span(at, count)
        for part in self._parts[at:end]:
            for name, holders in list(part.items()):
                _put(part, name, tuple(place for place in holders if _member(place) not in gone))
        return end % _PARTS

    def forget(self, member: int) -> None:
        self.sweep((member,), 0, len(self))

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def memory_bytes(self) -> int:
        """An estimate: dicts, names and tuples, without what the allocator adds."""
        entry = sys.getsizeof(b"") + NAME_BYTES + sys.getsizeof(_NOBODY[:1])
        return sum(map(sys.getsizeof, self._parts)) + entry * len(self)

    def _walk(self, names: bytes) -> Iterator[tuple[dict[bytes, tuple[int, ...]], bytes]]:
        for at in range(0, len(names), NAME_BYTES):
            yield self._parts[names[at]], names[at : at + NAME_BYTES]

    def _span(self, at: int, count: int) -> tuple[int, int]:
        """Whole parts, so that no change between two calls hides an entry."""
        if not 0 <= at < _PARTS:
            raise InvalidInput(f"position {at} is none that this table gave")
        start, seen = at, 0
        while at < _PARTS and (seen == 0 or seen < count):
            seen += len(self._parts[at])
            at += 1
        return start, at


def check(names: bytes, member: int = 0, tier: int = ALL_TIERS) -> None:
    if len(names) % NAME_BYTES:
        raise InvalidInput(f"names have {NAME_BYTES} bytes each, {len(names)} bytes are no whole number of them")
    if not 0 <= member <= MAX_MEMBER:
        raise InvalidInput(f"a member is a number from 0 to {MAX_MEMBER}, not {member}")
    if not 0 < tier <= ALL_TIERS:
        raise InvalidInput(f"tiers are bits from 1 to {ALL_TIERS}, not {tier}")


def known(members: Iterable[int]) -> frozenset[int]:
    """Raises InvalidInput if one of them is no member's number."""
    numbers = frozenset(members)
    for number in numbers:
        check(b"", number)
    return numbers


def _member(place: int) -> int:
    return (place - 1) >> 3


def _index(holders: tuple[int, ...], member: int) -> int | None:
    return next((index for index, place in enumerate(holders) if _member(place) == member), None)


def _put(part: dict[bytes, tuple[int, ...]], name: bytes, holders: tuple[int, ...]) -> None:
    if holders:
        part[name] = holders
    else:
        del part[name]
