"""What a node shows of its shelf in shared memory: the index for clients, the records for its successor."""

from __future__ import annotations

from anabranch.store.values.contracts import Place, SharedIndex
from anabranch.store.values.entries import Entry
from anabranch.store.values.live.node_memory import NodeMemory
from anabranch.store.values.live.node_records import NodeRecords
from anabranch.store.values.live.node_scopes import ScopeFile

GENERATIONS = 1 << 32
"""The index keeps a generation in 32 bits."""


class NodeMirror:
    """`shelf.Mirror`. An entry is recorded when its bytes are in place, and erased before they may change."""

    def __init__(self, memory: NodeMemory, records: NodeRecords, index: SharedIndex | None, scopes: ScopeFile) -> None:
        self._data = memory.data
        self._records = records
        self._index = index
        self._scopes = scopes

    def put(self, entry: Entry) -> None:
        state = entry.scope
        scope = state.digest
        if not state.filed and state.scope is not None:
            self._scopes.opened(state.scope)
            state.filed = True
        self._records.write(entry, scope)
        if self._index is not None:
            self._index.put(entry.name, scope, Place(entry.offset, entry.size, entry.generation % GENERATIONS))

    def discard(self, entry: Entry) -> None:
        if self._index is not None:
            self._index.discard(entry.name)
        self._records.erase(entry.slot)

    def move(self, source: int, target: int, size: int) -> None:
        self._data[target : target + size] = self._data[source : source + size]
