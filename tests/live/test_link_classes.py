"""Shaping by real threads on real sockets, and the marks that packets carry."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
from two_hosts import two_hosts

from anabranch.core.errors import DeadlineExceeded
from anabranch.transfer.classes import TrafficClass
from anabranch.transfer.live.marks import MARKS, mark
from anabranch.transfer.live.shaper import LinkShaper

SLICE = 512 << 10
LOAD, MIGRATE = TrafficClass.LOAD, TrafficClass.MIGRATE


def test_without_a_rate_nothing_waits() -> None:
    shaper = LinkShaper(0)
    for _ in range(1000):
        shaper.send(MIGRATE, 1 << 40, 0.0)
    assert shaper.waiting == 0


def test_who_finds_no_room_in_time_is_told_and_the_others_go_on() -> None:
    shaper = LinkShaper(10_000_000)
    shaper.send(LOAD, 1_000_000)  # overdraws by about 80 ms
    with pytest.raises(DeadlineExceeded, match="10 bytes of migrate found no room"):
        shaper.send(MIGRATE, 10, 0.01)
    assert shaper.waiting == 0
    shaper.send(LOAD, 10, 60.0)


class Sender(threading.Thread):
    """Sends slices of one class over its own loopback connection for as long as it may."""

    def __init__(self, shaper: LinkShaper, traffic: TrafficClass, order: list[TrafficClass], slices: int) -> None:
        super().__init__(daemon=True)
        self._shaper, self._traffic, self._order, self._slices = shaper, traffic, order, slices
        self.stopping = threading.Event()

    def run(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            out = socket.create_connection(server.getsockname())
            back, _ = server.accept()
        drain = threading.Thread(target=self._drain, args=(back,), daemon=True)
        drain.start()
        with out:
            for _ in range(self._slices):
                if self.stopping.is_set():
                    break
                self._shaper.send(self._traffic, SLICE, 60.0)
                self._order.append(self._traffic)
                out.sendall(bytes(SLICE))
        drain.join(30)

    @staticmethod
    def _drain(sock: socket.socket) -> None:
        with sock:
            while sock.recv(1 << 20):
                pass


def test_a_load_through_a_shaped_link_does_not_wait_for_a_migration() -> None:
    shaper, order = LinkShaper(100_000_000), []
    migration = [Sender(shaper, MIGRATE, order, 10_000) for _ in range(2)]
    loads = [Sender(shaper, LOAD, order, 20) for _ in range(4)]
    for sender in migration:
        sender.start()
    deadline = time.monotonic() + 30
    while order.count(MIGRATE) < 20:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    first = len(order)
    started = time.monotonic()
    for sender in loads:
        sender.start()
    for sender in loads:
        sender.join(60)
        assert not sender.is_alive()
    took = time.monotonic() - started
    window = order[first:]
    for sender in migration:
        sender.stopping.set()
    for sender in migration:
        sender.join(60)
        assert not sender.is_alive()
    assert window.count(LOAD) == 80
    assert took >= 0.8 * (80 * SLICE - 2_000_000 - 7 * SLICE) / 100e6  # it is shaped
    assert window.count(MIGRATE) <= 80  # loosely: 2 % is its share while loads wait; virtual time says it exactly
    assert shaper.waiting == 0


@pytest.mark.parametrize("traffic", list(TrafficClass))
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_marks_are_on_the_socket(traffic: TrafficClass, family: socket.AddressFamily) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        if not mark(sock, traffic):
            pytest.skip("this system refuses marks")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == MARKS[traffic].priority
        field = (
            sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)
            if family == socket.AF_INET
            else sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
        )
        assert field == MARKS[traffic].dscp << 2


def test_marks_differ_and_keep_the_order_of_the_default_queue() -> None:
    bands = [1, 2, 2, 2, 1, 2, 0, 0]
    order = [bands[MARKS[traffic].priority] for traffic in TrafficClass]
    assert order == sorted(order)
    assert len({m.dscp for m in MARKS.values()}) == len({m.priority for m in MARKS.values()}) == len(MARKS)
    with socket.socket(socket.AF_UNIX) as sock:
        assert not mark(sock, LOAD)


LISTEN = """
import json, socket, sys
raw = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
raw.settimeout(20)
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
seen = {}
while len(seen) < int(sys.argv[2]):
    packet = raw.recv(65536)
    size, total = (packet[0] & 15) * 4, int.from_bytes(packet[2:4], "big")
    data = packet[size + (packet[size + 12] >> 4) * 4 : total]
    if packet[9] == 6 and data:
        seen[data.decode()] = packet[1] >> 2
print(json.dumps(seen), flush=True)
"""
SEND = """
import socket, sys
from anabranch.transfer.classes import TrafficClass
from anabranch.transfer.live.marks import mark
for traffic in TrafficClass:
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as sock:
        mark(sock, traffic)
        sock.sendall(traffic.name.encode())
"""


def test_marks_are_on_the_wire() -> None:
    with two_hosts(1) as hosts:
        listener = hosts.python("b", LISTEN, hosts.address("b", 0), str(len(TrafficClass)))
        sender = None
        try:
            assert listener.stdout is not None
            port = listener.stdout.readline().strip()
            sender = hosts.python("a", SEND, hosts.address("b", 0), port)
            sender.communicate(timeout=60)
            assert sender.returncode == 0
            seen = json.loads(listener.stdout.readline())
        finally:
            for process in (listener, sender):
                if process is not None:
                    process.kill()
                    process.communicate(timeout=20)
        assert seen == {traffic.name: MARKS[traffic].dscp for traffic in TrafficClass}
