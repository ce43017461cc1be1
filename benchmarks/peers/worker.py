"""Measures one store from a process of its own; standard library only, because it runs under the peer's Python.

    python worker.py FILE.py:CLASS        commands come as JSON lines on stdin, answers leave as JSON lines on stdout

CLASS is built with the options of the `open` command and has the methods that `benchmarks/peers/*_peer.py` share (they
are those of the value API of Mooncake's Python client: put_from, get_into, batch_put_from, batch_get_into,
batch_is_exist, …). Times are wall clock round one call, in microseconds; contents are stamped before and checked after,
outside the timed part.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import mmap
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

STAMP = 8
VIEWS = 200
now = time.perf_counter_ns


class Buffer:
    """Anonymous memory whose pages were all touched, with its address."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.memset(self.address, 1, size)

    def stamp(self, at: int, size: int, mark: int) -> None:
        mark_bytes = mark.to_bytes(STAMP, "little")
        self.memory[at : at + STAMP] = mark_bytes
        self.memory[at + size - STAMP : at + size] = mark_bytes

    def holds(self, at: int, size: int, mark: int) -> bool:
        mark_bytes = mark.to_bytes(STAMP, "little")
        return self.memory[at : at + STAMP] == mark_bytes and self.memory[at + size - STAMP : at + size] == mark_bytes


