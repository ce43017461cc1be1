"""The books of the backing tier: packs that come and go, with copies, removals and rewritten packs."""

from __future__ import annotations

import random

import pytest

from anabranch.core.errors import IntegrityError
from anabranch.store.values.contracts import Record
from anabranch.store.values.log_format import Entry
from anabranch.store.values.packs import (
    Gone,
    Pack,
    PackIndex,
    decode_gone,
    decode_head,
    encode_gone,
    encode_head,
    gone_object,
    index_object,
    joined,
    object_number,
    pack_object,
)


def entry(name: bytes, *, scope: bytes = b"s" * 16, stored: int = 100) -> Entry:
    return Entry.of(Record(name, scope, stored, (1,)), 0, stored)


def pack(number: int, *entries: Entry, replaces: list[int] | None = None) -> Pack:
    return Pack(number, {e.name: e for e in entries}, replaces or [], sum(e.stored for e in entries))


def name(n: int) -> bytes:
    return n.to_bytes(32, "big")


def check(index: PackIndex, packs: dict[int, Pack]) -> None:
    """Against the definition: a name is where the lowest number that has it says."""
    assert index.packs == packs
    names = {one for p in packs.values() for one in p.entries}
    assert set(index) == names
    for one in names:
        holders = [p.number for p in packs.values() if one in p.entries]
        found = index.find(one)
        assert found is not None
        assert found[0] == min(holders)
        assert sorted(index.removal_of([one]).names) == sorted(holders)
    for p in packs.values():
        assert p.live_bytes == sum(e.stored for e in index.alive(p))


@pytest.mark.parametrize("seed", range(8))
def test_the_books_agree_with_their_definition_after_any_history(seed: int) -> None:
    rng, index, packs = random.Random(seed), PackIndex(), {}
    dead: set[tuple[int, bytes]] = set()
    for _ in range(300):
        match rng.randrange(5):
            case 0 | 1:
                number = rng.randrange(1 << 16)
                if number in packs:
                    continue
                old = rng.sample(sorted(packs), min(len(packs), rng.randrange(3)))
                chosen = {name(rng.randrange(60)) for _ in range(rng.randrange(1, 12))}
                made = pack(number, *(entry(n, stored=rng.randrange(1, 50)) for n in sorted(chosen)), replaces=old)
                index.add(made)
                packs[number] = made
                assert not {(o, n) for o in (number, *old) for n in made.entries} & dead
            case 2 if packs:
                number = rng.choice(sorted(packs))
                index.forget_pack(number)
                del packs[number]
            case 3:
                gone = index.removal_of([name(rng.randrange(60)) for _ in range(3)])
                index.apply(gone)
                dead |= {(number, one) for number, names in gone.names.items() for one in names}
            case 4 if len(index):
                index.forget(rng.choice(sorted(index)))
        check(index, packs)


def test_a_removal_counts_in_packs_that_replace_the_one_it_names() -> None:
    index = PackIndex()
    index.apply(Gone(names={1: [name(1)]}, scopes={2: [b"x" * 16]}))
    index.add(pack(9, entry(name(1)), entry(name(2)), entry(name(3), scope=b"x" * 16), replaces=[1, 2]))
    assert set(index) == {name(2)}
    index.add(pack(10, entry(name(1)), entry(name(3), scope=b"x" * 16)))
    assert set(index) == {name(1), name(2), name(3)}
    assert index.apply(Gone(scopes={10: [b"x" * 16]})) == 1
    assert index.removal_of_scopes([b"s" * 16]).scopes == {9: [b"s" * 16], 10: [b"s" * 16]}


def test_removals_that_are_no_more_are_forgotten() -> None:
    index = PackIndex()
    for number, gone in ((1, Gone(names={7: [name(1)]})), (2, Gone(names={7: [name(2)]}))):
        index.removals[number] = gone
        index.apply(gone)
    index.keep_removals([2])
    index.add(pack(7, entry(name(1)), entry(name(2))))
    assert set(index) == {name(1)}


def test_joined_removals_say_the_same() -> None:
    removals = [Gone(names={1: [name(1)], 2: [name(2)]}), Gone(names={1: [name(3)]}, scopes={3: [b"s" * 16]})]
    assert joined(removals) == Gone({1: [name(1), name(3)], 2: [name(2)]}, {3: [b"s" * 16]})
    assert joined(removals, {3}) == Gone({}, {3: [b"s" * 16]})
    assert decode_gone(encode_gone(joined(removals))) == joined(removals)


def test_what_is_worth_rewriting() -> None:
    index = PackIndex()
    big = pack(1, entry(name(1), stored=20 << 20), entry(name(2), stored=20 << 20), entry(name(3), stored=20 << 20))
    small = [pack(n, entry(name(n), stored=1000)) for n in (10, 11, 12)]
    for one in (big, *small):
        index.add(one)
    assert index.worth_rewriting() == []
    index.add(pack(13, entry(name(13), stored=1000)))
    assert sorted(p.number for p in index.worth_rewriting()) == [10, 11, 12, 13]
    index.apply(index.removal_of([name(1), name(2)]))
    assert 1 in {p.number for p in index.worth_rewriting()}


def test_heads_are_whole_of_their_pack_and_of_this_version_or_refused() -> None:
    entries = [entry(name(1)), entry(name(2))]
    frame, head = encode_head(5, entries, [3, 4])
    decoded = decode_head(5, head)
    assert (decoded.entries, decoded.replaces, decoded.data_bytes) == ({e.name: e for e in entries}, [3, 4], 100)
    assert frame in head
    for content in (head[:-1], b"", b"\xff" * 50, head.replace(frame[-20:], bytes(20))):
        with pytest.raises(IntegrityError):
            decode_head(5, content)
    with pytest.raises(IntegrityError):
        decode_head(6, head)
    with pytest.raises(IntegrityError, match="version 2"):
        decode_gone(encode_gone(Gone(version=2)))


def test_names_of_objects() -> None:
    for make in (pack_object, index_object, gone_object):
        assert object_number(make(255)) == 255
    for other in ("packs/ff.pack", "packs/00000000000000ff.pack.1.tmp", "notes.txt", "index/"):
        assert object_number(other) is None
