"""Hostile callers against real nodes: 0 bytes without a proof, 0 bytes of another tenant, whatever they claim."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from store_processes import until

from anabranch.cluster.live.store_process import Running, start_directory, start_node
from anabranch.cluster.settings import Settings
from anabranch.core.authentication import NONCE_BYTES, Credentials, hello_proof
from anabranch.core.errors import AccessDenied, AnabranchError, ConfigError, Unavailable, WireError
from anabranch.core.live.link import connect
from anabranch.core.live.strangers import MOST
from anabranch.core.messages import Message
from anabranch.core.wire import FrameDecoder, encode
from anabranch.store.config import DirectoryConfig
from anabranch.store.values.config import SecurityConfig, StoreConfig, WriteConfig
from anabranch.store.values.live.administration import Administrator
from anabranch.store.values.live.client import Client
from anabranch.store.values.live.credentials import new_secret, read_secret, tls_of
from anabranch.store.values.live.lane import Lane
from anabranch.store.values.live.session import Session
from anabranch.store.values.messages import (
    Denied,
    Done,
    Drain,
    Entries,
    Exists,
    Found,
    Get,
    Greeting,
    Hello,
    Introduce,
    Invalidate,
    Listing,
    NodeToClient,
    Presence,
    Read,
    Remove,
    Verify,
    Welcome,
)
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import Scope, name_of

VALUE = b"alice's own words" * 100


class Site:
    """One node that knows alice and bob."""

    def __init__(self, folder: Path) -> None:
        for name in ("cluster", "alice", "bob"):
            new_secret(str(folder / f"{name}.secret"))
        tenants = folder / "tenants.toml"
        tenants.touch(mode=0o600)
        tenants.write_text('[alice]\nsecret_file = "alice.secret"\n[bob]\nsecret_file = "bob.secret"\n')
        self.folder = folder
        security = SecurityConfig(secret_file=str(folder / "cluster.secret"), tenants_file=str(tenants))
        settings = Settings(store=StoreConfig(dram_bytes=8 << 20, listen="127.0.0.1:0"), security=security)
        self.node = start_node(settings, "n1", data_dir=str(folder / "data"))
        self.address = self.node.address

    def secret(self, name: str) -> bytes:
        return read_secret(str(self.folder / f"{name}.secret"), "test")

    def lane(self, tenant: str, secret: str | None = None, session: Session | None = None) -> tuple[Lane, Welcome]:
        credentials = Credentials(secret=self.secret(secret or tenant), tenant=tenant)
        return (session or Session(credentials)).open(self.address, 30.0)

    def client(self, tenant: str, secret: str | None = None, **options: Any) -> Client:
        return Client(self.address, tenant=tenant, secret=self.secret(secret or tenant), timeout_s=30.0, **options)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    running = Site(tmp_path_factory.mktemp("site"))
    with running.client("alice") as alice:
        assert alice.put("words", VALUE)
    yield running
    running.node.stop()


def ask(lane: Lane, message: Message) -> Any:
    lane.until(time.monotonic() + 30.0)
    lane.send(message)
    return lane.receive()


def first_words(address: str, *sent: bytes) -> tuple[list[Any], bytes]:
    """All messages that come back for what a stranger sends, and the bytes."""
    decoder: FrameDecoder[Any] = FrameDecoder(NodeToClient)
    messages, raw = [], b""
    # The node may hang up at any moment.
    with connect(address) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.settimeout(30.0)
        for part in sent:
            sock.sendall(part)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(1 << 16):
            raw += data
            messages += decoder.feed(data)
    return messages, raw


HELLO = Hello(session=b"s" * NONCE_BYTES, nonce=b"n" * NONCE_BYTES, tenant="alice")


@pytest.mark.parametrize(
    "sent",
    [
        [encode(Get(op=1, names=bytes(32), limit=1 << 20))],
        [encode(HELLO), encode(Get(op=1, names=bytes(32), limit=1 << 20))],
        [encode(Hello(session=b"s" * 16, nonce=b"n" * 16, tenant="alice", proof=bytes(32))), encode(Listing(op=1))],
        [encode(Hello(session=b"s" * 16, nonce=b"n" * 16, tenant="nobody", proof=b"x" * 99)), encode(Verify(op=1))],
        [encode(HELLO), encode(HELLO), encode(Drain(op=1))],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b"\x00\x00\x10\x00" + bytes(4096)],
        [b"\x00\xff\xff\xff"],
        [],
    ],
)
def test_without_a_proof_nothing_comes_but_greeting_and_refusal(site: Site, sent: list[bytes]) -> None:
    messages, raw = first_words(site.address, *sent)
    assert {type(message) for message in messages} <= {Greeting, Denied}
    assert b"alice's own" not in raw


def test_a_recorded_introduction_opens_no_second_lane(site: Site) -> None:
    """The proof holds for the nonce of its own greeting."""
    greeting = Greeting(node_id="n1", nonce=b"m" * NONCE_BYTES, authenticate=True)
    who = ("alice", "default", "")
    proof = hello_proof(site.secret("alice"), greeting.nonce, HELLO.nonce, HELLO.session, *who)
    replay = Hello(session=HELLO.session, nonce=HELLO.nonce, tenant="alice", proof=proof)
    messages, _ = first_words(site.address, encode(replay))
    assert [type(message) for message in messages] == [Greeting, Denied]


def names_of_alice(site: Site) -> bytes:
    lane, welcome = site.lane("alice", "cluster")
    lane.close()
    return name_of("words", Scope("alice").name_key(welcome.salt))


ATTACKS: list[tuple[str, Callable[[bytes, bytes], Message], Callable[[Any], bool]]] = [
    ("a get by the right name", lambda name, scope: Get(op=1, names=name, limit=1 << 20),
     lambda got: set(got.outcomes) <= {Outcome.MISSING, Outcome.UNKNOWN}),
    ("a view by the right name", lambda name, scope: Get(op=1, names=name, views=True),
     lambda got: set(got.outcomes) <= {Outcome.MISSING, Outcome.UNKNOWN} and not got.offsets),
    ("a get that names the scope", lambda name, scope: Get(op=1, names=name, limit=1 << 20, scopes=scope),
     lambda got: set(got.outcomes) == {Outcome.DENIED}),
    ("whether it is there", lambda name, scope: Exists(op=1, names=name), lambda got: got.tiers == b"\0"),
    ("its removal", lambda name, scope: Remove(op=1, names=name), lambda got: Outcome.OK not in got.outcomes),
    ("its invalidation", lambda name, scope: Invalidate(op=1, tenant="alice"),
     lambda got: set(got.outcomes) == {Outcome.DENIED}),
    ("a list", lambda name, scope: Listing(op=1), lambda got: got.rows == [] if isinstance(got, Entries) else True),
    ("a check of everything", lambda name, scope: Verify(op=1), lambda got: not got.places),
    ("the node's end", lambda name, scope: Drain(op=1, deadline_s=0.1),
     lambda got: set(got.outcomes) == {Outcome.DENIED}),
]  # fmt: skip


@pytest.mark.parametrize(("what", "attack", "harmless"), ATTACKS, ids=[attack[0] for attack in ATTACKS])
def test_a_tenant_gets_nothing_of_another(
    site: Site, what: str, attack: Callable[[bytes, bytes], Message], harmless: Callable[[Any], bool]
) -> None:
    name, scope = names_of_alice(site), Scope("alice").digest()
    lane, welcome = site.lane("bob")
    with closing(lane):
        assert not welcome.trusted
        assert (welcome.arena_path, welcome.index_path, welcome.local_address) == ("", "", "")
        lane.send(Introduce(scopes=[("alice", "default", "")]))
        reply = ask(lane, attack(name, scope))
        assert isinstance(reply, Found | Presence | Done | Entries | Denied)
        assert isinstance(reply, Denied) or harmless(reply), f"{what}: {reply}"
    with site.client("alice", local=False) as alice:
        assert alice.get("words") == VALUE


def test_another_tenants_lease_reads_nothing(site: Site) -> None:
    """Not even in a session that calls itself the same."""
    session = Session(Credentials(secret=site.secret("alice"), tenant="alice"))
    lane, _ = site.lane("alice", session=session)
    thief = Session(Credentials(secret=site.secret("bob"), tenant="bob"))
    thief.id = session.id
    with closing(lane):
        found = ask(lane, Get(op=1, names=names_of_alice(site)))
        assert found.lease
        other, _ = site.lane("bob", session=thief)
        with closing(other):
            other.until(time.monotonic() + 30.0)
            for lease in range(found.lease - 5, found.lease + 5):
                other.send(Read(lease=lease, item=0, slice=0))
                length = bytearray(8)
                try:
                    other.receive_bytes(memoryview(length))
                except (Unavailable, WireError):
                    return  # it hung up
                assert length == bytes(8)


def test_silent_callers_keep_nobody_out(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(closing(connect(site.address))) for _ in range(MOST + 20)]
        for sock in silent[:20]:
            sock.settimeout(60.0)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass  # until it is disconnected
        with site.client("alice", local=False) as alice:
            assert alice.get("words") == VALUE


def test_the_cluster_secret_speaks_for_every_tenant(site: Site) -> None:
    with site.client("alice", "cluster") as admin:
        assert admin.get("words") == VALUE
    with site.client("bob", "cluster") as admin:
        assert admin.get("words") is None


# --- TLS -----------------------------------------------------------------------------------------------------------


class TlsSite:
    """A directory and two nodes with certificates and no secret."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.folder = folder
        self.directory = start_directory(
            Settings(directory=DirectoryConfig(listen="127.0.0.1:0"), security=self.security("node:d0"))
        )
        self.nodes: list[Running] = [self._node(name) for name in ("n1", "n2")]

    def security(self, name: str) -> SecurityConfig:
        cert, key = self.authority.issue(name)
        return SecurityConfig(tls_cert=cert, tls_key=key, tls_ca=self.authority.ca)

    def client(self, name: str, tenant: str, **options: Any) -> Client:
        return Client(
            directory=self.directory.address, tenant=tenant, tls=self.security(name), timeout_s=30.0, **options
        )

    def _node(self, name: str) -> Running:
        settings = Settings(
            store=StoreConfig(dram_bytes=16 << 20, listen="127.0.0.1:0", directory=self.directory.address),
            write=WriteConfig(replicas=2),
            security=self.security(f"node:{name}"),
        )
        return start_node(settings, name, data_dir=str(self.folder / name))

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()
        self.directory.stop()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsSite]:
    site = TlsSite(tmp_path_factory.mktemp("tls"))
    yield site
    site.stop()


