"""Gets and puts of every outcome against a real node: the figures add up, and nothing is counted twice."""

from __future__ import annotations

import http.client
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.cluster.live.store_process import Running, start_node
from anabranch.cluster.settings import Settings
from anabranch.core.authentication import Credentials
from anabranch.store.live.metrics_server import MetricsServer
from anabranch.store.metrics import by, total
from anabranch.store.values.config import StoreConfig
from anabranch.store.values.live.administration import Administrator, probe
from anabranch.store.values.live.client import Client
from anabranch.store.values.live.node_server import ValueNode
from anabranch.store.values.live.session import Session
from anabranch.store.values.outcome import Outcome


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Running]:
    settings = Settings(store=StoreConfig(dram_bytes=8 << 20, ssd_bytes=32 << 20, listen="127.0.0.1:0"))
    running = start_node(settings, "n1", data_dir=str(tmp_path))
    yield running
    running.stop()


def test_every_item_is_counted_once(node: Running) -> None:
    with Client(node.address, local=False, tenant="t") as client:
        keys = [f"k{i}" for i in range(50)]
        put = client.put_many(keys, [b"x" * 1000] * 50)
        assert put == [Outcome.OK] * 50
        again = client.put_many(keys[:10], [b"x" * 1000] * 10)
        other = client.put("k0", b"y")
        huge = client.put("huge", bytes(16 << 20))
        assert (again, other, huge) == ([Outcome.PRESENT] * 10, Outcome.DIFFERS, Outcome.TOO_BIG)
        found = client.get_many_into([*keys, "absent"], [bytearray(1000) for _ in range(51)])
        assert sum(map(bool, found)) == 50
        assert (
            client.get(
                "big",
            )
            is None
        )
        assert client.put("big", bytes(3 << 20)) is Outcome.OK
        assert client.get("big") == bytes(3 << 20)
        client.remove(["k0", "absent"])
        client.exists_many(keys)
    admin = Administrator(Session(Credentials()), nodes=[node.address])
    stat = admin.stat(node.address)
    for call in ("get", "put", "remove", "exists"):
        assert total(stat, "asked", call=call) == total(stat, "items", call=call), call
    puts = by(stat, "items", "outcome", call="put")
    assert puts["ok"] == 51
    assert (puts["present"], puts["differs"]) == (10, 1)
    gets = by(stat, "items", "outcome", call="get")
    assert gets["ok"] == sum(by(stat, "items", "tier", call="get").values()) == 51
    assert gets["missing"] >= 2
    assert by(stat, "bytes", "call") == {"get": 50_000 + (3 << 20), "put": 50_000 + (3 << 20)}
    assert by(stat, "asked", "tenant").keys() == {"t"}
    assert total(stat, "capacity_bytes") == 8 << 20
    assert total(stat, "used_bytes") + total(stat, "free_bytes") + total(stat, "reserved_bytes") == 8 << 20


def test_the_probe_takes_the_way_of_the_bytes(node: Running) -> None:
    session = Session(Credentials(tenant="probe"))
    for _ in range(2):
        probe(node.address, session)
    admin = Administrator(Session(Credentials()), nodes=[node.address])
    assert total(admin.stat(node.address), "items", call="get", outcome="ok", tenant="probe") == 2


def asked(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_health_is_red_while_no_bytes_can_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process lives and accepts connections, and whoever wants a value waits for ever."""
    monkeypatch.setattr("anabranch.store.live.metrics_server.PROBE_FRESH_S", 0.0)
    monkeypatch.setattr("anabranch.store.values.live.administration.PROBE_S", 0.3)
    node = ValueNode(
        "n1",
        StoreConfig(dram_bytes=1 << 20, listen="127.0.0.1:0"),
        arena_path=f"/dev/shm/anabranch-test-{os.getpid()}-{secrets.token_hex(4)}",
        data_dir=str(tmp_path),
    )
    node.start()
    session = Session(Credentials())
    server = MetricsServer("127.0.0.1:0", "node", node.stat, lambda: probe(node.address, session))
    try:
        assert asked(server.address, "/healthz") == (200, "ok\n")
        with node.custody.lock:
            status, reason = asked(server.address, "/healthz")
            assert asked(server.address, "/livez")[0] == 200
        assert status == 503
        assert node.address in reason
        assert asked(server.address, "/healthz") == (200, "ok\n")
    finally:
        server.close()
        node.stop()
