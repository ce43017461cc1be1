"""What a value on its way in is built on stays until it is there: else a chain's tail would go to make room for what
comes behind it, and the chain would have a hole.

An item keeps its parent; children-first eviction does the rest. A parent that is not there yet is kept as soon as it
comes; of one that found no room, its own parent is kept instead.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Protocol

from anabranch.paging.extents import rounded
from anabranch.store.values.entries import Entry, ScopeState
from anabranch.store.values.shelf import Shelf

FULL_REMEMBERED = 4096
"""Values that lately found no room."""


class Child(Protocol):
    """A value on its way in. `anchor`: what it keeps."""

    scope: ScopeState
    parent: bytes
    anchor: Entry | None


class Lineage:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._full: OrderedDict[bytes, bytes] = OrderedDict()
        """Name of what found no room → its nearest ancestor that had room."""
        self._coming: defaultdict[bytes, dict[Child, None]] = defaultdict(dict)
        """Parents that were not there, and whose children are under way."""
        self._after: dict[Entry, Entry] = {}
        """New values that their maker still holds → the parent that is kept as long."""

    def begin(self, child: Child) -> None:
        """Before there is room for it."""
        if not child.parent or child.anchor is not None:
            return
        child.anchor = self._nearest(child.scope, child.parent)
        if child.anchor is not None:
            self._shelf.keep(child.anchor)
        if child.parent not in child.scope.entries:
            self._coming[child.parent][child] = None

    def full(self, name: bytes, child: Child) -> None:
        """There was no room."""
        self.end(child)
        if not child.parent:
            return
        self._full[name] = self._full.get(child.parent, child.parent)
        self._full.move_to_end(name)
        if len(self._full) > FULL_REMEMBERED:
            self._full.popitem(last=False)

    def end(self, child: Child) -> None:
        """It was given up."""
        self._unlist(child)
        anchor, child.anchor = child.anchor, None
        if anchor is not None:
            self._shelf.let_go(anchor)

    def arrived(self, entry: Entry, child: Child) -> None:
        """It is there now, its maker holds it until `settled`."""
        self._unlist(child)
        self._full.pop(entry.name, None)
        anchor, child.anchor = child.anchor, None
        if anchor is not None:
            self._after[entry] = anchor
        for other in self._coming.pop(entry.name, ()):
            if other.scope is entry.scope:
                self._shelf.keep(entry)
                before, other.anchor = other.anchor, entry
                if before is not None:
                    self._shelf.let_go(before)

    def settled(self, entry: Entry) -> None:
        """Its maker holds it no more."""
        anchor = self._after.pop(entry, None) if self._after else None
        if anchor is not None:
            self._shelf.list_held(entry)
            self._shelf.let_go(anchor)

    def bytes_above(self, scope: ScopeState, name: bytes, most: int) -> int:
        """Of the resident ancestors of what has the parent `name`; counted until there are more than `most`."""
        above, entry = 0, self._nearest(scope, name)
        for _ in range(len(scope.entries)):  # parents may form a ring
            if entry is None or above > most:
                break
            above += rounded(entry.size)
            entry = scope.entries.get(entry.parent)
        return above

    def _nearest(self, scope: ScopeState, name: bytes) -> Entry | None:
        entry = scope.entries.get(name)
        return scope.entries.get(self._full.get(name, b"")) if entry is None else entry

    def _unlist(self, child: Child) -> None:
        waiting = self._coming.get(child.parent) if child.parent else None
        if waiting is not None:
            waiting.pop(child, None)
            if not waiting:
                del self._coming[child.parent]