def test_values_of_every_size_go_through_tls_to_two_nodes(secured: TlsSite) -> None:
    session = Session(Credentials(tenant="alice"), tls=tls_of(secured.security("node:admin")))
    with closing(Administrator(session, secured.directory.address, timeout_s=30.0)) as admin:
        until(lambda: len(admin.addresses()) == 2 and admin.report().healthy, "both nodes have joined")
    with secured.client("tenant:alice", "alice", local=False) as alice:
        values = [secrets.token_bytes(size) for size in (0, 1, 4096, 1_000_000, 3_000_000)]
        keys = [f"k{i}" for i in range(len(values))]
        assert all(alice.put_many(keys, values, replicas=2))
        assert [alice.get(key) for key in keys] == values
        buffers = [bytearray(len(value)) for value in values]
        assert all(alice.get_many_into(keys, buffers))
        assert buffers == values
        assert all(alice.exists_many(keys))
    with secured.client("tenant:bob", "bob") as bob:
        assert bob.get("k1") is None


def test_a_certificate_opens_its_own_tenant(secured: TlsSite, tmp_path: Path) -> None:
    for name in ("tenant:bob", "laptop"):
        with pytest.raises(AnabranchError) as caught, secured.client(name, "alice") as client:
            client.get("k1")
        assert isinstance(caught.value, AccessDenied | Unavailable)
    stranger = Authority(tmp_path, "stranger")
    cert, key = stranger.issue("tenant:alice")
    wrong = SecurityConfig(tls_cert=cert, tls_key=key, tls_ca=secured.authority.ca)
    with (
        pytest.raises(AnabranchError),
        Client(secured.nodes[0].address, tenant="alice", tls=wrong, timeout_s=30.0) as client,
    ):
        client.get("k1")
    with pytest.raises(AnabranchError), Client(secured.nodes[0].address, tenant="alice", timeout_s=1.0) as client:
        client.get("k1")


def test_an_open_node_stays_on_this_host(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set security\.secret_file"):
        start_node(Settings(store=StoreConfig(listen="0.0.0.0:0")), "n1", data_dir=str(tmp_path))
