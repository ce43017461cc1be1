"""Housekeeping of a backing store: mostly dead packs are rewritten, small ones joined, leftovers deleted."""

from __future__ import annotations

from anabranch.core.errors import IntegrityError, Unavailable
from anabranch.store.values.contracts import Record
from anabranch.store.values.live.backing.catalog import Catalog
from anabranch.store.values.log_format import Entry
from anabranch.store.values.packs import (
    GONE,
    INDEX,
    PACK_BYTES,
    PACKS,
    Gone,
    decode_gone,
    index_object,
    joined,
    object_number,
    pack_object,
)

KEEP_S = 86_400.0
"""Removals are kept this long even if their packs are gone, and packs that nobody published: someone may be rewriting
one of them right now."""
JOIN_REMOVALS = 16
DUE_PACKS = 64
_Values = list[tuple[Record, memoryview]]


def compact(catalog: Catalog) -> int:
    """How many objects went. Any node may do it at any time; two at once cost space until the next time. Raises
    Unavailable."""
    catalog.refresh()
    with catalog.lock:
        able = [pack for pack in catalog.index.worth_rewriting() if pack.number not in catalog.unlisted]
        old = {pack.number: catalog.index.alive(pack) for pack in able}
    try:
        return _rewrite(catalog, old) + _join_removals(catalog) + _drop_orphans(catalog)
    except OSError as error:
        raise Unavailable(f"the backing tier cannot be reached: {error}") from error


def is_due(catalog: Catalog) -> bool:
    """So much could be rewritten that it should not wait."""
    with catalog.lock:
        return len(catalog.index.worth_rewriting()) >= DUE_PACKS


def _rewrite(catalog: Catalog, old: dict[int, list[Entry]]) -> int:
    values: _Values = []
    sources: list[int] = []
    done, size = 0, 0
    for number, entries in old.items():
        more = sum(entry.stored for entry in entries)
        if size and size + more > PACK_BYTES:
            done += _replace(catalog, sources, values)
            values, sources, size = [], [], 0
        copy = _copy_of(catalog, number, entries)
        if copy is not None:
            values += copy
            sources.append(number)
            size += more
    return done + _replace(catalog, sources, values)


def _copy_of(catalog: Catalog, number: int, entries: list[Entry]) -> _Values | None:
    """Sealed values are moved as they are."""
    values = [(entry.record, memoryview(bytearray(entry.stored))) for entry in entries]
    pieces = [(entry.offset, data) for entry, (_, data) in zip(entries, values, strict=True)]
    if not pieces:
        return values
    try:
        catalog.objects.read(pack_object(number), sorted(pieces, key=lambda piece: piece[0]))
    except FileNotFoundError:
        return None
    return values


def _replace(catalog: Catalog, sources: list[int], values: _Values) -> int:
    if not sources:
        return 0

    def still() -> set[bytes]:
        packs = [catalog.index.packs[number] for number in sources if number in catalog.index.packs]
        return {name for pack in packs for name in pack.entries}

    if values:
        catalog.refresh()  # removals that others wrote while this one read
        with catalog.lock:
            packs = [catalog.index.packs[number] for number in sources if number in catalog.index.packs]
            before = [number for pack in packs for number in pack.replaces]
        catalog.write_pack(values, [*sources, *before], still)
    with catalog.lock:
        for number in sources:
            catalog.index.forget_pack(number)
    catalog.objects.delete([index_object(number) for number in sources])
    catalog.objects.delete([pack_object(number) for number in sources])
    catalog.tally.add("backing_packs_rewritten", len(sources))
    return 2 * len(sources)


def _join_removals(catalog: Catalog) -> int:
    """Many removal objects become one; what they say of packs that are long gone is dropped."""
    with catalog.lock:
        known = {number for pack in catalog.index.packs.values() for number in (pack.number, *pack.replaces)}
    items = catalog.objects.list(GONE)
    if len(items) < JOIN_REMOVALS:
        items = [item for item in items if item.age_s > KEEP_S]
    fresh: list[Gone] = []
    old: list[Gone] = []
    names: list[str] = []
    for item in items:
        content = catalog.get(item.name)
        if content is None:
            continue  # another node joined it
        try:
            (old if item.age_s > KEEP_S else fresh).append(decode_gone(content))
        except IntegrityError:
            continue  # of a version that is not ours to judge
        names.append(item.name)
    if names:
        catalog.write_removal(joined([*fresh, joined(old, known)]))
        catalog.objects.delete(names)
    return len(names)


def _drop_orphans(catalog: Catalog) -> int:
    """Packs whose writer was killed before it could publish them."""
    packs = catalog.objects.list(PACKS)
    listed = {object_number(item.name) for item in catalog.objects.list(INDEX)}
    old = [p.name for p in packs if p.age_s > KEEP_S and object_number(p.name) not in listed]
    catalog.objects.delete(old)
    return len(old)
