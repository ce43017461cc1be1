"""Seeded traffic for the value store, with what every read may answer: a value is a function of its key and version.

Four pools of keys: `shared` (any client, one copy), `pair` (two copies), `durable` (acknowledged once on disk), and
each client's `own`, which it removes and puts again with other bytes. What was removed, and then confirmed, must not be
seen again (`Versions`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import Literal

import msgspec
from blake3 import blake3

Kind = Literal["put", "get", "exists", "prefix", "remove", "pin", "view"]
Verdict = Literal["ok", "miss", "unsure", "error", "wrong", "stale"]
WEIGHTS: dict[Kind, int] = {"put": 35, "get": 40, "exists": 6, "prefix": 4, "remove": 6, "pin": 2, "view": 7}
POOLS = ("shared", "pair", "durable")


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """`keys`: of each pool. `weights` of the kinds of call. Sizes are log-uniform between `smallest` and `largest`."""

    keys: int = 400
    own: int = 40
    smallest: int = 1
    largest: int = 2 << 20
    batch: int = 12
    weights: dict[Kind, int] = msgspec.field(default_factory=lambda: dict(WEIGHTS))


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call: `pool` "own" keys get the client's prefix from whoever executes it."""

    kind: Kind
    pool: str
    keys: list[str]

    @property
    def replicas(self) -> int:
        return 2 if self.pool == "pair" else 0

    @property
    def durable(self) -> bool:
        return self.pool == "durable"


class Calls:
    """An endless, seeded sequence of calls. `own`: prefix of the keys that only this client writes."""

    def __init__(self, seed: int, traffic: Traffic, own: str) -> None:
        self._random = random.Random(seed)
        self._traffic = traffic
        self._own = own

    def next(self) -> Call:
        traffic = self._traffic
        kind = self._random.choices(list(traffic.weights), list(traffic.weights.values()))[0]
        pool = "own" if kind == "remove" else self._random.choice((*POOLS, "own"))
        count = 1 if self._random.random() < 0.5 else self._random.randint(2, traffic.batch)
        if kind == "prefix":
            first = self._random.randrange(traffic.keys)
            return Call(kind=kind, pool="shared", keys=[key_of("shared", first + i) for i in range(count)])
        keys = dict.fromkeys(self._key(pool) for _ in range(count))
        return Call(kind=kind, pool=pool, keys=list(keys))

    def _key(self, pool: str) -> str:
        if pool == "own":
            return key_of(self._own, self._random.randrange(self._traffic.own))
        # Half of the calls meet in an eighth of the keys.
        limit = self._traffic.keys if self._random.random() < 0.5 else max(1, self._traffic.keys // 8)
        return key_of(pool, self._random.randrange(limit))


class Versions:
    """What one client knows of keys that only it writes: the version of its next put, and the versions a read may see.

    A put whose answer was lost may have happened; a removal that was not confirmed may not have.
    """

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._allowed: dict[str, set[int]] = {}
        self._history: dict[str, deque[str]] = {}

    def note(self, key: str, what: str) -> None:
        """For the story of a key whose bytes turn out wrong."""
        self._history.setdefault(key, deque(maxlen=12)).append(what)

    def story(self, key: str) -> str:
        return "; ".join(self._history.get(key, ()))

    def to_put(self, key: str) -> int:
        return self._next.setdefault(key, 0)

    def may_be_there(self, key: str) -> None:
        """A put of the current version was sent."""
        self._allowed.setdefault(key, set()).add(self.to_put(key))

    def removed(self, key: str, *, confirmed: bool) -> None:
        """The next put has other bytes; until a removal is confirmed, older ones may be seen."""
        if confirmed:
            self._allowed[key] = set()
        self._next[key] = self.to_put(key) + 1

    def judge(self, key: str, size: int, got: bytes | bytearray) -> Verdict:
        """ "ok", "stale": bytes of a version that must be gone, "wrong": bytes that were never put."""
        allowed = self._allowed.get(key, set())
        if any(got == content(key, size, version) for version in allowed):
            return "ok"
        older = range(self.to_put(key) + 1)
        return "stale" if any(got == content(key, size, version) for version in older) else "wrong"


def key_of(pool: str, number: int) -> str:
    return f"{pool}/{number}"


def size_of(key: str, traffic: Traffic) -> int:
    """Log-uniform, and equal in every process."""
    draw = int.from_bytes(blake3(key.encode()).digest()[:4], "little") / 2**32
    ratio = traffic.largest / traffic.smallest
    return int(traffic.smallest * ratio**draw)


def content(key: str, size: int, version: int = 0) -> bytes:
    return blake3(f"{version}:{key}".encode()).digest(length=size)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Of a call, from the verdicts of its items; a call of which something worked has worked."""
    seen = set(verdicts)
    order: tuple[Verdict, ...] = ("wrong", "stale", "ok", "unsure", "error", "miss")
    return next((verdict for verdict in order if verdict in seen), "miss")
