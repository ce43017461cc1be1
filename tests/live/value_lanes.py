"""A value node in this process, and a caller that speaks its messages one by one."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anabranch.core.authentication import OPEN, Access, Credentials
from anabranch.store.messages import Stat
from anabranch.store.values.config import StoreConfig, WriteConfig
from anabranch.store.values.live.lane import Lane
from anabranch.store.values.live.node_server import ValueNode
from anabranch.store.values.live.session import Session
from anabranch.store.values.messages import (
    INLINE_BYTES,
    Found,
    Get,
    Granted,
    Offer,
    Put,
    Read,
    Return,
    Seal,
    Slice,
    Stored,
)
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.slices import slice_bounds, slice_sum, slice_sums

MIB = 1 << 20
PATIENCE_S = 60.0


def name() -> bytes:
    return secrets.token_bytes(32)


class NodeRig:
    """A node under `folder`; `again` starts another process's worth of it on the same files."""

    def __init__(self, folder: Path, arena: str, config: StoreConfig, **more: Any) -> None:
        self.folder, self.arena, self.config, self.more = folder, arena, config, more
        self.node = self.again()

    def again(self, **more: Any) -> ValueNode:
        options = {**self.more, **more}
        self.node = ValueNode(
            options.pop("node_id", "n1"),
            self.config,
            options.pop("writes", WriteConfig()),
            unix_address=f"unix:{self.folder}/node.sock",
            arena_path=self.arena,
            data_dir=str(self.folder / "data"),
            access=options.pop("access", OPEN),
            **options,
        )
        self.node.start()
        return self.node

    def census(self) -> dict[str, int]:
        return self.node.stat().census

    def counter(self, key: str) -> float:
        return self.node.stat().counters.get(key, 0)


class Caller:
    """One lane of one session."""

    def __init__(self, address: str, credentials: Credentials | None = None, session: Session | None = None) -> None:
        self.session = session or Session(credentials or Credentials())
        self.lane, self.welcome = self.session.open(address, 5.0, time.monotonic() + PATIENCE_S)
        self.lane.until(time.monotonic() + PATIENCE_S)

    def another(self, address: str) -> Caller:
        return Caller(address, session=self.session)

    def close(self) -> None:
        self.lane.close()

    def ask(self, message: Any) -> Any:
        self.lane.send(message)
        return self.lane.receive()

    def put(self, names: Sequence[bytes], values: Sequence[bytes], **offer: Any) -> list[Outcome]:
        """In one message."""
        message = Offer(op=1, names=b"".join(names), sizes=[len(v) for v in values], **offer)
        sums = [s for v in values for s in slice_sums(v)]
        self.lane.send(Put(offer=message, sums=sums), payload=[memoryview(v) for v in values])
        reply = self.lane.receive()
        assert isinstance(reply, Stored)
        return [Outcome(o) for o in reply.outcomes]

    def offer(self, names: Sequence[bytes], sizes: Sequence[int], **offer: Any) -> Granted:
        reply = self.ask(Offer(op=2, names=b"".join(names), sizes=list(sizes), **offer))
        assert isinstance(reply, Granted)
        return reply

    def slices(self, put: int, item: int, value: bytes, skip: Sequence[int] = ()) -> None:
        view = memoryview(value)
        for i, (start, end) in enumerate(slice_bounds(len(value))):
            if i not in skip:
                part = view[start:end]
                self.lane.send(Slice(put=put, item=item, slice=i, sum=slice_sum(part)), payload=[part])

    def seal(self, put: int, values: Sequence[bytes]) -> Stored:
        reply = self.ask(Seal(op=3, put=put, sums=[s for v in values for s in slice_sums(v)]))
        assert isinstance(reply, Stored)
        return reply

    def put_large(self, names: Sequence[bytes], values: Sequence[bytes], **offer: Any) -> list[Outcome]:
        granted = self.offer(names, [len(v) for v in values], **offer)
        sent = [i for i, o in enumerate(granted.outcomes) if o == Outcome.SEND]
        if not sent:
            return [Outcome(o) for o in granted.outcomes]
        for i in sent:
            self.slices(granted.put, i, values[i])
        return [Outcome(o) for o in self.seal(granted.put, [values[i] for i in sent]).outcomes]

    def find(self, names: Sequence[bytes], **get: Any) -> Found:
        reply = self.ask(Get(op=4, names=b"".join(names), **get))
        assert isinstance(reply, Found)
        return reply

    def get(self, names: Sequence[bytes]) -> list[bytes | Outcome]:
        """In one message, as long as they fit it."""
        found = self.find(names, limit=INLINE_BYTES)
        assert found.inline or not found.sizes
        values = []
        for size in found.sizes:
            value = bytearray(size)
            self.lane.receive_into([memoryview(value)])
            values.append(bytes(value))
        assert [s for v in values for s in slice_sums(v)] == found.sums
        at = iter(values)
        return [next(at) if o == Outcome.OK else Outcome(o) for o in found.outcomes]

    def read(self, found: Found, item: int, slice_: int, length: int) -> bytes | None:
        self.lane.send(Read(lease=found.lease, item=item, slice=slice_))
        buffer = bytearray(length)
        return bytes(buffer) if self.lane.receive_counted([memoryview(buffer)], length) else None

    def get_large(self, name: bytes) -> bytes | Outcome:
        found = self.find([name])
        if found.outcomes[0] != Outcome.OK:
            return Outcome(found.outcomes[0])
        parts = []
        for i, (start, end) in enumerate(slice_bounds(found.sizes[0])):
            part = self.read(found, 0, i, end - start)
            assert part is not None
            assert slice_sum(part) == found.sums[i]
            parts.append(part)
        self.lane.send(Return(lease=found.lease))
        return b"".join(parts)


def arena_path(tag: str) -> str:
    return f"/dev/shm/anabranch-test-{os.getpid()}-{tag}"


def until(condition: Any, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


__all__ = ["MIB", "Access", "Caller", "Lane", "NodeRig", "Stat", "arena_path", "name", "until"]
