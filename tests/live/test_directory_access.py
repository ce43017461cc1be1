"""Who may ask a directory, and who may announce to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import Authority

from anabranch.core.authentication import Access, Credentials, TenantRules
from anabranch.core.errors import AccessDenied, AnabranchError, ConfigError, Unavailable
from anabranch.core.live.handshake import Dialer
from anabranch.core.live.tls import Tls
from anabranch.core.wire import FrameDecoder, encode
from anabranch.store.config import DirectoryConfig
from anabranch.store.live.directory_link import DirectoryLink
from anabranch.store.live.directory_server import DirectoryServer
from anabranch.store.live.stat_client import ask_stat
from anabranch.store.messages import Announce, DirectoryToNode, Join, ListNodes, NodeList

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