class Worker:
    def __init__(self, path: str, name: str) -> None:
        spec = importlib.util.spec_from_file_location("peer", path)
        if spec is None or spec.loader is None:
            raise SystemExit(f"no module at {path}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._make = getattr(module, name)
        self._store: Any = None
        self._buffer = Buffer(4096)
        self._mark = 0
        self._keeps = True

    def open(self, segment: int = 0, local_buffer: int = 0, buffer: int = 0, **options: Any) -> dict[str, Any]:
        self._store = self._make(SimpleNamespace(**options))
        self._store.open(segment, local_buffer)
        self._keeps = getattr(self._store, "keeps", True)
        if buffer:
            self._buffer = Buffer(buffer)
            self._store.register(self._buffer.address, buffer)
        return {"pid": os.getpid(), "version": self._store.version()}

    def close(self) -> dict[str, Any]:
        if self._store is not None:
            self._store.close()
        return {}

    def clear(self) -> dict[str, Any]:
        self._store.remove_all()
        return {}

    def prefault(self, total: int, size: int = 16 << 20) -> dict[str, Any]:
        """Touch the store's memory once, so that the other figures are not those of first page faults."""
        begun = now()
        stored = sum(
            self._store.put_from(f"prefault/{index}", self._buffer.address, size) == 0 for index in range(total // size)
        )
        spent = now() - begun
        self._store.remove_all()
        return {"GBps": stored * size / spent, "stored": stored}

    def single(self, size: int, count: int, warm: int = 2) -> dict[str, Any]:
        """put_from and get_into of one value at a time."""
        store, buffer, base = self._store, self._buffer, self._take_marks(count + warm)
        puts, gets, bad = [], [], 0
        for index in range(count + warm):
            buffer.stamp(0, size, base + index)
            begun = now()
            code = store.put_from(f"s/{size}/{base + index}", buffer.address, size)
            puts.append(now() - begun)
            bad += code != 0
        for index in range(count + warm):
            buffer.stamp(0, size, 0)
            begun = now()
            code = store.get_into(f"s/{size}/{base + index}", buffer.address, size)
            gets.append(now() - begun)
            bad += code != size or self._differs(0, size, base + index)
        return {"put": micros(puts[warm:]), "get": micros(gets[warm:]), "bad": bad}

    def batch_put(self, size: int, items: int, base: int) -> dict[str, Any]:
        """One batch_put_from of `items` values next to each other."""
        buffer = self._buffer
        for item in range(items):
            buffer.stamp(item * size, size, base + item)
        keys, addresses, sizes = self._batch(size, items, base)
        begun = now()
        codes = self._store.batch_put_from(keys, addresses, sizes)
        spent = now() - begun
        return {"put": micros([spent]), "bad": sum(code != 0 for code in codes)}

    def batch_get(self, size: int, items: int, base: int) -> dict[str, Any]:
        buffer = self._buffer
        for item in range(items):
            buffer.stamp(item * size, size, 0)
        keys, addresses, sizes = self._batch(size, items, base)
        begun = now()
        codes = self._store.batch_get_into(keys, addresses, sizes)
        spent = now() - begun
        bad = sum(code != size or self._differs(item * size, size, base + item) for item, code in enumerate(codes))
        return {"get": micros([spent]), "bad": bad}

    def _batch(self, size: int, items: int, base: int) -> tuple[list[str], list[int], list[int]]:
        keys = [f"b/{size}/{base + item}" for item in range(items)]
        return keys, [self._buffer.address + item * size for item in range(items)], [size] * items

    def exists(self, keys: int, batch: int, rounds: int, fill: bool = True) -> dict[str, Any]:
        """batch_is_exist of `batch` keys that are there; `keys` values of 64 bytes are put first."""
        names = [f"e/{index}" for index in range(keys)]
        if fill:
            self._fill(names, 64, batch)
        spent, good = [], 0
        for _ in range(rounds):
            for at in range(0, keys, batch):
                asked = names[at : at + batch]
                begun = now()
                answer = self._store.batch_is_exist(asked)
                spent.append(now() - begun)
                good += sum(found == 1 for found in answer)
        return {"exists": micros(spent), "bad": keys * rounds - good}

    def small(self, keys: int, batch: int, size: int = 64) -> dict[str, Any]:
        """batch_put_from of values of 64 bytes: microseconds a batch."""
        base = self._take_marks(keys)
        return self._fill([f"v/{base + index}" for index in range(keys)], size, batch)

    def _fill(self, names: list[str], size: int, batch: int) -> dict[str, Any]:
        spent, bad = [], 0
        for at in range(0, len(names), batch):
            part = names[at : at + batch]
            addresses = [self._buffer.address + index * size for index in range(len(part))]
            begun = now()
            codes = self._store.batch_put_from(part, addresses, [size] * len(part))
            spent.append(now() - begun)
            bad += sum(code != 0 for code in codes)
        return {"small": micros(spent), "bad": bad}

    def same_host(self, size: int, values: int, rounds: int) -> dict[str, Any]:
        """For a store that lends its memory: `view` (lease and give back), `get` into the caller's buffer, and `copy`,
        a memcpy of as much between two buffers of this process, these two in turns. More values than a cache holds."""
        store, buffer, source = self._store, self._buffer, Buffer(size * values)
        bad, taken = 0, {"view": [], "get": [], "copy": []}  # type: ignore[var-annotated]
        for index in range(values):
            source.stamp(index * size, size, index + 1)
            bad += store.put_from(f"h/{index}", source.address + index * size, size) != 0
        for step in range(rounds * values):
            index = step % values
            begun = now()
            code = store.get_into(f"h/{index}", buffer.address, size)
            taken["get"].append(now() - begun)
            bad += code != size or not buffer.holds(0, size, index + 1)
            begun = now()
            ctypes.memmove(buffer.address, source.address + index * size, size)
            taken["copy"].append(now() - begun)
        for step in range(VIEWS if hasattr(store, "view") else 0):
            index = step % values
            begun = now()
            with store.view([f"h/{index}"]) as views:
                taken["view"].append(now() - begun)
                bad += views[0] is None or views[0][:STAMP] != (index + 1).to_bytes(STAMP, "little")
        store.remove_all()
        return {**{name: micros(times[values:]) for name, times in taken.items()}, "bad": bad}

    def _differs(self, at: int, size: int, mark: int) -> bool:
        return self._keeps and not self._buffer.holds(at, size, mark)

    def _take_marks(self, count: int) -> int:
        base = self._mark + 1
        self._mark += count
        return base


def micros(times: list[int]) -> list[float]:
    return [round(time / 1e3, 1) for time in times]


def main() -> None:
    path, _, name = sys.argv[1].rpartition(":")
    # Libraries print to stdout; answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(path, name)
    for line in sys.stdin:
        command = json.loads(line)
        reply = getattr(worker, command.pop("do"))(**command)
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
