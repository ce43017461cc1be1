"""What a node knows of one value, of a scope, and of a tenant."""

from __future__ import annotations

from collections import OrderedDict

from anabranch.store.values.scope import Scope
from anabranch.store.values.slices import value_sum


class Tenant:
    """`quota_bytes`, `pin_quota_bytes` 0: none of its own. `order`: its values, least recently used first, kept only
    for a tenant with a quota."""

    __slots__ = ("name", "order", "pin_quota_bytes", "pinned_bytes", "quota_bytes", "used_bytes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.quota_bytes = 0
        self.pin_quota_bytes = 0
        self.used_bytes = 0
        self.pinned_bytes = 0
        self.order: OrderedDict[bytes, Entry] = OrderedDict()


class ScopeState:
    """The values of one scope. `era` grows with each invalidation: what was begun in an earlier one is stale. `filed`:
    its names are on disk, as it has or had values."""

    __slots__ = ("digest", "entries", "era", "filed", "scope", "tenant")

    def __init__(self, digest: bytes, scope: Scope | None, tenant: Tenant) -> None:
        self.digest = digest
        self.scope = scope
        self.tenant = tenant
        self.entries: dict[bytes, Entry] = {}
        self.era = 0
        self.filed = False


class Entry:
    """A committed value in DRAM. `refs`: leases, pins and transfers that use it. `removed`: it has no name any more and
    goes with its last reference. `listed`: eviction knows it; `fresh` not 0: it will soon. `small`: in which order
    it is. `kept`: values under way that are built on it. `uses`: how often it was read."""

    __slots__ = (
        "fresh",
        "generation",
        "kept",
        "listed",
        "name",
        "offset",
        "on_disk",
        "parent",
        "pin",
        "queued",
        "refs",
        "removed",
        "scope",
        "size",
        "slot",
        "small",
        "sums",
        "uses",
    )

    def __init__(
        self,
        name: bytes,
        scope: ScopeState,
        size: int,
        sums: tuple[int, ...],
        parent: bytes,
        offset: int,
        generation: int,
        slot: int,
    ) -> None:
        self.name = name
        self.scope = scope
        self.size = size
        self.sums = sums
        self.parent = parent
        self.offset = offset
        self.generation = generation
        self.slot = slot
        self.refs = 0
        self.kept = 0
        self.uses = 0
        self.removed = False
        self.listed = False
        self.fresh = 0
        self.small = False
        self.on_disk = False
        self.queued = False
        self.pin = 0.0

    @property
    def sum(self) -> int:
        """What tells it from another value."""
        return value_sum(self.size, self.sums)

    @property
    def live(self) -> bool:
        """It can be found under its name."""
        return self.scope.entries.get(self.name) is self
