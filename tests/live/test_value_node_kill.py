"""A value node is killed at any moment and started again: what it finds is right, and what was durable is there."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from value_lanes import MIB, Caller, arena_path, name

from anabranch.core.errors import AnabranchError
from anabranch.store.values.outcome import Outcome

OK, MISSING = Outcome.OK, Outcome.MISSING


class Process:
    def __init__(self, folder: Path, *, dram: int, ssd: int = 0) -> None:
        self.arena = arena_path("kill")
        self._command = [
            sys.executable,
            str(Path(__file__).with_name("value_process.py")),
            str(folder),
            self.arena,
            str(dram),
            str(ssd),
        ]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def close(self) -> None:
        self.kill()
        for suffix in ("", ".index", ".records"):
            os.unlink(self.arena + suffix)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path


@contextlib.contextmanager
def running(folder: Path, *, dram: int, ssd: int = 0) -> Iterator[Process]:
    process = Process(folder, dram=dram, ssd=ssd)
    try:
        yield process
    finally:
        process.close()


@pytest.mark.cluster
def test_kills_under_load_lose_nothing_that_was_acknowledged_and_return_nothing_else(folder: Path) -> None:
    """Room for everything, so DRAM has to have all of it after a kill of the process alone."""
    rng = random.Random(7)
    stored: dict[bytes, bytes] = {}
    with running(folder, dram=64 * MIB) as process:
        for _ in range(4):
            tried: dict[bytes, bytes] = {}
            acknowledged: list[bytes] = []
            threads = [
                threading.Thread(target=write, args=(process.address, rng.randbytes(8), tried, acknowledged))
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            threads[0].join(rng.uniform(0.1, 0.4))
            process.kill()
            for thread in threads:
                thread.join()
            process.start()
            stored.update((one, tried[one]) for one in acknowledged)
            caller = Caller(process.address)
            for one, value in tried.items():
                got = caller.get_large(one)
                assert got == value or (got is MISSING and one not in stored)
            for one, value in rng.sample(sorted(stored.items()), min(50, len(stored))):
                assert caller.get_large(one) == value
            caller.close()
    assert stored


@pytest.mark.cluster
def test_what_was_durable_is_there_although_memory_is_gone(folder: Path) -> None:
    with running(folder, dram=4 * MIB, ssd=64 * MIB) as process:
        caller = Caller(process.address)
        names, values = [name() for _ in range(30)], [os.urandom(300_000 + i) for i in range(30)]
        for one, value in zip(names, values, strict=True):
            assert caller.put([one], [value], durable=True) == [OK]
        caller.close()
        process.kill()
        for suffix in ("", ".index", ".records"):
            os.unlink(process.arena + suffix)
        process.start()
        caller = Caller(process.address)
        assert [caller.get_large(one) for one in names] == values
        caller.close()


def write(address: str, seed: bytes, tried: dict[bytes, bytes], acknowledged: list[bytes]) -> None:
    """Until the node dies, or has half of what it takes."""
    rng = random.Random(seed)
    total = 0
    with contextlib.suppress(AnabranchError):
        caller = Caller(address)
        try:
            while total < 6 * MIB:
                one = rng.randbytes(32)
                value = tried[one] = rng.randbytes(rng.choice([0, 10, 5000, 70_000, 600_000]))
                total += len(value)
                put = caller.put_large if len(value) > 100_000 else caller.put
                if put([one], [value]) == [OK]:
                    acknowledged.append(one)
        finally:
            caller.close()
