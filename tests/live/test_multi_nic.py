"""Two hosts with two cables between them; one is cut in the middle of a transfer, and mended later."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from two_hosts import TwoHosts, two_hosts

SIZE = 32 << 20
PEER = Path(__file__).with_name("multi_nic_peer.py")
STORE = Path(__file__).with_name("multi_nic_store.py")


def topology(hosts: TwoHosts) -> str:
    return "\n".join(
        f'[[nic]]\nname = "{name}"\naddress = "{hosts.address("a", cable)}"\n'
        f'device = "{hosts.device("a", cable)}"\nreaches = ["10.77.{cable}.0/24"]\n'
        for cable, name in enumerate(("left", "right"))
    )


class Reader:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("60\n")
        self._process.stdin.flush()
        assert self._line() == "started"

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self._line())
        assert report["fine"], report
        return report

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the reader ended"
        return line


def cut_and_mend(hosts: TwoHosts, reader: Reader) -> None:
    """Two rails; one cable is cut while a read runs, which goes on over the other; mended, the rail is used again.
    Every read is whole."""
    read_until(reader, {"left", "right"})
    reader.start()
    hosts.cut(0)
    if set(reader.report()["rails"]) != {"right"}:
        read_until(reader, {"right"})  # the read was over before the cut, on a very slow machine
    hosts.mend(0)
    read_until(reader, {"left", "right"})


def read_until(reader: Reader, rails: set[str]) -> None:
    deadline = time.monotonic() + 60
    while True:
        reader.start()
        if set(reader.report()["rails"]) == rails:
            return
        assert time.monotonic() < deadline


@contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=20)


def test_a_transfer_survives_a_cut_cable(tmp_path: Path) -> None:
    with two_hosts(2) as hosts:
        (tmp_path / "nics.toml").write_text(topology(hosts))
        addresses = f"{hosts.address('b', 0)},{hosts.address('b', 1)}"
        holder = hosts.python("b", PEER, "hold", str(SIZE), addresses)
        with ended(holder):
            assert holder.stdout is not None
            description = holder.stdout.readline().strip()
            reader = hosts.python("a", PEER, "read", str(SIZE), description, str(tmp_path / "nics.toml"))
            with ended(reader):
                cut_and_mend(hosts, Reader(reader))


def test_a_client_of_the_store_survives_a_cut_cable(tmp_path: Path) -> None:
    with two_hosts(2) as hosts:
        (tmp_path / "nics.toml").write_text(topology(hosts))
        addresses = f"{hosts.address('b', 0)},{hosts.address('b', 1)}"
        node = hosts.python("b", STORE, "node", str(tmp_path), addresses)
        with ended(node):
            assert node.stdout is not None
            address = node.stdout.readline().strip()
            assert address.count("+") == 1
            client = hosts.python("a", STORE, "client", str(tmp_path), address, str(tmp_path / "nics.toml"))
            with ended(client):
                assert client.stdout is not None
                assert client.stdout.readline().strip() == "OK"
                cut_and_mend(hosts, Reader(client))
