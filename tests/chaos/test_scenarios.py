"""Small failures with one right outcome. README.md beside this file says where the other scenarios are tested."""

from __future__ import annotations

import asyncio
import secrets
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from anabranch.core.live.link import Link, connect
from anabranch.engine.request import SamplingParams
from anabranch.engine.runner import Chunk, LayerGate, ModelInfo, Sampled
from anabranch.engine.tripwire import TripwireRunner, tripwire_answer, tripwire_info
from anabranch.store.messages import DirectoryToNode, Holders, Join, Lookup
from anabranch.testing.chaos.judge import Outcome, judge
from anabranch.testing.chaos.live.dispatch import DirectClient
from anabranch.testing.chaos.live.rig import Rig, RigConfig
from anabranch.testing.chaos.workload import Ask
from anabranch.testing.faults import PlannedFaults
from anabranch.testing.store import LAYOUT, StoreLab, chain, wait_for
from anabranch.transfer.layouts import layout_digest

INFO = tripwire_info()
BLOCK = INFO.layout.block_tokens
SSD_SLOT = 4096 + -(-LAYOUT.full_block_bytes // 4096) * 4096
CALM = RigConfig(fault_scale=0.0)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """No thread is left behind; hand-overs between threads are quick."""
    usual, before = sys.getswitchinterval(), threading.active_count()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(usual)
    wait_for(lambda: threading.active_count() <= before, "threads to end")


def ask(tokens: list[int], *, number: int = 1, **fields: Any) -> Ask:
    n = fields.pop("n", 1)
    sampling = SamplingParams(seed=number, max_tokens=fields.pop("max_tokens", 4))
    defaults = {"tenant": "a", "fate": "finish", "patience_tokens": 0, "patience_s": 0.0}
    expected = tripwire_answer(INFO, tokens, sampling, n=n)
    return Ask(number=number, tokens=tokens, n=n, sampling=sampling, expected=expected, **{**defaults, **fields})


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + i * i * 7 + i) % 251 for i in range(length)]


def on_rig(
    scenario: Callable[[Rig, DirectClient], Awaitable[None]], config: RigConfig = CALM, **rig_fields: Any
) -> Rig:
    """Run a scenario on a whole cluster; afterwards nothing is held, and the books add up."""

    async def run(rig: Rig) -> None:
        client = DirectClient(rig.info, rig.addresses, time.monotonic)
        await client.start(4)
        try:
            await scenario(rig, client)
            await quiet(rig)
        finally:
            await client.close()
        rig.check()

    with Rig(1, config, INFO, **rig_fields) as rig:
        asyncio.run(run(rig))
    assert rig.leftovers() == {}
    return rig


