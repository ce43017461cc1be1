"""The scopes a node has heard of, and whose they are."""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.paging.extents import rounded
from anabranch.store.values.entries import Entry, ScopeState, Tenant
from anabranch.store.values.scope import Scope


class Scopes:
    """A node learns a scope's tenant, namespace and epoch from a caller's Hello or another node's Introduce; until then
    it knows only its digest, and such values belong to a nameless tenant without a quota."""

    def __init__(self) -> None:
        self._scopes: dict[bytes, ScopeState] = {}
        self._tenants: dict[str, Tenant] = {}
        self.reclaim: list[dict[bytes, Entry]] = []

    def tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name)
        return tenant

    def tenants(self) -> Iterable[Tenant]:
        return self._tenants.values()

    def states(self) -> Iterable[ScopeState]:
        return self._scopes.values()

    def open(self, scope: Scope) -> ScopeState:
        state = self.known(scope.digest())
        if state.scope is None:
            state.scope = scope
            before, state.tenant = state.tenant, self.tenant(scope.tenant)
            for entry in state.entries.values():
                before.used_bytes -= rounded(entry.size)
                state.tenant.used_bytes += rounded(entry.size)
                before.order.pop(entry.name, None)
        return state

    def known(self, digest: bytes) -> ScopeState:
        """The scope with this digest, whether or not its names are known."""
        state = self._scopes.get(digest)
        if state is None:
            state = self._scopes[digest] = ScopeState(digest, None, self.tenant(""))
        return state

    def forget_unused(self, state: ScopeState) -> None:
        """Nobody speaks for the scope any more: if it never had a value, nothing needs to be known of it."""
        if not state.filed and not state.entries and self._scopes.get(state.digest) is state:
            del self._scopes[state.digest]

    def of(self, tenant: str, epoch: str | None) -> list[ScopeState]:
        """All scopes of a tenant, or of one epoch of it."""
        return [
            state
            for state in self._scopes.values()
            if state.scope is not None and state.scope.tenant == tenant and epoch in (None, state.scope.epoch)
        ]

    def invalidate(self, state: ScopeState) -> int:
        """From now on nothing of this scope that was there is found, and puts under way end stale; O(1). What it held
        waits in `reclaim`. Returns how many."""
        gone, state.entries = state.entries, {}
        state.era += 1
        if gone:
            self.reclaim.append(gone)
        return len(gone)
