"""Who may ask a directory, and who may announce to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from certificates import Authority
from value_rig import until

import anabranch
from anabranch.core.authentication import Access, Credentials, TenantRules
from anabranch.core.errors import AccessDenied, AnabranchError, ConfigError, Unavailable
from anabranch.core.live.handshake import Dialer
from anabranch.core.live.tls import Tls
from anabranch.core.wire import FrameDecoder, encode
from anabranch.store.config import DirectoryConfig
from anabranch.store.live.directory_feed import AnnouncingNode
from anabranch.store.live.directory_link import DirectoryLink
from anabranch.store.live.directory_server import DirectoryServer
from anabranch.store.live.stat_client import ask_stat
from anabranch.store.messages import Announce, DirectoryToNode, Join, ListNodes, NodeList
from anabranch.store.outbox import Holdings
from anabranch.testing.live.fake_value_node import FakeValueNode

CLUSTER, ALICE = b"c" * 32, b"a" * 32
ACCESS = Access(cluster_secret=CLUSTER, tenants={"alice": TenantRules(secret=ALICE)})
NODE = Dialer(Credentials(secret=CLUSTER))
TENANT = Dialer(Credentials(secret=ALICE, tenant="alice"))
NOBODY = Dialer(Credentials(secret=b"x" * 32))


@pytest.fixture
def serve() -> Iterator[Callable[..., DirectoryServer]]:
    servers: list[DirectoryServer] = []

    def start(access: Access, tls: Tls | None = None) -> DirectoryServer:
        servers.append(DirectoryServer(DirectoryConfig(node_ttl_s=30), access=access, tls=tls).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def announced(dial: Dialer, address: str) -> bool:
    """Whether this caller can make the directory list a node."""
    with dial(address) as sock:
        sock.sendall(encode(Join(node_id="n9", epoch=1, address="10.9.9.9:1", layout=b"")))
        sock.sendall(encode(Announce(seq=1, reset=True)))
        sock.sendall(encode(ListNodes(op=1)))
        decoder: FrameDecoder[object] = FrameDecoder(DirectoryToNode)
        while data := sock.recv(1 << 16):
            for message in decoder.feed(data):
                if isinstance(message, NodeList):
                    return any(row.node_id == "n9" for row in message.nodes)
    return False


def test_nodes_announce_and_tenants_look_up(serve: Callable[..., DirectoryServer]) -> None:
    address = serve(ACCESS).address
    assert not announced(TENANT, address)
    link = DirectoryLink(address, dial=TENANT)
    assert link.nodes(30) == []
    assert announced(NODE, address)
    link.close()
    assert ask_stat(address, timeout_s=30, dial=TENANT).name == "directory"


def test_a_client_without_the_right_secret_is_told_so_every_time(serve: Callable[..., DirectoryServer]) -> None:
    address = serve(ACCESS).address
    for secret, words in ((None, "asks for a secret"), (b"x" * 32, "does not open")):
        with anabranch.Client(directory=address, secret=secret, timeout_s=30) as client:
            for _ in range(3):
                with pytest.raises(AccessDenied, match=words):
                    client.get("k")


def test_a_node_for_a_directory_and_the_other_way_round(serve: Callable[..., DirectoryServer]) -> None:
    with closing(FakeValueNode()) as node:
        clients = [(anabranch.Client(directory=node.address, timeout_s=30), "is a store node and no directory")]
        for access, words in ((ACCESS, "is a directory and no store node"), (Access(), "or is a directory")):
            clients.append((anabranch.Client(serve(access).address, timeout_s=1), words))
        for client, words in clients:
            with client, pytest.raises(Unavailable, match=words):
                client.get("k")


def test_a_node_that_is_not_let_in_says_so_once(
    serve: Callable[..., DirectoryServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(ACCESS)
    for dial, words in ((Dialer(), "asks for a secret"), (NOBODY, "does not open")):
        caplog.clear()
        denied = server._gate.denied
        node = AnnouncingNode(Join(node_id="n", epoch=1, address="127.0.0.1:1", layout=b""), lambda: Holdings({}))
        link = DirectoryLink(server.address, node, dial)
        until(lambda before=denied: server._gate.denied > before + 3, "several attempts")
        link.close()
        errors = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 1
        assert words in errors[0].getMessage()
        assert "security.secret_file" in errors[0].getMessage()
        assert sum(record.getMessage() == "caller not let in" for record in caplog.records) <= 1


def test_an_etcd_that_is_not_there_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with anabranch.Client(directory="etcd://127.0.0.1:9/x", timeout_s=2) as client:
        for _ in range(3):
            with pytest.raises(Unavailable, match=r"etcd at 127\.0\.0\.1:9 cannot be reached"):
                client.get("k")
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


@pytest.mark.parametrize("dial", [NOBODY, Dialer(Credentials(secret=ALICE, tenant="bob"))])
def test_strangers_get_nothing(serve: Callable[..., DirectoryServer], dial: Dialer) -> None:
    address = serve(ACCESS).address
    with pytest.raises(AccessDenied, match="does not open"):
        ask_stat(address, timeout_s=30, dial=dial)
    link = DirectoryLink(address, dial=dial)
    with pytest.raises(Unavailable, match="does not open"):
        link.where(bytes(32), timeout_s=30)
    link.close()
    # Without a secret the challenge is all that comes.
    with pytest.raises(AnabranchError):
        ask_stat(address, timeout_s=30)


def test_certificates_do_as_well(serve: Callable[..., DirectoryServer], tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    address = serve(Access(tls=True), authority.tls("node:d0")).address
    assert announced(Dialer(tls=authority.tls("node:n9")), address)
    tenant = Dialer(Credentials(tenant="alice"), authority.tls("tenant:alice"))
    link = DirectoryLink(address, dial=tenant)
    assert [row.node_id for row in link.nodes(30)] in ([], ["n9"])
    link.close()
    with pytest.raises(AnabranchError):
        ask_stat(address, timeout_s=1)


def test_an_open_directory_stays_on_this_host() -> None:
    with pytest.raises(ConfigError, match=r"set security\.secret_file"):
        DirectoryServer(DirectoryConfig(listen="0.0.0.0:0"))
