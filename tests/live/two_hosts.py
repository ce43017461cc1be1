"""Two network namespaces with several cables (veth pairs) between them: a lab of two hosts with several NICs each."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class TwoHosts:
    """Cable i connects 10.77.i.1 on host `a` (device `<id>a<i>`) with 10.77.i.2 on host `b` (`<id>b<i>`)."""

    def __init__(self, cables: int) -> None:
        self._id = f"ab{secrets.token_hex(2)}"
        self._cables = cables

    def namespace(self, host: str) -> str:
        return f"{self._id}-{host}"

    def device(self, host: str, cable: int) -> str:
        return f"{self._id}{host}{cable}"

    @staticmethod
    def address(host: str, cable: int) -> str:
        return f"10.77.{cable}.{'ab'.index(host) + 1}"

    def open(self) -> None:
        for host in "ab":
            _ip("netns", "add", self.namespace(host))
            self._in(host, "link", "set", "lo", "up")
        for cable in range(self._cables):
            left, right = self.device("a", cable), self.device("b", cable)
            _ip("link", "add", left, "type", "veth", "peer", "name", right)
            for host in "ab":
                device = self.device(host, cable)
                _ip("link", "set", device, "netns", self.namespace(host))
                self._in(host, "addr", "add", f"{self.address(host, cable)}/24", "dev", device)
                self._in(host, "link", "set", device, "up")

    def close(self) -> None:
        """Deleting a namespace takes its devices along."""
        for host in "ab":
            subprocess.run(["ip", "netns", "del", self.namespace(host)], check=False, capture_output=True)

    def cut(self, cable: int, host: str = "b") -> None:
        self._in(host, "link", "set", self.device(host, cable), "down")

    def mend(self, cable: int, host: str = "b") -> None:
        self._in(host, "link", "set", self.device(host, cable), "up")

    def python(self, host: str, script: Path | str, *arguments: str) -> subprocess.Popen[str]:
        """`script` (a file, or code) on a host, with pipes; its own lines arrive unbuffered."""
        what = [str(script)] if isinstance(script, Path) else ["-c", script]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), sys.executable, "-u", *what, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _in(self, host: str, *arguments: str) -> None:
        _ip("-n", self.namespace(host), *arguments)


@contextmanager
def two_hosts(cables: int) -> Iterator[TwoHosts]:
    """Skips the test where namespaces cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    hosts = TwoHosts(cables)
    try:
        try:
            hosts.open()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here (CAP_NET_ADMIN?): {error.stderr.strip()}")
        yield hosts
    finally:
        hosts.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)
