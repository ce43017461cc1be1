"""A client process of the store campaign: calls without end, every byte that comes back is checked.

    python -m anabranch.testing.chaos.live.store_caller PLAN.json

Writes JSON lines: what happened since the last one (`Line`). Ends on SIGTERM, or when its stdin closes.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from anabranch.core.errors import AnabranchError
from anabranch.store.values.live.client import Client
from anabranch.store.values.outcome import Outcome
from anabranch.testing.chaos.store_oracle import Call, Calls, Traffic, Verdict, Versions, content, size_of, worst

LINE_S = 0.05
PIN_S = 2.0
UNSURE = {Outcome.UNKNOWN, Outcome.UNREACHABLE, Outcome.STALE, Outcome.FULL, Outcome.DAMAGED, Outcome.DIFFERS}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`name`: unique over all client processes that ever ran; `addresses`: nodes to begin with, in this order.
    `rest_s`: pause of a thread after each call."""

    name: str
    seed: int
    addresses: list[str]
    directory: str
    traffic: Traffic
    threads: int = 2
    local: bool = True
    timeout_s: float = 2.0
    rest_s: float = 0.0


class Done(msgspec.Struct, frozen=True, array_like=True):
    """One call that ended; times are `time.monotonic()`, equal in all processes of a host."""

    kind: str
    verdict: Verdict
    began_s: float
    ended_s: float


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """`stored`: keys of the pools `pair` and `durable` that were acknowledged. `stories`: of wrong and stale bytes."""

    done: list[Done] = []
    stored: list[str] = []
    outcomes: dict[str, int] = {}
    stories: list[str] = []


