from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.core.errors import Unavailable
from anabranch.core.live import link as link_module
from anabranch.core.live.link import Link, Listener, connect
from anabranch.core.messages import Message


class Note(Message, frozen=True, kw_only=True):
    n: int
    body: bytes = b""


class Pair:
    """A listener, and both ends of connections to it."""

    def __init__(self, address: str) -> None:
        self.inbox: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.links: list[Link] = []
        self.accepted: queue.Queue[Link] = queue.Queue()
        self.listener = Listener(address, self._accept)

    def _accept(self, sock: socket.socket) -> None:
        link = self.wrap(sock, "server")
        self.accepted.put(link)

    def wrap(self, sock: socket.socket, name: str) -> Link:
        link = Link(
            sock,
            Note,
            lambda _l, m: self.inbox.put((name, m)),
            lambda _l, reason: self.inbox.put((name + " closed", reason)),
            name=name,
        )
        self.links.append(link)
        link.start()
        return link

    def dial(self) -> tuple[Link, Link]:
        client = self.wrap(connect(self.listener.address), "client")
        return client, self.accepted.get(timeout=10)

    def close(self) -> None:
        for link in self.links:
            link.close()
        for link in self.links:
            link.join()
        self.listener.close()


@pytest.fixture(params=["tcp", "unix"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair("127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/s")
    yield made
    made.close()


def test_messages_arrive_in_order_from_many_threads(pair: Pair) -> None:
    client, server = pair.dial()
    senders = [
        threading.Thread(target=lambda base=base: [client.send(Note(n=base + i)) for i in range(200)])
        for base in (0, 1000, 2000)
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    got = [pair.inbox.get(timeout=10)[1].n for _ in range(600)]
    for base in (0, 1000, 2000):
        assert [n for n in got if base <= n < base + 1000] == [base + i for i in range(200)]
    assert server.send(Note(n=-1))
    assert pair.inbox.get(timeout=10) == ("client", Note(n=-1))


def test_both_ends_learn_of_a_close_exactly_once(pair: Pair) -> None:
    client, server = pair.dial()
    client.close("enough")
    closed = {pair.inbox.get(timeout=10)[0] for _ in range(2)}
    assert closed == {"client closed", "server closed"}
    assert not client.send(Note(n=1))
    for link in (client, server):
        link.join()
    assert pair.inbox.empty()


def test_a_peer_that_does_not_read_is_dropped_and_never_blocks_the_sender(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "MAX_QUEUED_BYTES", 4 << 20)
    stuck = connect(pair.listener.address)
    try:
        server = pair.accepted.get(timeout=10)
        accepted = 0
        while server.send(Note(n=accepted, body=bytes(1 << 20))):
            accepted += 1
            assert accepted < 100
        assert pair.inbox.get(timeout=10) == ("server closed", "peer does not read")
    finally:
        stuck.close()


def test_garbage_closes_the_connection(pair: Pair) -> None:
    sock = connect(pair.listener.address)
    try:
        pair.accepted.get(timeout=10)
        sock.sendall(b"\x00\x00\x00\x04GET ")
        name, reason = pair.inbox.get(timeout=10)
        assert name == "server closed"
        assert "malformed" in reason
    finally:
        sock.close()


def test_unix_peers_are_known_by_pid(tmp_path: Path) -> None:
    pair = Pair(f"unix:{tmp_path}/p")
    try:
        _, server = pair.dial()
        assert server.peer_pid == os.getpid()
        assert oct((tmp_path / "p").stat().st_mode & 0o777) == "0o600"
    finally:
        pair.close()


@pytest.mark.parametrize("dial", [lambda: connect("127.0.0.1:1"), lambda: connect("unix:/nonexistent/x")])
def test_nobody_there_is_unavailable(dial: Callable[[], object]) -> None:
    with pytest.raises(Unavailable, match="cannot connect"):
        dial()


def test_a_busy_address_is_unavailable() -> None:
    pair = Pair("127.0.0.1:0")
    try:
        with pytest.raises(Unavailable, match="cannot listen"):
            Listener(pair.listener.address, lambda _s: None)
    finally:
        pair.close()
