"""Packs of the backing tier: which objects there are, what is alive in them, which are worth rewriting.

    packs/<id>.pack    values end to end, then their index frame (`store.values.log_format`)
    index/<id>.idx     the same frame once more, small, so that other nodes learn what a pack holds: visible means valid
    gone/<id>.gone     names and scopes that are gone from certain packs

Objects are written once and never changed; ids are random, so writers need no locks. A removal names the packs it
knows; a pack that was rewritten keeps the ids it replaces, so that a removal by someone who only knew the old one still
counts.

**Covers** names, ids and entries. **Does not cover** reading and writing objects (`store.values.live.backing`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from anabranch.core.errors import IntegrityError
from anabranch.store.values.contracts import Record
from anabranch.store.values.log_format import Entry, pack_frame, unpack_frame

PACK_BYTES = 64 << 20
SMALL_PACK_BYTES = 8 << 20
PACKS, INDEX, GONE = "packs/", "index/", "gone/"
_OBJECT = re.compile(r"(?:packs|index|gone)/([0-9a-f]{16})\.(?:pack|idx|gone)")


class PackHead(msgspec.Struct, frozen=True):
    """Content of an index object."""

    frame: bytes
    replaces: list[int] = []
    version: int = 1


class Gone(msgspec.Struct, frozen=True):
    """Content of a removal object: pack id → names, pack id → scopes."""

    names: dict[int, list[bytes]] = {}
    scopes: dict[int, list[bytes]] = {}
    version: int = 1


class Pack(msgspec.Struct, gc=False, eq=False):
    """`live_bytes`: of the entries that count (see `PackIndex`), which keeps it."""

    number: int
    entries: dict[bytes, Entry]
    replaces: list[int]
    data_bytes: int
    live_bytes: int = 0


def pack_object(number: int) -> str:
    return f"{PACKS}{number:016x}.pack"


def index_object(number: int) -> str:
    return f"{INDEX}{number:016x}.idx"


def gone_object(number: int) -> str:
    return f"{GONE}{number:016x}.gone"


def object_number(name: str) -> int | None:
    """The id in an object's name; None for objects that are not ours."""
    match = _OBJECT.fullmatch(name)
    return int(match[1], 16) if match else None


def encode_head(number: int, entries: list[Entry], replaces: list[int]) -> tuple[bytes, bytes]:
    """(frame that ends the pack, content of its index object)."""
    frame = pack_frame(number, 0, entries)
    return frame, msgspec.msgpack.encode(PackHead(frame, replaces))


def decode_head(number: int, content: bytes) -> Pack:
    """Raises IntegrityError for anything that is not a whole index object of this pack."""
    try:
        head = msgspec.msgpack.decode(content, type=PackHead)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"index object of pack {number:016x} is damaged") from error
    if head.version != 1:
        raise IntegrityError(f"index object of pack {number:016x} has format version {head.version}")
    _, entries = unpack_frame(head.frame, number)
    size = max((entry.offset + entry.stored for entry in entries), default=0)
    return Pack(number, {entry.name: entry for entry in entries}, head.replaces, size)


def encode_gone(gone: Gone) -> bytes:
    return msgspec.msgpack.encode(gone)


def decode_gone(content: bytes) -> Gone:
    """Raises IntegrityError."""
    try:
        gone = msgspec.msgpack.decode(content, type=Gone)
    except msgspec.MsgspecError as error:
        raise IntegrityError("a removal object is damaged") from error
    if gone.version != 1:
        raise IntegrityError(f"a removal object has format version {gone.version}")
    return gone


def joined(removals: Iterable[Gone], packs: set[int] | None = None) -> Gone:
    """One removal that says what these say (with `packs`: only about them)."""
    names: dict[int, set[bytes]] = {}
    scopes: dict[int, set[bytes]] = {}
    for gone in removals:
        for table, said in ((names, gone.names), (scopes, gone.scopes)):
            for number, what in said.items():
                if packs is None or number in packs:
                    table.setdefault(number, set()).update(what)
    return Gone({n: sorted(w) for n, w in names.items()}, {n: sorted(w) for n, w in scopes.items()})


