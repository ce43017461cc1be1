from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from certificates import Authority

from anabranch.core.errors import AccessDenied, AnabranchError, ConfigError, Unavailable
from anabranch.core.live.link import Link
from anabranch.core.live.tls import Tls, TlsSocket, certificate_name, is_tls, name_in
from anabranch.store.messages import NodeToDirectory, Stat, StatRequest


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def pairs() -> Iterator[Callable[[Tls, Tls], tuple[TlsSocket, TlsSocket]]]:
    opened: list[socket.socket] = []

    def accept(server: Tls, sock: socket.socket) -> TlsSocket:
        wrapped = server.wrap_server(sock)
        opened.append(wrapped)
        return wrapped

    def connected(server: Tls, client: Tls) -> tuple[TlsSocket, TlsSocket]:
        left, right = socket.socketpair()
        opened.extend((left, right))
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(accept, server, left)
            dialled = client.wrap_client(right, "node-1.example")
            opened.append(dialled)
            return accepted.result(), dialled

    yield connected
    for sock in opened:
        sock.close()


Pairs = Callable[[Tls, Tls], tuple[TlsSocket, TlsSocket]]


def test_each_side_learns_the_others_name(authority: Authority, pairs: Pairs) -> None:
    server, client = pairs(authority.tls("node:n1"), authority.tls("tenant:alice"))
    assert certificate_name(server) == "tenant:alice"
    assert certificate_name(client) == "node:n1"
    server, client = pairs(authority.tls("10.0.0.1", "node:n2"), authority.tls("laptop"))
    assert (certificate_name(server), certificate_name(client)) == ("laptop", "node:n2")
    assert is_tls(server)
    left, right = socket.socketpair()
    with left, right:
        assert not is_tls(left)
        assert certificate_name(left) == ""


def test_a_certificate_with_two_names_is_refused(authority: Authority, pairs: Pairs) -> None:
    with pytest.raises(AnabranchError, match="more than one caller"):
        pairs(authority.tls("node:n1", "tenant:alice"), authority.tls("tenant:alice"))
    assert name_in({}) == ""


@pytest.mark.parametrize("server_name", ["tenant:mallory", "n1"])
def test_a_client_talks_to_nodes_only(authority: Authority, pairs: Pairs, server_name: str) -> None:
    with pytest.raises(AccessDenied, match="no node's"):
        pairs(authority.tls(server_name), authority.tls("tenant:alice"))


def test_strangers_and_ended_certificates_are_refused(authority: Authority, pairs: Pairs, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    with pytest.raises(AnabranchError, match="certificate"):
        pairs(stranger.tls("node:n1"), authority.tls("tenant:alice"))
    with pytest.raises(AnabranchError, match="expired"):
        pairs(authority.tls("node:n1", days=-1), authority.tls("tenant:alice"))
    # TLS 1.3: the client is done before the server has seen its certificate. The server refuses it all the same.
    cert, key = stranger.issue("tenant:alice")
    mallory = Tls(cert, key, authority.ca)
    with pytest.raises(AccessDenied, match="not accepted"):
        pairs(authority.tls("node:n1"), mallory)


def test_peers_without_tls_are_told(authority: Authority) -> None:
    left, right = socket.socketpair()
    right.sendall(b"\x00\x00\x00\x05hello and nothing that looks like a record")
    with pytest.raises(AccessDenied, match="TLS failed"):
        authority.tls("node:n1").wrap_server(left)
    right.close()
    left, right = socket.socketpair()
    with pytest.raises(Unavailable, match="does it use TLS"):
        authority.tls("node:n1").wrap_client(left, timeout_s=0.05)
    right.close()
    assert left.fileno() == -1


def test_bytes_arrive_in_both_directions_at_once(authority: Authority, pairs: Pairs) -> None:
    server, client = pairs(authority.tls("node:n1"), authority.tls("tenant:alice"))
    data = os.urandom(3 << 20)

    def read(sock: TlsSocket) -> bytes:
        into = bytearray(len(data))
        assert sock.recv_into(into, 0, socket.MSG_WAITALL) == len(data)
        return bytes(into)

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, sock) for sock in (server, client)]
        writers = [pool.submit(sock.sendall, data) for sock in (server, client)]
        assert all(reader.result(60) == data for reader in readers)
        for writer in writers:
            writer.result(60)


def test_calls_of_plain_sockets_that_lanes_use(authority: Authority, pairs: Pairs, tmp_path: Path) -> None:
    server, client = pairs(authority.tls("node:n1"), authority.tls("tenant:alice"))
    assert client.sendmsg([b"head", b"er", memoryview(b"body")]) == 10
    head, body = bytearray(6), bytearray(4)
    assert server.recvmsg_into([head, body], 0, socket.MSG_WAITALL)[0] == 10
    assert (head, body) == (b"header", b"body")
    path = tmp_path / "file"
    path.write_bytes(b"0123456789" * 100_000)
    with path.open("rb") as file:
        sender = threading.Thread(target=client.sendfile, args=(file, 5, 500_000))
        sender.start()
        into = bytearray(500_000)
        server.recv_into(into, 0, socket.MSG_WAITALL)
        sender.join()
    assert into == path.read_bytes()[5:500_005]
    assert client.send(b"abc") == 3
    assert server.recv(2) == b"ab"
    assert server.recv(100) == b"c"
    with pytest.raises(BlockingIOError):
        client.send(b"abc", socket.MSG_DONTWAIT)
    server.settimeout(0.01)
    with pytest.raises(TimeoutError):
        server.recv(1)
    client.close()
    assert server.recv(1) == b""


def test_a_link_runs_over_it(authority: Authority, pairs: Pairs) -> None:
    server, client = pairs(authority.tls("node:n1"), authority.tls("tenant:alice"))
    answered, closed = threading.Event(), threading.Event()
    stat = Stat(name="x", census={f"key {i}": i for i in range(20_000)}, counters={})
    received: list[object] = []

    def reply(link: Link, message: object) -> None:
        assert isinstance(message, StatRequest)
        link.send(stat)

    def keep(link: Link, message: object) -> None:
        received.append(message)
        answered.set()

    one = Link(server, NodeToDirectory, reply, lambda link, reason: closed.set())
    two = Link(client, Stat, keep, lambda link, reason: None)
    one.start()
    two.start()
    assert two.send(StatRequest())
    assert answered.wait(30)
    assert received == [stat]
    two.close()
    assert closed.wait(30)
    one.join()
    two.join()


def test_settings_that_cannot_work_are_named(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("node:n1")
    other_cert, _ = authority.issue("node:n2")
    with pytest.raises(ConfigError, match="missing: tls_key"):
        Tls(cert, "", authority.ca)
    with pytest.raises(ConfigError, match=r"tls_key .*No such file"):
        Tls(cert, str(tmp_path / "none"), authority.ca)
    with pytest.raises(ConfigError, match=r"tls_ca .*No such file"):
        Tls(cert, key, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="not usable"):
        Tls(other_cert, key, authority.ca)
    with pytest.raises(ConfigError, match="not usable"):
        Tls(cert, key, key)
    os.chmod(key, 0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Tls(cert, key, authority.ca)
