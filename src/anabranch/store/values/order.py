"""In which order a shelf's values go: what eviction knows of them, and when it hears of it.

Children before parents and never a held one is `paging.prefix_tree`'s doing, the choice among the rest
`policy.eviction`'s. Both cost some microseconds a value, so in a burst of puts and reads they hear of it afterwards: at
the latest before they choose.
"""

from __future__ import annotations

from collections import deque

from anabranch.core.errors import InvalidInput
from anabranch.paging.prefix_tree import PrefixTree
from anabranch.policy.eviction.contract import EvictionPolicy
from anabranch.store.values.entries import Entry

TOUCHES_REMEMBERED = 512
"""Reads whose recency waits for the next eviction; beyond it a read in a row of reads is forgotten."""
FRESH_REMEMBERED = 1 << 15
"""New values that wait to be listed."""
FRESH_AT_ONCE = 256


class EvictionOrder:
    """`list`: eviction knows a value from then on; a value with a reference is held."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._tree = PrefixTree(policy)
        self._touched: dict[bytes, Entry] = {}
        self._fresh: deque[Entry] = deque()

    def touch(self, entry: Entry) -> None:
        """It was asked for."""
        if len(self._touched) < TOUCHES_REMEMBERED:
            self._touched[entry.name] = entry

    def hold(self, entry: Entry) -> None:
        """It is in use from now on."""
        if entry.listed:
            self._tree.hold(entry.name)

    def release(self, entry: Entry) -> None:
        """A live value is in use no more; perhaps for the first time."""
        if entry.listed:
            self._tree.release(entry.name)
        elif entry.parent or entry.scope.tenant.quota_bytes:
            # Its parent must not go before it; and a quota looks for values that are listed.
            self._list(entry)
        elif not entry.fresh:
            self.defer(entry)
            if len(self._fresh) > FRESH_REMEMBERED:
                self.list_fresh(2)

    def defer(self, entry: Entry) -> None:
        """List an unused value later; children are deferred before their parents."""
        entry.fresh = entry.uses + 1
        self._fresh.append(entry)

    def list_fresh(self, count: int) -> None:
        """List up to `count` values that are new, those that were read meanwhile last."""
        fresh = self._fresh
        while fresh and count > 0:
            entry = fresh.popleft()
            count -= 1
            if not entry.fresh or entry.refs or not entry.live:
                entry.fresh = 0
            elif entry.fresh != entry.uses + 1:
                entry.fresh = entry.uses + 1
                fresh.append(entry)
            else:
                self._list(entry)
                if entry.uses:
                    self._tree.reuse(entry.name)

    def list_now(self, entry: Entry) -> None:
        if entry.fresh and not entry.refs:
            self._list(entry)

    def list_held(self, entry: Entry) -> None:
        """A new value in use: what it is built on stays."""
        if not entry.listed and entry.live:
            self._list(entry, held=True)

    def put_back(self, entry: Entry) -> None:
        """The victim stays, as if in use, until `let_go`."""
        self._tree.insert(entry.name, entry.parent, entry.slot, held=True)

    def let_go(self, entry: Entry) -> None:
        if entry.listed and not entry.refs:
            self._tree.release(entry.name)

    def settle(self) -> None:
        """Let eviction know of the reads so far."""
        touched, self._touched = self._touched, {}
        tree = self._tree
        for name, entry in touched.items():
            if not entry.listed:
                continue
            if entry.refs:
                tree.reuse(name)
            else:
                tree.hold(name)
                tree.reuse(name)
                tree.release(name)

    def prepare(self) -> None:
        """Before a choice."""
        self.list_fresh(FRESH_AT_ONCE)
        self.settle()

    def victim(self) -> int | None:
        """The slot of the value that goes now; None if all are in use."""
        while not self._tree.evictable:
            if not self._fresh:
                return None
            self.list_fresh(FRESH_AT_ONCE)
        return self._tree.pop_victim()[0]

    def evict(self, entry: Entry) -> bool:
        """This very one; False if it is in use or others are built on it."""
        return entry.listed and not entry.kept and self._tree.evict(entry.name)

    def forget(self, entry: Entry) -> None:
        """Its name goes, in use or not."""
        if entry.listed:
            self._tree.remove(entry.name)
        entry.listed, entry.fresh = False, 0

    def check(self) -> None:
        self._tree.check()

    def _list(self, entry: Entry, *, held: bool = False) -> None:
        entry.listed, entry.fresh = True, 0
        try:
            self._tree.insert(entry.name, entry.parent, entry.slot, held=held)
        except InvalidInput:
            # A ring of parents: the value is as good without one.
            entry.parent = b""
            self._tree.insert(entry.name, b"", entry.slot, held=held)