class Log:
    """Collects from all threads; `flush` writes a line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._done: list[Done] = []
        self._stored: list[str] = []
        self._outcomes: dict[str, int] = {}
        self._stories: list[str] = []

    def done(self, done: Done, stored: Sequence[str]) -> None:
        with self._lock:
            self._done.append(done)
            self._stored += stored

    def count(self, what: str) -> None:
        with self._lock:
            self._outcomes[what] = self._outcomes.get(what, 0) + 1

    def tell(self, story: str) -> None:
        with self._lock:
            self._stories.append(story)

    def flush(self) -> None:
        with self._lock:
            line = Line(done=self._done, stored=self._stored, outcomes=self._outcomes, stories=self._stories)
            self._begin()
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()


class Store(Protocol):
    """The calls of `anabranch.Client` that are made here."""

    def put_many(self, keys: Any, values: Any, *, replicas: int = 0, durable: bool = False) -> list[Outcome]: ...
    def get_many_into(self, keys: Any, buffers: Any) -> list[Any]: ...
    def acquire(self, keys: Any) -> Any: ...
    def exists_many(self, keys: Any) -> list[bool | None]: ...
    def longest_prefix(self, keys: Any) -> int: ...
    def remove(self, keys: Any) -> list[Outcome]: ...
    def pin(self, keys: Any, seconds: float) -> list[Outcome]: ...


class Caller:
    """One thread's calls. `own` is the prefix of the keys that only this thread writes."""

    def __init__(self, store: Store, plan: Plan, own: str, seed: int, log: Log) -> None:
        self._store = store
        self._traffic = plan.traffic
        self._own = own
        self._calls = Calls(seed, plan.traffic, own)
        self._versions = Versions()
        self._log = log

    def step(self) -> Verdict:
        call = self._calls.next()
        began = time.monotonic()
        stored: list[str] = []
        try:
            verdict = self._make(call, stored)
        except AnabranchError as error:
            verdict = "error"
            self._log.count(f"{call.kind} {type(error).__name__}")
        self._log.done(Done(call.kind, verdict, began, time.monotonic()), stored)
        return verdict

    def _make(self, call: Call, stored: list[str]) -> Verdict:
        match call.kind:
            case "put":
                return self._put(call, stored)
            case "get":
                return self._get(call)
            case "view":
                return self._view(call)
            case "remove":
                return self._remove(call)
            case "exists":
                return "unsure" if None in self._store.exists_many(call.keys) else "ok"
            case "prefix":
                self._store.longest_prefix(call.keys)
                return "ok"
            case "pin":
                return worst(self._verdict(call, outcome) for outcome in self._store.pin(call.keys, PIN_S))

    def _put(self, call: Call, stored: list[str]) -> Verdict:
        mine = call.pool == "own"
        values = [self._content(key, self._versions.to_put(key) if mine else 0) for key in call.keys]
        if mine:
            for key in call.keys:
                self._versions.may_be_there(key)
        outcomes = self._store.put_many(call.keys, values, replicas=call.replicas, durable=call.durable)
        if mine:
            self._note(call, outcomes)
        if call.replicas or call.durable:
            stored += [key for key, outcome in zip(call.keys, outcomes, strict=True) if outcome.stored]
        return worst(self._verdict(call, outcome) for outcome in outcomes)

    def _get(self, call: Call) -> Verdict:
        buffers = [bytearray(size_of(key, self._traffic)) for key in call.keys]
        found = self._store.get_many_into(call.keys, [memoryview(buffer) for buffer in buffers])
        verdicts = []
        for key, buffer, got in zip(call.keys, buffers, found, strict=True):
            verdict = self._verdict(call, got.outcome)
            verdicts.append(self._check(call, key, buffer, f"tier {got.tier}") if verdict == "ok" else verdict)
        return worst(verdicts)

    def _view(self, call: Call) -> Verdict:
        """Bytes of a view count only if the lease still held after they were copied."""
        with self._store.acquire(call.keys) as views:
            copies = [None if view is None else bytes(view) for view in views]
            held = views.valid
        if not held:
            return "unsure"
        found: list[Verdict] = [
            "miss" if copy is None else self._check(call, key, copy, "view")
            for key, copy in zip(call.keys, copies, strict=True)
        ]
        return worst(found)

    def _remove(self, call: Call) -> Verdict:
        confirmed = dict.fromkeys(call.keys, False)
        try:
            outcomes = self._store.remove(call.keys)
            self._note(call, outcomes)
            confirmed.update(
                (key, outcome in (Outcome.OK, Outcome.MISSING))
                for key, outcome in zip(call.keys, outcomes, strict=True)
            )
        finally:
            for key, sure in confirmed.items():
                self._versions.removed(key, confirmed=sure)
        return worst(self._verdict(call, outcome) for outcome in outcomes)

    def _check(self, call: Call, key: str, got: bytes | bytearray, how: str) -> Verdict:
        size = size_of(key, self._traffic)
        verdict: Verdict
        if call.pool == "own":
            verdict = self._versions.judge(key, size, got)
        else:
            verdict = "ok" if got == content(key, size) else "wrong"
        if verdict != "ok":
            now, story = time.monotonic(), self._versions.story(key)
            self._log.tell(f"{verdict}: {call.kind} of {key} ({size} bytes, {how}) at {now:.3f}; {story}")
        return verdict

    def _note(self, call: Call, outcomes: Sequence[Outcome]) -> None:
        for key, outcome in zip(call.keys, outcomes, strict=True):
            version = self._versions.to_put(key)
            self._versions.note(key, f"{time.monotonic():.3f} {call.kind} of version {version} {outcome.name}")

    def _content(self, key: str, version: int) -> bytes:
        return content(key, size_of(key, self._traffic), version)

    def _verdict(self, call: Call, outcome: Outcome) -> Verdict:
        if outcome is Outcome.MISSING:
            return "miss"
        if outcome.stored:
            return "ok"
        self._log.count(f"{call.kind} {outcome.name}")
        return "unsure"


def main() -> None:
    with open(sys.argv[1], "rb") as file:
        plan = msgspec.json.decode(file.read(), type=Plan)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    log = Log()
    client = Client(plan.addresses, directory=plan.directory, local=plan.local, timeout_s=plan.timeout_s)

    def run(index: int) -> None:
        caller = Caller(client, plan, f"{plan.name}.{index}", plan.seed * 100 + index, log)
        while not ended.is_set():
            if caller.step() == "error" or plan.rest_s:
                ended.wait(max(plan.rest_s, 0.005))

    threads = [threading.Thread(target=run, args=(index,), name=f"calls-{index}") for index in range(plan.threads)]
    for thread in threads:
        thread.start()
    while not ended.wait(LINE_S) and any(thread.is_alive() for thread in threads):
        log.flush()
    ended.set()
    for thread in threads:
        thread.join()
    client.close()
    log.flush()


if __name__ == "__main__":
    main()