async def until(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"timed out waiting for {what}"
        await asyncio.sleep(0.005)


async def quiet(rig: Rig) -> None:
    """Everything is free again."""
    await until(lambda: not rig.census(), "the census to return")
    assert rig.counters()["bad_frees"] == 0


# --- S03 --------------------------------------------------------------------------------------------------------


def test_s03_a_late_save_never_writes_what_came_after(tmp_path: Path) -> None:
    """Blocks are freed, evicted and overwritten while their save waits behind a disk that hangs."""
    faults = PlannedFaults()
    faults.arm("ssd.write", "hang")
    with StoreLab(tmp_path, slots=16, with_directory=False) as lab:
        node = lab.node("n", faults=faults, ssd_bytes=100 * SSD_SLOT)
        probe = lab.probe("n")
        old, new = chain("old", 12), chain("new", 11)
        probe.put(old)
        wait_for(lambda: faults.hanging == 1, "the first save to hang")
        slots = probe.put(new, keep=True)
        assert node.counters["evicted_dram"] == 7
        faults.release()
        lab.settled("n")
        probe.port.free(slots)
        probe.close()
        node.stop(unlink_arena=True)
        lab.node("n", ssd_bytes=100 * SSD_SLOT)
        reader = lab.probe("n")
        # `count` checks every byte that is found.
        found = reader.count(old), reader.count(new)
        assert 1 <= len(found[0]) <= 12
        assert set(found[0] + found[1]) == {"ssd"}


# --- S06 --------------------------------------------------------------------------------------------------------


def test_s06_another_tenant_hits_nothing_anywhere() -> None:
    async def scenario(rig: Rig, client: DirectClient) -> None:
        tokens = prompt(10 * BLOCK + 3)
        first = ask(tokens)
        assert judge(first, await client.put(first)).verdict == "right"
        for number in range(2, 9):  # push it out of memory, in every node
            other = ask(prompt(20 * BLOCK, seed=number), number=number)
            assert judge(other, await client.put(other)).verdict == "right"
        keys = client.keys(tokens, "a")
        await until(lambda: any(_on_disk(rig, name, keys) == 10 for name in rig.nodes), "the prompt on disk")
        assert client.dispatcher.fleet.prefixes.longest(client.keys(tokens, "b")) == {}
        read = {name: rig.counters()[name] for name in ("bytes_read", "bytes_fetched", "hits_dram")}
        cached = client.tally.usage.cached
        foreign = ask(tokens, number=20, tenant="b")
        assert judge(foreign, await client.put(foreign)).verdict == "right"
        assert client.tally.usage.cached == cached
        assert {name: rig.counters()[name] for name in read} == read
        again = ask(tokens, number=21)
        assert judge(again, await client.put(again)).verdict == "right"
        assert client.tally.usage.cached - cached == 10 * BLOCK

    on_rig(scenario, RigConfig(fault_scale=0.0, slots=48, ssd_slots=400))


def _on_disk(rig: Rig, name: str, keys: list[bytes]) -> int:
    index = rig.nodes[name].node.ssd
    return len(index.pool.match(keys)) if index is not None else 0


# --- S08 --------------------------------------------------------------------------------------------------------


class HeldRunner(TripwireRunner):
    """Stops in the middle of a long prefill until released."""

    release = threading.Event()
    inside = threading.Event()

    def run(self, batch: list[Chunk], gate: LayerGate) -> list[Sampled]:
        if any(len(chunk.tokens) > 1 for chunk in batch):
            type(self).inside.set()
            type(self).release.wait(20.0)
        return super().run(batch, gate)


class Held:
    """A fresh HeldRunner class per test."""

    def __init__(self) -> None:
        self.kind: type[HeldRunner] = type(
            "Runner", (HeldRunner,), {"release": threading.Event(), "inside": threading.Event()}
        )

    def __call__(self, info: ModelInfo, memory: memoryview) -> TripwireRunner:
        return self.kind(info, memory)


POINTS = ("queued", "in prefill", "prefill done", "mid-copy", "after first token")


@pytest.mark.parametrize("point", POINTS)
def test_s08_a_disconnect_at_any_point_frees_everything_and_tells_everybody_once(point: str) -> None:
    held = Held()
    if point not in ("queued", "in prefill"):
        held.kind.release.set()

    async def scenario(rig: Rig, client: DirectClient) -> None:
        if point == "mid-copy":
            for faults in rig.faults.values():
                faults.arm("push.payload", "hang")
        if point == "prefill done":
            for faults in rig.faults.values():
                faults.arm("control.start", "lose", 10)
        await _leave_at(point, rig, client, held)
        held.kind.release.set()
        await quiet(rig)
        for name, tamper in rig.tampers.items():
            involved = any(tamper.seen[kind] for kind in ("Prepare", "Prefill", "Submit"))
            assert involved <= tamper.seen["Cancel"] <= 1, f"{name} was told {tamper.seen}"
        # The cluster serves on, and the abandoned prompt's cache is right.
        again = ask(prompt(12 * BLOCK), number=9)
        for faults in rig.faults.values():
            faults.off()
        assert judge(again, await client.put(again)).verdict == "right"

    on_rig(scenario, runner=held)


async def _leave_at(point: str, rig: Rig, client: DirectClient, held: Held) -> None:
    def passed(kind: str) -> int:
        return sum(tamper.seen[kind] for tamper in rig.tampers.values())

    long = ask(prompt(12 * BLOCK), max_tokens=200 if point == "after first token" else 4)
    reached: dict[str, Callable[[], object]] = {
        "queued": lambda: passed("Prepare") > 0,
        "in prefill": held.kind.inside.is_set,
        "prefill done": lambda: passed("Start") > 0,
        "mid-copy": lambda: any(faults.fired["push.payload", "hang"] for faults in rig.faults.values()),
        "after first token": lambda: passed("StepOutput") > 0,
    }
    call, over = client.begin(long)
    await until(reached[point], point)
    client.dispatcher.cancel(call)
    outcome: Outcome = await over
    outcome.left = True
    assert judge(long, outcome).verdict == "left"


# --- S09 --------------------------------------------------------------------------------------------------------


def test_s09_a_prompt_too_long_for_decode_is_refused_with_the_reason_and_holds_nothing() -> None:
    async def scenario(rig: Rig, client: DirectClient) -> None:
        refused = ask(prompt(40 * BLOCK))
        outcome = await client.put(refused)
        assert outcome.error == "context_length_exceeded"
        assert "too long for the arena" in outcome.message
        assert sum(tamper.seen["Prefill"] for tamper in rig.tampers.values()) == 0
        await quiet(rig)
        names = []
        for number in (2, 3):
            shorter = ask(prompt(30 * BLOCK, seed=number), number=number)
            assert judge(shorter, await client.put(shorter)).verdict == "right"
            names.append(rig.tickets[-1][1].handoff)
        assert len(set(names)) == 2

    on_rig(scenario, RigConfig(fault_scale=0.0, slots=36))


# --- S13 --------------------------------------------------------------------------------------------------------


def test_s13_asking_who_has_a_block_protects_nothing(tmp_path: Path) -> None:
    """The directory answers "exists" without touching a node, so polling cannot keep old blocks alive."""
    with StoreLab(tmp_path, slots=40) as lab:
        node = lab.node("n")
        probe = lab.probe("n")
        old = chain("old", 20)
        probe.put(old)
        lab.announced(20)
        stop, answers = threading.Event(), []
        poller = threading.Thread(target=_poll, args=(lab, old, stop, answers))
        poller.start()
        try:
            for i in range(8):
                assert len(probe.put(chain(f"new{i}", 10))) == 10
            wait_for(lambda: len(answers) > 5, "the poller")
        finally:
            stop.set()
            poller.join()
        assert node.counters["reserves_refused"] == 0
        assert probe.count(old) == [], "polling kept old blocks"
        assert probe.count(chain("new7", 10)) == ["dram"] * 10


def _poll(lab: StoreLab, keys: list[bytes], stop: threading.Event, answers: list[Holders]) -> None:
    assert lab.directory is not None
    got = threading.Semaphore(0)

    def received(link: Link, message: Any) -> None:
        answers.append(message)
        got.release()

    link = Link(connect(lab.directory.address), DirectoryToNode, received, lambda link, reason: None)
    link.start()
    layout = layout_digest(LAYOUT)
    link.send(Join(node_id="poller", epoch=secrets.randbits(60), address="127.0.0.1:1", layout=layout))
    while not stop.is_set():
        link.send(Lookup(op=1, keys=keys, layout=layout))
        got.acquire(timeout=5.0)
    link.close()
    link.join()


# --- S18 --------------------------------------------------------------------------------------------------------


def test_s18_every_prompt_token_is_counted_once_by_where_it_came_from() -> None:
    """1,000 tokens each: (a) part local, part outer; (b) opts out; (c) outer only, and the load fails; (d) aborted."""

    async def scenario(rig: Rig, _: DirectClient) -> None:
        here, there = await _alone(rig, "prefill-0"), await _alone(rig, "decode-0")
        tokens, other = prompt(1000), prompt(1000, seed=5)
        await _ask(here, ask(tokens[:601]))
        await _ask(there, ask(tokens[:801]))
        await _ask(there, ask(other[:401]))
        await until(lambda: rig.directory.directory.census()["blocks"] >= 37 + 50 + 25, "announcements")
        a = await _ask(here, ask(tokens))
        assert (a.dram, a.peer, a.ssd, a.computed) == (37 * BLOCK, 13 * BLOCK, 0, 1000 - 50 * BLOCK)
        before = rig.counters(), rig.directory.directory.counters["lookups"]
        b = await _ask(here, ask(tokens, cacheable=False))
        assert (b.cached, b.computed) == (0, 1000)
        assert rig.directory.directory.counters["lookups"] == before[1]
        rig.faults["prefill-0"].arm("peer.fetch.payload", "fail")
        c = await _ask(here, ask(other))
        assert (c.cached, c.computed) == (0, 1000)
        assert rig.directory.directory.counters["lookups"] == before[1] + 1
        assert rig.counters()["hits_peer"] == before[0]["hits_peer"]
        assert rig.counters()["fetch_failures"] == before[0]["fetch_failures"] + 1
        d = ask(prompt(1000, seed=6), fate="leave")
        assert judge(d, await here.put(d)).verdict == "left"
        assert here.tally.usage.prompt == 601 + 3 * 1000
        assert here.tally.uneven == []
        await here.close()
        await there.close()

    on_rig(scenario, RigConfig(fault_scale=0.0, slots=200, ssd_slots=8))


async def _alone(rig: Rig, name: str) -> DirectClient:
    """A gateway that knows this engine only, so the engine does everything."""
    client = DirectClient(rig.info, [rig.address(name)], time.monotonic)
    await client.start(1)
    return client


async def _ask(client: DirectClient, question: Ask) -> Any:
    """The usage of one request, rightly answered."""
    before = msgspec.structs.asdict(client.tally.usage)
    assert judge(question, await client.put(question)).verdict == "right"
    after = msgspec.structs.asdict(client.tally.usage)
    return type(client.tally.usage)(**{name: after[name] - before[name] for name in after})
