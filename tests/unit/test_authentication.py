from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.authentication import (
    NONCE_BYTES,
    Access,
    Caller,
    Credentials,
    Denial,
    TenantRules,
    hello_proof,
    is_local,
    must_authenticate,
    tenant_salt,
    welcome_proof,
)
from anabranch.core.errors import AccessDenied, ConfigError, WireError
from anabranch.store.values.introduction import admit, admitted, hello
from anabranch.store.values.messages import Denied, Greeting, Hello, Welcome

CLUSTER, ALICE, BOB = b"c" * 32, b"a" * 32, b"b" * 32
ACCESS = Access(
    cluster_secret=CLUSTER,
    tenants={
        "alice": TenantRules(secret=ALICE, quota_bytes=100, pin_quota_bytes=10, encrypt=True),
        "bob": TenantRules(secret=BOB),
        "carol": TenantRules(quota_bytes=5),
    },
)
NODE_NONCE, CLIENT_NONCE, SESSION = b"n" * NONCE_BYTES, b"k" * NONCE_BYTES, b"s" * NONCE_BYTES
GREETING = Greeting(node_id="n0", nonce=NODE_NONCE, authenticate=True)


def introduce(access: Access, credentials: Credentials, greeting: Greeting = GREETING) -> Caller | Denied:
    sent = hello(credentials, greeting, SESSION, CLIENT_NONCE)
    verdict = admit(access, greeting, sent)
    if isinstance(verdict, Denied):
        with pytest.raises(AccessDenied):
            admitted(credentials, greeting, sent, verdict)
        return verdict
    caller, proof = verdict
    admitted(credentials, greeting, sent, Welcome(node_id="n0", salt=caller.salt, trusted=caller.trusted, proof=proof))
    return caller


def test_a_tenants_secret_opens_that_tenant_and_the_clusters_opens_all() -> None:
    alice = introduce(ACCESS, Credentials(secret=ALICE, tenant="alice"))
    assert isinstance(alice, Caller)
    assert (alice.trusted, alice.quota_bytes, alice.pin_quota_bytes, alice.encrypt) == (False, 100, 10, True)
    for tenant in ("alice", "bob", "carol", "unheard of"):
        trusted = introduce(ACCESS, Credentials(secret=CLUSTER, tenant=tenant))
        assert isinstance(trusted, Caller)
        assert trusted.trusted
        assert trusted.salt == ACCESS.salt(tenant)
    assert alice.salt == ACCESS.salt("alice")


@pytest.mark.parametrize("tenant", ["bob", "carol", "default", "unheard of"])
def test_a_tenants_secret_opens_no_other_tenant(tenant: str) -> None:
    denied = introduce(ACCESS, Credentials(secret=ALICE, tenant=tenant))
    assert isinstance(denied, Denied)
    assert denied.reason == f"the secret does not open tenant '{tenant}'"


def test_no_proof_no_entry() -> None:
    denied = introduce(ACCESS, Credentials(tenant="alice"))
    assert isinstance(denied, Denied)
    assert "secret" in denied.reason
    assert isinstance(introduce(ACCESS, Credentials(secret=b"x" * 32, tenant="carol")), Denied)


def test_an_open_store_trusts_everybody_and_still_applies_quotas() -> None:
    caller = introduce(
        Access(tenants={"carol": TenantRules(quota_bytes=5)}),
        Credentials(tenant="carol"),
        Greeting(node_id="n0", nonce=NODE_NONCE),
    )
    assert isinstance(caller, Caller)
    assert (caller.trusted, caller.quota_bytes) == (True, 5)


def test_a_client_with_a_secret_trusts_no_node_without() -> None:
    credentials = Credentials(secret=CLUSTER)
    with pytest.raises(AccessDenied, match="asks for no secret"):
        hello(credentials, Greeting(node_id="n0", nonce=NODE_NONCE), SESSION, CLIENT_NONCE)
    sent = hello(credentials, GREETING, SESSION, CLIENT_NONCE)
    for proof in (b"", sent.proof, b"z" * 32):
        with pytest.raises(AccessDenied, match="does not know"):
            admitted(credentials, GREETING, sent, Welcome(node_id="n0", salt=b"", trusted=True, proof=proof))


