"""Who is calling: proofs of a shared secret, tenants, and what each caller may do.

**Covers** the proofs of both sides of a connection, tenants' salts, the rule that an open store stays on loopback.
**Does not cover** reading secrets (`store.values.live.credentials`), sockets (`core.live.handshake`) or certificates
(`core.live.tls`, which gives `Access.check` the name in the certificate).

A proof is a BLAKE3 MAC under a key derived from the secret, over both nonces and everything that the caller claims: it
cannot be replayed, moved to another tenant, or reflected (each side's key has its own context). The bytes after it are
as safe as the wire is; where somebody may alter them, use TLS.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec
from blake3 import blake3

from anabranch.core.errors import ConfigError

NONCE_BYTES = 16
PROOF_BYTES = 32
SALT_BYTES = 32
MAX_NAME_BYTES = 256
TENANT_PREFIX = "tenant:"
NODE_PREFIX = "node:"
_HELLO_CONTEXT = "anabranch 2026-12-01 proof of a caller v1"
_WELCOME_CONTEXT = "anabranch 2026-12-01 proof of a node v1"
_SALT_CONTEXT = "anabranch 2026-12-01 tenant salt v1"


class Claim(Protocol):
    """What a caller says of itself; `store.values.messages.Hello` is one."""

    @property
    def session(self) -> bytes: ...
    @property
    def nonce(self) -> bytes: ...
    @property
    def tenant(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def epoch(self) -> str: ...
    @property
    def proof(self) -> bytes: ...


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller has: a secret (its tenant's or the cluster's; empty: none) and whom it speaks for."""

    secret: bytes = b""
    tenant: str = "default"
    namespace: str = "default"
    epoch: str = ""

    def __repr__(self) -> str:
        return f"Credentials(tenant={self.tenant!r}, namespace={self.namespace!r}, epoch={self.epoch!r}, secret=***)"


class TenantRules(msgspec.Struct, frozen=True, kw_only=True):
    """`secret` empty: only trusted callers speak for this tenant. Quotas in bytes, 0: none of its own. `encrypt`: what
    leaves DRAM is sealed with the tenant's key."""

    secret: bytes = b""
    quota_bytes: int = 0
    pin_quota_bytes: int = 0
    encrypt: bool = False

    def __repr__(self) -> str:
        return f"TenantRules(quota_bytes={self.quota_bytes}, encrypt={self.encrypt}, secret=***)"


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A caller that was let in. `trusted`: any tenant, admin's calls. `secret`: what it proved, for the node's own
    proof; empty if it proved none."""

    tenant: str
    trusted: bool
    salt: bytes
    quota_bytes: int = 0
    pin_quota_bytes: int = 0
    encrypt: bool = False
    secret: bytes = b""

    def __repr__(self) -> str:
        return f"Caller(tenant={self.tenant!r}, trusted={self.trusted})"


class Denial(msgspec.Struct, frozen=True, kw_only=True):
    """Why a caller was not let in; safe to send to it."""

    reason: str
    code: str = "denied"


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one node, equal on all nodes of a store.

    A proof of a tenant's secret gives that tenant and nothing else, a proof of `cluster_secret` everything. A
    certificate (`tls`: every caller has one, signed by our CA) that names a tenant or a node says the same and needs no
    proof. With neither secrets nor TLS everybody is trusted, which `must_authenticate` allows on loopback only.
    """

    cluster_secret: bytes = b""
    tenants: Mapping[str, TenantRules] = {}
    tls: bool = False

    def __repr__(self) -> str:
        return f"Access({'authenticating' if self.authenticates else 'open'}, tenants={sorted(self.tenants)})"

    @property
    def authenticates(self) -> bool:
        """Callers need a proof or a certificate."""
        return self.tls or self.asks_proof

    @property
    def asks_proof(self) -> bool:
        """What `Greeting.authenticate` says."""
        return bool(self.cluster_secret) or any(rules.secret for rules in self.tenants.values())

    def rules(self, tenant: str) -> TenantRules:
        return self.tenants.get(tenant, _NO_RULES)

    def salt(self, tenant: str) -> bytes:
        """SALT_BYTES from which only this tenant's names come; equal on every node with the same secrets."""
        return tenant_salt(self.cluster_secret, self.rules(tenant).secret, tenant)

    def check(self, claim: Claim, nonce: bytes, certificate: str = "") -> Caller | Denial:
        """Let a caller in, or say why not. `nonce`: the one this node greeted with. `certificate`: the verified name in
        the caller's certificate (`tenant:NAME`, `node:NAME`), empty without TLS."""
        if denial := _malformed(claim):
            return denial
        if certificate.startswith(NODE_PREFIX):
            return self._caller(claim.tenant, trusted=True)
        if certificate.startswith(TENANT_PREFIX):
            if certificate != TENANT_PREFIX + claim.tenant:
                return Denial(reason=f"the certificate is {certificate}'s and opens no other tenant")
            return self._caller(claim.tenant, trusted=False)
        if not self.authenticates:
            return self._caller(claim.tenant, trusted=True)
        if not self.asks_proof:
            return Denial(reason="the certificate names neither a tenant (tenant:NAME) nor a node (node:NAME)")
        return self._proven(claim, nonce)

    def _proven(self, claim: Claim, nonce: bytes) -> Caller | Denial:
        if not claim.proof:
            return Denial(reason="a secret is needed here: give the client secret_file, the tenant's or the cluster's")
        for secret, trusted in ((self.rules(claim.tenant).secret, False), (self.cluster_secret, True)):
            if secret and proves(secret, nonce, claim):
                return self._caller(claim.tenant, trusted=trusted, secret=secret)
        # One answer for an unknown tenant and for a wrong secret: names of tenants are nobody's business.
        return Denial(reason=f"the secret does not open tenant '{claim.tenant}'")

    def _caller(self, tenant: str, *, trusted: bool, secret: bytes = b"") -> Caller:
        rules = self.rules(tenant)
        return Caller(
            tenant=tenant,
            trusted=trusted,
            salt=self.salt(tenant),
            quota_bytes=rules.quota_bytes,
            pin_quota_bytes=rules.pin_quota_bytes,
            encrypt=rules.encrypt,
            secret=secret,
        )


