from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from certificates import Authority

from anabranch.core.authentication import Access, Caller, Credentials, TenantRules
from anabranch.core.errors import AccessDenied, AnabranchError, Unavailable, WireError
from anabranch.core.handshake import Introduction
from anabranch.core.live.handshake import Gate, client_handshake, server_handshake
from anabranch.core.live.link import Listener, connect
from anabranch.core.wire import encode

CLUSTER, ALICE = b"c" * 32, b"a" * 32
ACCESS = Access(cluster_secret=CLUSTER, tenants={"alice": TenantRules(secret=ALICE)})


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


Ends = tuple[socket.socket, socket.socket]


def meet(ends: Ends, access: Access, credentials: Credentials) -> Caller:
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(server_handshake, ends[0], access, timeout_s=30)
        client_handshake(ends[1], credentials, timeout_s=30)
        return served.result()


def test_both_sides_prove_themselves_and_the_link_follows(ends: Ends) -> None:
    caller = meet(ends, ACCESS, Credentials(secret=CLUSTER))
    assert caller.trusted
    ends[0].sendall(b"first bytes of the link")
    assert ends[1].recv(100) == b"first bytes of the link"


def test_a_tenant_is_itself_only(ends: Ends) -> None:
    caller = meet(ends, ACCESS, Credentials(secret=ALICE, tenant="alice"))
    assert (caller.tenant, caller.trusted) == ("alice", False)


def test_an_open_server_and_client_say_nothing(ends: Ends) -> None:
    assert meet(ends, Access(), Credentials()).trusted
    ends[0].sendall(b"x")
    assert ends[1].recv(100) == b"x"


@pytest.mark.parametrize("tenant", ["bob", "default"])
def test_a_wrong_secret_is_refused_with_the_reason(ends: Ends, tenant: str) -> None:
    with pytest.raises(AccessDenied, match=f"does not open tenant '{tenant}'"):
        meet(ends, ACCESS, Credentials(secret=ALICE, tenant=tenant))
    assert ends[1].fileno() == -1


def test_a_caller_that_does_not_answer_the_challenge(ends: Ends) -> None:
    ends[1].sendall(b"\x00\x00\x00\x01\xc0")
    with pytest.raises(WireError):
        server_handshake(ends[0], ACCESS)
    assert b"set security.secret_file" in ends[1].recv(10_000)


def test_silence_has_an_end(ends: Ends) -> None:
    with pytest.raises(Unavailable, match="did not answer the challenge"):
        server_handshake(ends[0], ACCESS, timeout_s=0.02)
    ends[1].close()
    left, right = socket.socketpair()
    with left, pytest.raises(Unavailable, match="asks for no proof"):
        client_handshake(right, Credentials(secret=CLUSTER), timeout_s=0.02)


def test_a_peer_that_closes_or_sends_too_much(ends: Ends) -> None:
    ends[1].sendall(b"\x7f\xff\xff\xff")
    with pytest.raises(WireError, match="where a proof was expected"):
        server_handshake(ends[0], ACCESS)
    left, right = socket.socketpair()
    left.close()
    with pytest.raises(Unavailable):
        client_handshake(right, Credentials(secret=CLUSTER))


def test_an_imposter_that_echoes_the_proof_is_found_out(ends: Ends) -> None:
    from anabranch.core.handshake import Accepted, Challenge
    from anabranch.core.wire import FrameDecoder

    def imposter() -> None:
        ends[0].sendall(encode(Challenge(nonce=b"n" * 16)))
        decoder: FrameDecoder[Introduction] = FrameDecoder(Introduction)
        while not (messages := decoder.feed(ends[0].recv(4096))):
            pass
        ends[0].sendall(encode(Accepted(proof=messages[0].proof)))

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(imposter)
        with pytest.raises(AccessDenied, match="does not know"):
            client_handshake(ends[1], Credentials(secret=CLUSTER), timeout_s=30)
        done.result()


@pytest.fixture
def gated() -> Iterator[Callable[..., tuple[str, Gate, list[Caller]]]]:
    opened: list[tuple[Listener, Gate]] = []
    sockets: list[socket.socket] = []

    def start(access: Access, **options: object) -> tuple[str, Gate, list[Caller]]:
        callers: list[Caller] = []

        def on_caller(sock: socket.socket, caller: Caller) -> None:
            sockets.append(sock)
            callers.append(caller)
            sock.sendall(b"in")

        gate = Gate(access, on_caller, **options)  # type: ignore[arg-type]
        listener = Listener("127.0.0.1:0", gate)
        opened.append((listener, gate))
        return listener.address, gate, callers

    yield start
    for listener, gate in opened:
        listener.close()
        gate.close()
    for sock in sockets:
        sock.close()


Gated = Callable[..., tuple[str, Gate, list[Caller]]]


def test_the_gate_lets_in_who_proves_it(gated: Gated) -> None:
    address, gate, callers = gated(ACCESS)
    silent = connect(address)
    with connect(address) as sock:
        client_handshake(sock, Credentials(secret=CLUSTER), timeout_s=30)
        assert sock.recv(2) == b"in"
    with connect(address) as sock, pytest.raises(AccessDenied):
        client_handshake(sock, Credentials(secret=b"x" * 32), timeout_s=30)
    assert [caller.trusted for caller in callers] == [True]
    # One that says nothing held nobody up, and ends with the gate.
    gate.close()
    while silent.recv(4096):
        pass
    silent.close()


def test_the_gate_of_an_open_server_is_open(gated: Gated) -> None:
    address, _, _ = gated(Access())
    with connect(address) as sock:
        assert sock.recv(2) == b"in"


def test_the_gate_speaks_tls(gated: Gated, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    address, _, callers = gated(Access(tls=True), tls=authority.tls("node:d0"), timeout_s=30)
    for name, tenant, welcome in (("node:n1", "default", True), ("tenant:a", "a", True), ("tenant:a", "b", False)):
        sock = authority.tls(name).wrap_client(connect(address))
        with sock:
            if welcome:
                client_handshake(sock, Credentials(tenant=tenant), timeout_s=30)
                assert sock.recv(2) == b"in"
            else:
                with pytest.raises(AccessDenied, match="opens no other tenant"):
                    client_handshake(sock, Credentials(tenant=tenant), timeout_s=30)
    assert [caller.trusted for caller in callers] == [True, False]
    stranger = Authority(tmp_path, "stranger")
    cert, key = stranger.issue("node:n1")
    from anabranch.core.live.tls import Tls

    with pytest.raises(AnabranchError), Tls(cert, key, authority.ca).wrap_client(connect(address)) as sock:
        client_handshake(sock, Credentials(), timeout_s=30)


def test_silent_callers_keep_nobody_out(gated: Gated) -> None:
    address, _, callers = gated(ACCESS, timeout_s=30, most=2)
    silent = []
    for _ in range(4):
        silent.append(connect(address))
        assert silent[-1].recv(1), "it was asked for a proof"
    for sock in silent[:2]:
        while sock.recv(4096):
            pass
    with connect(address) as sock:
        client_handshake(sock, Credentials(secret=CLUSTER), timeout_s=30)
        assert sock.recv(2) == b"in"
    assert len(callers) == 1
    for sock in silent:
        sock.close()