def test_protocols_must_agree() -> None:
    with pytest.raises(WireError, match="protocol"):
        hello(Credentials(), Greeting(node_id="n0", nonce=NODE_NONCE, protocol=9), SESSION, CLIENT_NONCE)
    reply = admit(ACCESS, GREETING, Hello(session=SESSION, nonce=CLIENT_NONCE, protocol=9))
    assert isinstance(reply, Denied)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("session", b"t" * NONCE_BYTES),
        ("nonce", b"l" * NONCE_BYTES),
        ("tenant", "bob"),
        ("namespace", "other"),
        ("epoch", "2"),
        ("proof", b""),
    ],
)
def test_a_proof_holds_for_one_connection_and_its_claims(field: str, other: object) -> None:
    access = Access(cluster_secret=CLUSTER)
    sent = hello(Credentials(secret=CLUSTER, tenant="alice"), GREETING, SESSION, CLIENT_NONCE)
    fields = {name: getattr(sent, name) for name in sent.__struct_fields__}
    assert isinstance(access.check(sent, NODE_NONCE), Caller)
    assert isinstance(access.check(Hello(**{**fields, field: other}), NODE_NONCE), Denial)
    assert isinstance(access.check(sent, b"m" * NONCE_BYTES), Denial)


def test_malformed_claims_are_refused_before_anything_else() -> None:
    for claim in (
        Hello(session=b"", nonce=CLIENT_NONCE),
        Hello(session=SESSION, nonce=b""),
        Hello(session=SESSION, nonce=b"x" * 65),
        Hello(session=SESSION, nonce=CLIENT_NONCE, tenant=""),
        Hello(session=SESSION, nonce=CLIENT_NONCE, epoch="é" * 200),
    ):
        for access in (Access(), ACCESS):
            denial = access.check(claim, NODE_NONCE)
            assert isinstance(denial, Denial)
            assert denial.code == "invalid_input"


def test_certificates() -> None:
    access = Access(tls=True)
    claim = Hello(session=SESSION, nonce=CLIENT_NONCE, tenant="alice")
    by_tenant = access.check(claim, NODE_NONCE, "tenant:alice")
    by_node = access.check(claim, NODE_NONCE, "node:n1")
    assert isinstance(by_tenant, Caller)
    assert isinstance(by_node, Caller)
    assert (by_tenant.trusted, by_node.trusted) == (False, True)
    for certificate in ("tenant:bob", "tenant:", "alice", ""):
        assert isinstance(access.check(claim, NODE_NONCE, certificate), Denial)
    # A certificate that names neither leaves the proof to decide.
    both = Access(tls=True, cluster_secret=CLUSTER)
    assert isinstance(both.check(claim, NODE_NONCE, "laptop"), Denial)
    sent = hello(Credentials(secret=CLUSTER, tenant="alice"), GREETING, SESSION, CLIENT_NONCE)
    assert isinstance(both.check(sent, NODE_NONCE, "laptop"), Caller)


@given(st.lists(st.text(max_size=4), min_size=3, max_size=3), st.lists(st.text(max_size=4), min_size=3, max_size=3))
def test_different_claims_have_different_proofs(one: list[str], two: list[str]) -> None:
    def both(names: list[str]) -> tuple[bytes, bytes]:
        tenant, namespace, epoch = names
        arguments = (CLUSTER, NODE_NONCE, CLIENT_NONCE, SESSION, tenant, namespace, epoch)
        return hello_proof(*arguments), welcome_proof(*arguments)

    assert (both(one) == both(two)) == (one == two)
    assert both(one)[0] != both(one)[1]


def test_salts_differ_by_every_part() -> None:
    salts = {
        tenant_salt(cluster, secret, tenant) for cluster in (b"", CLUSTER) for secret in (b"", ALICE) for tenant in "ab"
    }
    assert len(salts) == 8


def test_secrets_do_not_show() -> None:
    caller = introduce(ACCESS, Credentials(secret=ALICE, tenant="alice"))
    for thing in (ACCESS, ACCESS.tenants["alice"], Credentials(secret=ALICE), caller):
        assert "aaaa" not in repr(thing)
        assert "cccc" not in repr(thing)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/tmp/x", True),
        ("127.0.0.1:7070", True),
        ("127.9.9.9:1", True),
        ("localhost:0", True),
        ("[::1]:7070", True),
        ("0.0.0.0:7070", False),
        (":7070", False),
        ("[::]:7070", False),
        ("10.0.0.1:7070", False),
        ("node-1:7070", False),
        ("localhost.example:7070", False),
    ],
)
def test_what_listens_beyond_this_host_needs_a_secret(address: str, local: bool) -> None:
    assert is_local(address) == local
    must_authenticate(["unix:/a", address], ACCESS)
    must_authenticate(["unix:/a", address], Access(tls=True))
    if local:
        must_authenticate(["", address], Access())
    else:
        with pytest.raises(ConfigError, match=r"set security\.secret_file"):
            must_authenticate(["unix:/a", address], Access())