class PackIndex:
    """What this node knows of the backing tier. Of packs with the same value the one with the lowest number counts, on
    every node; the others' copies are dead space."""

    def __init__(self) -> None:
        self.packs: dict[int, Pack] = {}
        self._where: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}  # further packs with the same name, which are rare
        self.removals: dict[int, Gone] = {}  # those that were applied, by number of their object
        self._gone_names: dict[int, set[bytes]] = {}
        self._gone_scopes: dict[int, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._where)

    def find(self, name: bytes) -> tuple[int, Entry] | None:
        number = self._where.get(name)
        return None if number is None else (number, self.packs[number].entries[name])

    def record(self, name: bytes) -> Record | None:
        found = self.find(name)
        return None if found is None else found[1].record

    def present(self, names: bytes, width: int) -> bytes:
        return bytes([names[at : at + width] in self._where for at in range(0, len(names), width)])

    def add(self, pack: Pack) -> None:
        for number in (pack.number, *pack.replaces):
            self._strip(pack, self._gone_names.get(number, set()), self._gone_scopes.get(number, set()))
        self.packs[pack.number] = pack
        for name, entry in pack.entries.items():
            before = self._where.get(name)
            if before is not None and before < pack.number:
                self._copies.setdefault(name, []).append(pack.number)
                continue
            if before is not None:
                self._copies.setdefault(name, []).append(before)
                self.packs[before].live_bytes -= self.packs[before].entries[name].stored
            self._where[name] = pack.number
            pack.live_bytes += entry.stored

    def forget_pack(self, number: int) -> None:
        """The object is no more. Another pack may have the same values."""
        pack = self.packs.pop(number, None)
        if pack is None:
            return
        for name, entry in pack.entries.items():
            self._lose(name, pack, entry)

    def removal_of(self, names: Iterable[bytes]) -> Gone:
        """What to write so that these names are gone from every pack known here."""
        found: dict[int, list[bytes]] = {}
        for name in set(names) & self._where.keys():
            for number in (self._where[name], *self._copies.get(name, ())):
                found.setdefault(number, []).append(name)
        return Gone(names=found)

    def removal_of_scopes(self, scopes: Iterable[bytes]) -> Gone:
        wanted = set(scopes)
        found: dict[int, list[bytes]] = {}
        for pack in self.packs.values():
            here = wanted & {entry.scope for entry in pack.entries.values()}
            if here:
                found[pack.number] = sorted(here)
        return Gone(scopes=found)

    def apply(self, gone: Gone) -> int:
        """How many names went."""
        before = len(self._where)
        self._remember(gone)
        for pack in list(self.packs.values()):
            for number in (pack.number, *pack.replaces):
                self._strip(pack, set(gone.names.get(number, ())), set(gone.scopes.get(number, ())))
        return before - len(self._where)

    def keep_removals(self, numbers: Iterable[int]) -> None:
        """The other removal objects are no more: their packs are long gone, or another object says the same."""
        kept = set(numbers)
        if self.removals.keys() <= kept:
            return
        self.removals = {number: gone for number, gone in self.removals.items() if number in kept}
        self._gone_names, self._gone_scopes = {}, {}
        for gone in self.removals.values():
            self._remember(gone)

    def _remember(self, gone: Gone) -> None:
        for number, names in gone.names.items():
            self._gone_names.setdefault(number, set()).update(names)
        for number, scopes in gone.scopes.items():
            self._gone_scopes.setdefault(number, set()).update(scopes)

    def forget(self, name: bytes) -> None:
        """It proved damaged where it was said to be."""
        found = self.find(name)
        if found is not None:
            self._strip(self.packs[found[0]], {name}, set())

    def worth_rewriting(self) -> list[Pack]:
        """Packs of which less than half is alive, and small ones if there are four or more."""
        small = [p for p in self.packs.values() if p.data_bytes < SMALL_PACK_BYTES]
        dead = [p for p in self.packs.values() if p.live_bytes * 2 < p.data_bytes or not p.entries]
        return list({p.number: p for p in dead + (small if len(small) >= 4 else [])}.values())

    def _strip(self, pack: Pack, names: set[bytes], scopes: set[bytes]) -> None:
        lost = [name for name in names if name in pack.entries]
        if scopes:
            lost += [name for name, entry in pack.entries.items() if entry.scope in scopes and name not in names]
        for name in lost:
            self._lose(name, pack, pack.entries.pop(name))

    def _lose(self, name: bytes, pack: Pack, entry: Entry) -> None:
        """This pack has the name no more."""
        copies = self._copies.get(name, [])
        if pack.number in copies:
            copies.remove(pack.number)
        elif self._where.get(name) == pack.number:
            del self._where[name]
            pack.live_bytes -= entry.stored
            if copies:
                heir = self.packs[min(copies)]
                copies.remove(heir.number)
                self._where[name] = heir.number
                heir.live_bytes += heir.entries[name].stored
        if not copies:
            self._copies.pop(name, None)

    def alive(self, pack: Pack) -> list[Entry]:
        """What of it counts."""
        return [entry for name, entry in pack.entries.items() if self._where.get(name) == pack.number]
