"""Random requests on four tripwire engines under memory pressure, faults, cancels and reordering: every answer equals
the oracle, and nothing is left behind."""

from __future__ import annotations

import random

import pytest

from anabranch.engine.config import EngineConfig
from anabranch.engine.request import EngineRequest, SamplingParams
from anabranch.engine.tripwire import tripwire_answer, tripwire_info
from anabranch.testing.engines import LocalEngine, LocalGateway, Reply, run_until_idle
from anabranch.testing.fakes import Fabric, PortFaults

INFO = tripwire_info(layers=3, block_tokens=8, context_tokens=400, vocab=97)
ROOT, KEY = b"r" * 32, b"k" * 32
CONFIG = EngineConfig(step_tokens=48, max_running=12, max_waiting=64, spare_slots=4, load_timeout_s=1.0)


class RandomFaults(PortFaults):
    def __init__(self, rng: random.Random, rate: float) -> None:
        self.rng, self.rate = rng, rate
        self.seen: dict[str, int] = {}

    def hit(self, name: str) -> bool:
        hit = self.rng.random() < self.rate
        self.seen[name] = self.seen.get(name, 0) + hit
        return hit

    def load_usable(self, op: int, blocks: int, layers: int) -> tuple[int, int]:
        if self.hit("load"):
            return self.rng.randrange(blocks), self.rng.randrange(layers + 1)
        return blocks, layers

    def refuse_reserve(self, op: int, count: int) -> bool:
        return self.hit("reserve")

    def break_push(self, handoff: str, layer: int) -> bool:
        return self.hit("push")


class World:
    def __init__(self, seed: int, *, slots: int, fault_rate: float) -> None:
        self.rng = random.Random(seed)
        self.fabric = Fabric(choose=self.rng.randrange)
        self.gateway = LocalGateway()
        self.faults = RandomFaults(self.rng, fault_rate)
        self.engines = [
            LocalEngine(
                self.fabric,
                name,
                INFO,
                CONFIG,
                slots,
                self.gateway.receive,
                ssd_blocks=80,
                faults=self.faults,
            )
            for name in ("p0", "p1", "d0", "d1")
        ]
        self.prefixes = [[self.rng.randrange(97) for _ in range(self.rng.randrange(160))] for _ in range(6)]
        self.now = 0.0
        self.count = 0

    def request(self) -> EngineRequest:
        rng = self.rng
        prefix = rng.choice(self.prefixes)
        tail = [rng.randrange(97) for _ in range(rng.choice((0, 1, 3, 8, 20, 40)))]
        tokens = (prefix[: rng.choice((len(prefix), rng.randrange(len(prefix) + 1)))] + tail) or [1]
        self.count += 1
        sampling = SamplingParams(
            seed=rng.randrange(4),
            max_tokens=rng.choice((1, 2, 5, 17, 33)),
            min_tokens=rng.choice((0, 0, 3)),
            stop_token_ids=rng.choice(((), (5, 6, 7))),
        )
        return EngineRequest(
            request_id=f"q{self.count}",
            tokens=tokens,
            sampling=sampling,
            n=rng.choice((1, 1, 1, 2, 4)),
            root=ROOT,
            hash_key=KEY,
            cacheable=rng.random() < 0.95,
        )

    def send(self) -> Reply:
        prefill, decode = self.rng.choice(self.engines[:2]), self.rng.choice(self.engines[2:])
        if self.rng.random() < 0.7:
            return self.gateway.disaggregate(self.request(), prefill, decode)
        return self.gateway.submit(self.request(), decode)

    def step(self) -> None:
        self.fabric.pump(self.rng.randrange(12))
        engine = self.rng.choice(self.engines)
        engine.turn(self.now)
        self.now += 0.002

    def upset(self) -> None:
        """One of the things that happen to a cluster."""
        live = [reply for reply in self.gateway.replies.values() if not reply.done]
        event = self.rng.randrange(4)
        if event == 0 and live:
            self.gateway.cancel(self.rng.choice(live).request.request_id)
        elif event == 1:
            port = self.rng.choice(self.engines).port
            if not port.lost:
                port.lose()
            else:
                private = port.private
                port.come_back(self.rng.sample(private, min(len(private), self.rng.choice((0, 0, 3)))))
        elif event == 2 and self.fabric.inbound:
            self.fabric.expire(self.rng.choice(sorted(self.fabric.inbound)))
        elif event == 3:
            self.rng.choice(self.engines).port.forget_cache()

    def rest(self) -> None:
        self.faults.rate = 0.0
        for engine in self.engines:
            if engine.port.lost:
                engine.port.come_back()
        self.now = run_until_idle(self.fabric, self.engines, now=self.now)
        for engine in self.engines:
            engine.port.release_lost()

    def check(self, replies: list[Reply]) -> int:
        """Answered in full, all equal to the oracle, or an allowed failure; returns how many were answered."""
        answered = 0
        for reply in replies:
            if reply.cancelled:
                continue
            if reply.failed is not None:
                assert reply.failed.retryable, reply.failed
                continue
            request = reply.request
            want = tripwire_answer(INFO, request.tokens, request.sampling, n=request.n, limit=400)
            assert list(zip(reply.tokens, reply.finish, strict=True)) == want, self.stories(request.request_id)
            usage = reply.usage
            assert usage is not None
            assert usage.prompt == len(request.tokens) == usage.computed + usage.cached
            answered += 1
        for engine in self.engines:
            assert not any(engine.core.census().values())
            engine.port.pool.check()
            assert engine.port.referenced == 0
            assert not engine.port._loads
        assert not self.fabric.inbound
        assert not self.fabric.outbound
        return answered

    def stories(self, request_id: str) -> str:
        return "\n".join(f"{engine.port.name}: {engine.core.story(request_id)}" for engine in self.engines)


@pytest.mark.parametrize("seed", range(6))
def test_four_engines_with_faults(seed: int) -> None:
    world = World(seed, slots=80, fault_rate=0.08)
    replies: list[Reply] = []
    while len(replies) < 60:
        if world.rng.random() < 0.15:
            replies.append(world.send())
        if world.rng.random() < 0.01:
            world.upset()
        world.step()
    world.rest()
    assert world.check(replies) > 30
    preemptions = sum(engine.core.load().preemptions for engine in world.engines)
    assert preemptions + sum(world.faults.seen.values()) > 0


def test_the_same_events_give_the_same_steps() -> None:
    logs = []
    for _ in range(2):
        world = World(7, slots=60, fault_rate=0.1)
        for _ in range(25):
            world.send()
            for _ in range(8):
                world.step()
        world.rest()
        steps = [step for engine in world.engines for step in engine.steps]
        logs.append([[(chunk.seq, chunk.start, tuple(chunk.tokens)) for chunk in step.chunks] for step in steps])
    assert logs[0] == logs[1]
    assert len(logs[0]) > 100


@pytest.mark.parametrize("seed", range(3))
def test_four_engines_without_faults_fail_nothing(seed: int) -> None:
    world = World(1000 + seed, slots=120, fault_rate=0.0)
    replies: list[Reply] = []
    while len(replies) < 40:
        if world.rng.random() < 0.1:
            replies.append(world.send())
        world.step()
    world.rest()
    assert world.check(replies) == len(replies)
