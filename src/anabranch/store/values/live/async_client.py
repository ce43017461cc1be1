"""`anabranch.AsyncClient`: the calls of `Client` as coroutines.

Each call runs on a thread of a small pool of its own: bytes never pass the event loop. Cancelling a call ends its waits
at once, gives back what it had reserved, and is over only when no buffer will be touched any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from anabranch.core.errors import InvalidInput
from anabranch.core.live.tls import Tls
from anabranch.store.values.config import LinkConfig, SecurityConfig
from anabranch.store.values.got import Got
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.client import Client, StoreStat
from anabranch.store.values.live.views import Views
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import Key
from anabranch.transfer.classes import TrafficName
from anabranch.transfer.live.rails import Links

T = TypeVar("T")


class AsyncClient:
    """As `Client`, with the same arguments; `calls`: how many run at once, others wait their turn."""

    def __init__(
        self,
        nodes: str | Sequence[str] = (),
        *,
        directory: str | None = "",
        tenant: str = "default",
        namespace: str = "default",
        epoch: str = "",
        secret: bytes | str | Path | None = None,
        tls: Tls | SecurityConfig | None = None,
        timeout_s: float = 5.0,
        local: bool = True,
        lanes: int = 2,
        name: str = "",
        links: Links | LinkConfig | None = None,
        traffic: TrafficName = "load",
        calls: int = 8,
    ) -> None:
        if calls < 1:
            raise InvalidInput(f"calls must be at least 1, not {calls}")
        self._client = Client(
            nodes,
            directory=directory,
            tenant=tenant,
            namespace=namespace,
            epoch=epoch,
            secret=secret,
            tls=tls,
            timeout_s=timeout_s,
            local=local,
            lanes=lanes,
            name=name,
            links=links,
            traffic=traffic,
        )
        self._threads = ThreadPoolExecutor(calls, thread_name_prefix="store-call")

    async def put(
        self, key: Key, value: Any, *, replicas: int = 0, durable: bool = False, parent: Key | None = None
    ) -> Outcome:
        return (await self.put_many([key], [value], replicas=replicas, durable=durable, parent=parent))[0]

    async def put_many(
        self,
        keys: Sequence[Key],
        values: Sequence[Any],
        *,
        replicas: int = 0,
        durable: bool = False,
        chain: bool = False,
        parent: Key | None = None,
    ) -> list[Outcome]:
        client = self._client
        return await self._run(lambda call: client._put_many(keys, values, call, replicas, durable, chain, parent))

    async def get(self, key: Key) -> bytes | None:
        return await self._run(lambda call: self._client._get(key, call))

    async def get_into(self, key: Key, buffer: Any) -> Got:
        return (await self.get_many_into([key], [buffer]))[0]

    async def get_many_into(self, keys: Sequence[Key], buffers: Sequence[Any]) -> list[Got]:
        return await self._run(lambda call: self._client._get_many_into(keys, buffers, call))

    async def acquire(self, keys: Sequence[Key]) -> Views:
        """`with await client.acquire(keys) as views:`"""
        return await self._run(lambda call: self._client._acquire(keys, call), undo=Views.release)

    async def exists_many(self, keys: Sequence[Key]) -> list[bool | None]:
        return await self._run(lambda call: self._client._exists_many(keys, call))

    async def longest_prefix(self, keys: Sequence[Key]) -> int:
        return await self._run(lambda call: self._client._longest_prefix(keys, call))

    async def remove(self, keys: Sequence[Key]) -> list[Outcome]:
        return await self._run(lambda call: self._client._remove(keys, call))

    async def invalidate(self, *, epoch: str | None = None, tenant: str | None = None) -> dict[str, int]:
        return await self._run(lambda call: self._client._invalidate(epoch, tenant, call))

    async def pin(self, keys: Sequence[Key], seconds: float) -> list[Outcome]:
        return await self._run(lambda call: self._client._pin(keys, seconds, call))

    async def unpin(self, keys: Sequence[Key]) -> list[Outcome]:
        return await self._run(lambda call: self._client._pin(keys, 0.0, call))

    async def prefetch(self, keys: Sequence[Key]) -> list[Outcome]:
        return await self._run(lambda call: self._client._prefetch(keys, call))

    async def stat(self) -> StoreStat:
        return await self._run(self._client._stat)

    async def close(self) -> None:
        """Calls that still run end with an error."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _close(self) -> None:
        self._client.close()
        self._threads.shutdown(cancel_futures=True)

    async def _run(self, work: Callable[[Call], T], *, undo: Callable[[T], None] | None = None) -> T:
        call = self._client._call()
        future = self._threads.submit(work, call)
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not future.cancel():
                call.cancel()
                await self._over(waiting, undo)
            raise

    async def _over(self, waiting: asyncio.Future[T], undo: Callable[[T], None] | None) -> None:
        """Whatever the cancelled call came to, nobody wants it; but it must not touch a buffer any more."""
        while not waiting.done():
            try:
                await asyncio.wait([waiting])
            except asyncio.CancelledError:
                continue  # cancelled again: there is no quicker way
        if not waiting.cancelled() and waiting.exception() is None and undo is not None:
            undo(waiting.result())
