"""Mooncake Store, over its Python client. Runs under the Python of the environment it is installed in."""

from __future__ import annotations

from importlib.metadata import distributions
from typing import Any


class Mooncake:
    """`options`: master (host:port). A client with a segment is an owner: its own calls are copies in its memory."""

    def __init__(self, options: Any) -> None:
        self._master = options.master

    def open(self, segment_bytes: int, local_buffer_bytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            "127.0.0.1", "P2PHANDSHAKE", segment_bytes, local_buffer_bytes, "tcp", "", self._master
        )
        if code != 0:
            raise SystemExit(f"mooncake: setup answers {code}")

    def version(self) -> str:
        return " ".join(
            f"{one.metadata['Name']} {one.version}" for one in distributions() if "mooncake" in one.metadata["Name"]
        )

    def register(self, address: int, size: int) -> int:
        return int(self._store.register_buffer(address, size))

    def put_from(self, key: str, address: int, size: int) -> int:
        return int(self._store.put_from(key, address, size))

    def get_into(self, key: str, address: int, size: int) -> int:
        return int(self._store.get_into(key, address, size))

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return list(self._store.batch_put_from(keys, addresses, sizes))

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return list(self._store.batch_get_into(keys, addresses, sizes))

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return list(self._store.batch_is_exist(keys))

    def remove_all(self) -> None:
        self._store.remove_all(True)

    def close(self) -> None:
        self._store.close()
