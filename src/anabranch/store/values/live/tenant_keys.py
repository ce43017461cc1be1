"""Which tenants' values are sealed once they leave DRAM, and the end of their keys."""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.core.authentication import Access
from anabranch.store.values.live.encryption import TenantCiphers
from anabranch.store.values.scope import Scope


class TenantKeys:
    """`ciphers` seals and opens; `access` says for whom. Thread-safe."""

    def __init__(self, ciphers: TenantCiphers, access: Access) -> None:
        self.ciphers = ciphers
        self._access = access

    def admit(self, scope: Scope) -> None:
        """Before the first value of a scope. Raises OSError."""
        self._admit(scope.tenant, scope.digest())

    def renew(self, tenant: str, digests: Iterable[bytes]) -> int:
        """After everything of a tenant was invalidated: its old key goes for good, so that nothing of it can be read
        anywhere; what it puts from now on is sealed with a new one. 0, or -1 where the old one may still be there."""
        try:
            self.ciphers.forget(tenant)
            for digest in digests:
                self._admit(tenant, digest)
        except OSError:
            return -1
        return 0

    def _admit(self, tenant: str, digest: bytes) -> None:
        self.ciphers.admit(tenant, digest, encrypt=self._access.rules(tenant).encrypt)
