"""Valid messages for a value node and a directory, as the raw material of hostile ones (`testing.frames`)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import msgspec

from anabranch.core.messages import Message
from anabranch.store import messages as control
from anabranch.store.values import messages as m
from anabranch.store.values.scope import NAME_BYTES, SCOPE_BYTES
from anabranch.store.values.slices import slice_sums
from anabranch.testing.frames import Make

KEPT = 64
SMALL = 4096


class Known(msgspec.Struct):
    """What an attacker has seen or guesses: names of its own tenant, `foreign` ones of others (under which it stores
    too, if `stores_foreign`), numbers of open puts and of leases of any session, scopes of any tenant."""

    names: list[bytes]
    foreign: list[bytes]
    scopes: list[bytes]
    stores_foreign: bool = True
    puts: deque[int] = msgspec.field(default_factory=lambda: deque([1, 2, 3], maxlen=KEPT))
    leases: deque[int] = msgspec.field(default_factory=lambda: deque([1, 2, 3], maxlen=KEPT))


class NodeMessages:
    """Makers of every message that a node takes after the introduction."""

    def __init__(self, known: Known) -> None:
        self._known = known

    def makers(self) -> list[Make]:
        asks: list[Callable[[random.Random], Message]] = [
            self.offer, self.offer, self.put, self.put, self.put, self.slice, self.slice, self.seal, self.seal,
            self.abandon, self.get, self.get, self.get, self.read, self.read, self.read, self.give_back, self.damaged,
            self.exists, self.exists, self.remove, self.invalidate, self.pin, self.prefetch, self.listing, self.verify,
            self.stat,
        ]  # fmt: skip
        return asks

    def offer(self, pick: random.Random) -> m.Offer:
        count = pick.randint(1, 4)
        return m.Offer(
            op=pick.getrandbits(16),
            names=self._names(pick, count, foreign=self._known.stores_foreign),
            sizes=[pick.choice((0, 1, 100, SMALL, 600_000)) for _ in range(count)],
            chain=pick.random() < 0.3,
            parent=self._names(pick, 1) if pick.random() < 0.2 else b"",
            replicas=pick.choice((0, 0, 0, 1, 2)),
            durable=pick.random() < 0.02,
            wait_s=0.001 if pick.random() < 0.02 else 0.0,
            scopes=self._scopes(pick, count),
        )

    def put(self, pick: random.Random) -> m.Put:
        offer = msgspec.structs.replace(self.offer(pick), durable=False)
        sizes = [min(size, SMALL) for size in offer.sizes]
        sums = [one for size in sizes for one in slice_sums(bytes(size))]
        if pick.random() < 0.3:
            sums = [pick.getrandbits(64) for _ in sums]
        return m.Put(offer=msgspec.structs.replace(offer, sizes=sizes), sums=sums)

    def slice(self, pick: random.Random) -> m.Slice:
        return m.Slice(put=self._put(pick), item=pick.randint(0, 3), slice=pick.randint(0, 1), sum=pick.getrandbits(64))

    def seal(self, pick: random.Random) -> m.Seal:
        sums = [pick.getrandbits(64) for _ in range(pick.randint(0, 4))]
        return m.Seal(op=pick.getrandbits(16), put=self._put(pick), sums=sums)

    def abandon(self, pick: random.Random) -> m.Abandon:
        return m.Abandon(put=self._put(pick))

    def get(self, pick: random.Random) -> m.Get:
        count = pick.randint(1, 6)
        return m.Get(
            op=pick.getrandbits(16),
            names=self._names(pick, count),
            limit=pick.choice((0, SMALL, m.INLINE_BYTES)),
            views=pick.random() < 0.3,
            run=pick.random() < 0.3,
            scopes=self._scopes(pick, count),
        )

    def read(self, pick: random.Random) -> m.Read:
        return m.Read(lease=self._lease(pick), item=pick.randint(0, 3), slice=pick.randint(0, 1))

    def give_back(self, pick: random.Random) -> m.Return:
        return m.Return(lease=self._lease(pick))

    def damaged(self, pick: random.Random) -> m.Damaged:
        return m.Damaged(lease=self._lease(pick), items=[pick.randint(0, 3)])

    def exists(self, pick: random.Random) -> m.Exists:
        return m.Exists(op=pick.getrandbits(16), names=self._names(pick, pick.randint(1, 30)), run=pick.random() < 0.3)

    def remove(self, pick: random.Random) -> m.Remove:
        return m.Remove(op=pick.getrandbits(16), names=self._names(pick, 2), everywhere=pick.random() < 0.1)

    def invalidate(self, pick: random.Random) -> m.Invalidate:
        epoch = pick.choice((None, "", "e", "x" * 100))
        return m.Invalidate(op=pick.getrandbits(16), tenant=pick.choice(("", "a", "b")), epoch=epoch, everywhere=False)

    def pin(self, pick: random.Random) -> m.Pin:
        return m.Pin(op=pick.getrandbits(16), names=self._names(pick, 2), seconds=pick.choice((0.0, 0.01, 1.0)))

    def prefetch(self, pick: random.Random) -> m.Prefetch:
        return m.Prefetch(op=pick.getrandbits(16), names=self._names(pick, 3))

    def listing(self, pick: random.Random) -> m.Listing:
        return m.Listing(op=pick.getrandbits(16), after=self._names(pick, 1), limit=pick.choice((0, 1, 1000, 10**9)))

    def verify(self, pick: random.Random) -> m.Verify:
        return m.Verify(op=pick.getrandbits(16))

    def stat(self, pick: random.Random) -> control.StatRequest:
        return control.StatRequest()

    def _names(self, pick: random.Random, count: int, *, foreign: bool = True) -> bytes:
        names = self._known.names + self._known.foreign if foreign else self._known.names
        one = [pick.choice(names) if pick.random() < 0.9 else pick.randbytes(NAME_BYTES) for _ in range(count)]
        return b"".join(one)

    def _scopes(self, pick: random.Random, count: int) -> bytes:
        if pick.random() < 0.7:
            return b""
        return b"".join(pick.choice((*self._known.scopes, bytes(SCOPE_BYTES))) for _ in range(count))

    def _put(self, pick: random.Random) -> int:
        return pick.choice(self._known.puts) + pick.choice((0, 0, 0, 1, -1))

    def _lease(self, pick: random.Random) -> int:
        return pick.choice(self._known.leases) + pick.choice((0, 0, 0, 1, -1))


def raw_bytes(message: Message, pick: random.Random) -> bytes:
    """What follows a message on the wire: as much as it says, or a little more or less."""
    if isinstance(message, m.Put):
        size = sum(message.offer.sizes)
    elif isinstance(message, m.Slice):
        size = pick.choice((1, 100, SMALL, 75_712))
    else:
        return b""
    return bytes(max(0, size + pick.choice((0, 0, 0, 0, 0, 0, -1, 1, 100))))


class DirectoryMessages:
    """Makers of every message that a directory takes. Few names and node ids, so that memory is not what is tried."""

    def __init__(self, names: list[bytes]) -> None:
        self._all = names

    def makers(self) -> list[Make]:
        return [self.join, self.announce, self.announce, self.announce, self.heartbeat, self.lookup, self.where,
                self.where, self.nodes, self.stat]  # fmt: skip

    def join(self, pick: random.Random) -> control.Join:
        return control.Join(
            node_id=f"evil-{pick.randint(0, 20)}",
            epoch=pick.getrandbits(32),
            address=pick.choice(("127.0.0.1:1", "nowhere", "", "unix:/")),
            layout=pick.choice((b"", b"layout")),
            replicas=pick.choice((1, 1, 2, 4)),
        )

    def announce(self, pick: random.Random) -> control.Announce:
        tier = pick.choice(("dram", "ssd", "backing", "tape"))
        return control.Announce(
            seq=pick.choice((0, 1, 2, 3, pick.getrandbits(32))),
            added={tier: self._some(pick)},
            removed={tier: self._some(pick)} if pick.random() < 0.3 else {},
            reset=pick.random() < 0.5,
            last=pick.random() < 0.7,
            added_names={tier: b"".join(self._some(pick))},
            removed_names={tier: b"".join(self._some(pick))} if pick.random() < 0.3 else {},
            wanted={pick.choice((1, 2, 3, 4, 0, 100)): b"".join(self._some(pick))} if pick.random() < 0.3 else {},
        )

    def heartbeat(self, pick: random.Random) -> control.Heartbeat:
        total = pick.getrandbits(40)
        return control.Heartbeat(seq=pick.randint(0, 3), free_bytes=total // 2, total_bytes=total)

    def lookup(self, pick: random.Random) -> control.Lookup:
        return control.Lookup(op=pick.getrandbits(16), keys=self._some(pick), layout=pick.choice((b"", b"layout")))

    def where(self, pick: random.Random) -> control.Where:
        return control.Where(op=pick.getrandbits(16), names=b"".join(self._some(pick)), run=pick.random() < 0.3)

    def nodes(self, pick: random.Random) -> control.ListNodes:
        return control.ListNodes(op=pick.getrandbits(16))

    def stat(self, pick: random.Random) -> control.StatRequest:
        return control.StatRequest()

    def _some(self, pick: random.Random) -> list[bytes]:
        return [pick.choice(self._all) for _ in range(pick.randint(0, 8))]
