"""Our own store, over `anabranch.Client`."""

from __future__ import annotations

import ctypes
from typing import Any

import anabranch
from anabranch.store.values.live.client import Client


class Anabranch:
    """`options`: master (a node's host:port), local (use the node's shared memory), directory (shards, or none)."""

    def __init__(self, options: Any) -> None:
        self._node = options.master
        self._directory = getattr(options, "directory", "")
        self._local = getattr(options, "local", False)
        self._views: dict[tuple[int, int], memoryview] = {}
        self._keys: list[str] = []

    def open(self, segment_bytes: int, local_buffer_bytes: int) -> None:
        self._client = Client(self._node, directory=self._directory, local=self._local, timeout_s=30.0)

    def version(self) -> str:
        return f"anabranch {anabranch.__version__}"

    def register(self, address: int, size: int) -> int:
        return 0

    def unregister(self, address: int) -> int:
        return 0

    def put(self, key: str, value: bytes) -> int:
        self._keys.append(key)
        return 0 if self._client.put(key, value).stored else -1

    def get(self, key: str) -> bytes:
        return self._client.get(key) or b""

    def put_from(self, key: str, address: int, size: int) -> int:
        self._keys.append(key)
        return 0 if self._client.put(key, self._view(address, size)).stored else -1

    def get_into(self, key: str, address: int, size: int) -> int:
        got = self._client.get_into(key, self._view(address, size))
        return got.size if got.outcome == 0 else -1

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self._keys += keys
        outcomes = self._client.put_many(keys, list(map(self._view, addresses, sizes)))
        return [0 if outcome.stored else -1 for outcome in outcomes]

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        found = self._client.get_many_into(keys, list(map(self._view, addresses, sizes)))
        return [got.size if got.outcome == 0 else -1 for got in found]

    def is_exist(self, key: str) -> int:
        return int(bool(self._client.exists_many([key])[0]))

    def batch_is_exist(self, keys: list[str]) -> list[bool | None]:
        return self._client.exists_many(keys)  # True is 1

    def view(self, keys: list[str]) -> Any:
        return self._client.acquire(keys)

    def remove(self, key: str) -> int:
        return int(self._client.remove([key])[0])

    def remove_all(self) -> None:
        for at in range(0, len(self._keys), 10_000):
            self._client.remove(self._keys[at : at + 10_000])
        self._keys.clear()

    def close(self) -> None:
        self._client.close()

    def _view(self, address: int, size: int) -> memoryview:
        view = self._views.get((address, size))
        if view is None:
            view = self._views[address, size] = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        return view
