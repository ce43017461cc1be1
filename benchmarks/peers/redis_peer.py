"""Redis or Valkey, over redis-py with the hiredis parser: SET and GET of one value, pipelines of them for batches."""

from __future__ import annotations

import ctypes
from typing import Any


class Redis:
    """`options`: master (host:port)."""

    def __init__(self, options: Any) -> None:
        self._host, _, self._port = options.master.rpartition(":")
        self._views: dict[tuple[int, int], memoryview] = {}

    def open(self, segment_bytes: int, local_buffer_bytes: int) -> None:
        import redis

        self._redis = redis.Redis(self._host, int(self._port))
        self._redis.ping()

    def version(self) -> str:
        import hiredis
        import redis

        server = self._redis.info("server")
        return f"redis {server['redis_version']}, redis-py {redis.__version__}, hiredis {hiredis.__version__}"

    def register(self, address: int, size: int) -> int:
        return 0

    def put_from(self, key: str, address: int, size: int) -> int:
        return 0 if self._redis.set(key, self._view(address, size)) else -1

    def get_into(self, key: str, address: int, size: int) -> int:
        return self._fill(self._redis.get(key), address, size)

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        pipe = self._redis.pipeline(transaction=False)
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            pipe.set(key, self._view(address, size))
        return [0 if done else -1 for done in pipe.execute()]

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        values = self._redis.mget(keys)
        return [self._fill(*one) for one in zip(values, addresses, sizes, strict=True)]

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        pipe = self._redis.pipeline(transaction=False)
        for key in keys:
            pipe.exists(key)
        return list(pipe.execute())

    def remove_all(self) -> None:
        self._redis.flushall()

    def close(self) -> None:
        self._redis.close()

    def _fill(self, value: bytes | None, address: int, size: int) -> int:
        if value is None:
            return -1
        if len(value) <= size:
            ctypes.memmove(address, value, len(value))
        return len(value)

    def _view(self, address: int, size: int) -> memoryview:
        view = self._views.get((address, size))
        if view is None:
            view = self._views[address, size] = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        return view