_NO_RULES = TenantRules()
OPEN = Access()


# --- proofs -------------------------------------------------------------------------------------------------------


def hello_proof(
    secret: bytes, nonce_node: bytes, nonce_client: bytes, session: bytes, tenant: str, namespace: str, epoch: str
) -> bytes:
    """PROOF_BYTES that only somebody with `secret` can make for this connection and these claims."""
    return _proof(_HELLO_CONTEXT, secret, nonce_node, nonce_client, session, tenant, namespace, epoch)


def welcome_proof(
    secret: bytes, nonce_node: bytes, nonce_client: bytes, session: bytes, tenant: str, namespace: str, epoch: str
) -> bytes:
    """The node's answer to `hello_proof`, under another key: an echo of the caller's proof proves nothing."""
    return _proof(_WELCOME_CONTEXT, secret, nonce_node, nonce_client, session, tenant, namespace, epoch)


def proves(secret: bytes, nonce_node: bytes, claim: Claim) -> bool:
    """Whether the claim's proof was made with `secret`, in constant time."""
    expected = hello_proof(secret, nonce_node, claim.nonce, claim.session, claim.tenant, claim.namespace, claim.epoch)
    return hmac.compare_digest(expected, claim.proof)


def confirms(secret: bytes, nonce_node: bytes, claim: Claim, proof: bytes) -> bool:
    """Whether a Welcome's `proof` comes from a node that knows `secret`, in constant time."""
    expected = welcome_proof(secret, nonce_node, claim.nonce, claim.session, claim.tenant, claim.namespace, claim.epoch)
    return hmac.compare_digest(expected, proof)


def answer(caller: Caller, nonce_node: bytes, claim: Claim) -> bytes:
    """`Welcome.proof` for a caller that was let in: empty if it proved no secret."""
    if not caller.secret:
        return b""
    return welcome_proof(
        caller.secret, nonce_node, claim.nonce, claim.session, claim.tenant, claim.namespace, claim.epoch
    )


def tenant_salt(cluster_secret: bytes, tenant_secret: bytes, tenant: str) -> bytes:
    return blake3(_fields(cluster_secret, tenant_secret, tenant.encode()), derive_key_context=_SALT_CONTEXT).digest()


# --- where a store may be open -----------------------------------------------------------------------------------


def is_local(address: str) -> bool:
    """`unix:/path`, or `host:port` with a loopback host. A host name other than localhost is not: it may resolve to
    anything."""
    if address.startswith("unix:"):
        return True
    return is_loopback(address.rpartition(":")[0].strip("[]"))


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def must_authenticate(addresses: Iterable[str], access: Access) -> None:
    """Raises ConfigError if this process would listen beyond this host and let everybody in."""
    exposed = [address for address in addresses if address and not is_local(address)]
    if exposed and not access.authenticates:
        raise ConfigError(
            f"{', '.join(exposed)} can be reached from other hosts and nothing protects it: set security.secret_file "
            "(`anabranch store secret new FILE` makes one) or security.tls_cert, tls_key and tls_ca"
        )


def _malformed(claim: Claim) -> Denial | None:
    if not NONCE_BYTES <= len(claim.nonce) <= 64 or len(claim.session) != NONCE_BYTES:
        return Denial(reason=f"nonce and session have {NONCE_BYTES} bytes each", code="invalid_input")
    for what, text in (("tenant", claim.tenant), ("namespace", claim.namespace), ("epoch", claim.epoch)):
        if len(text.encode()) > MAX_NAME_BYTES:
            return Denial(reason=f"{what} is longer than {MAX_NAME_BYTES} bytes", code="invalid_input")
    if not claim.tenant:
        return Denial(reason="the tenant has no name", code="invalid_input")
    return None


def _proof(context: str, secret: bytes, *parts: bytes | str) -> bytes:
    key = blake3(secret, derive_key_context=context).digest()
    return blake3(_fields(*(part.encode() if isinstance(part, str) else part for part in parts)), key=key).digest()


def _fields(*parts: bytes) -> bytes:
    """Each with its length: no two lists of parts look alike."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
