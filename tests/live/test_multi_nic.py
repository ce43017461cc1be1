"""Two hosts with two cables between them; one is cut in the middle of a transfer, and mended later."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from two_hosts import TwoHosts, two_hosts

SIZE = 32 << 20
SCRIPT = Path(__file__).with_name("multi_nic_peer.py")


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


def test_a_transfer_goes_on_over_the_other_nic_and_the_mended_one_is_used_again(tmp_path: Path) -> None:
    with two_hosts(2) as hosts:
        (tmp_path / "nics.toml").write_text(topology(hosts))
        addresses = f"{hosts.address('b', 0)},{hosts.address('b', 1)}"
        holder = hosts.python("b", SCRIPT, "hold", str(SIZE), addresses)
        process = None
        try:
            assert holder.stdout is not None
            description = holder.stdout.readline().strip()
            process = hosts.python("a", SCRIPT, "read", str(SIZE), description, str(tmp_path / "nics.toml"))
            reader = Reader(process)
            reader.start()
            assert set(reader.report()["rails"]) == {"left", "right"}

            reader.start()
            hosts.cut(0)
            assert set(reader.report()["rails"]) == {"right"}

            hosts.mend(0)
            deadline = time.monotonic() + 60
            while True:
                reader.start()
                if set(reader.report()["rails"]) == {"left", "right"}:
                    break
                assert time.monotonic() < deadline
        finally:
            for running in (holder, process):
                if running is not None:
                    running.kill()
                    running.communicate(timeout=20)
