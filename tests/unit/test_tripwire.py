"""The tripwire runner: equal to its oracle however the work is cut, different after one wrong byte."""

from __future__ import annotations

import random

import pytest

from anabranch.core.errors import InvalidInput
from anabranch.engine.paced import Pace, PacedRunner
from anabranch.engine.request import SamplingParams
from anabranch.engine.runner import Chunk, OpenGate
from anabranch.engine.tripwire import TripwireRunner, tripwire_answer, tripwire_info

INFO = tripwire_info(layers=3, block_tokens=4, vocab=1 << 30)
PARAMS = SamplingParams(max_tokens=5, seed=9)
PROMPT = [5, 8, 13, 21, 34, 55, 89, 144, 233, 377]


def memory(pages: int = 8) -> bytearray:
    return bytearray(random.Random(0).randbytes(pages * INFO.layout.full_block_bytes))


def chunk(tokens: list[int], start: int, count: int, sample: int, pages: list[int], choice: int = 0) -> Chunk:
    end = start + count
    return Chunk(
        seq=1,
        tokens=tokens[start:end],
        start=start,
        pages=pages,
        sample=sample,
        first_choice=choice,
        params=PARAMS,
        history=tokens[:end],
    )


@pytest.mark.parametrize("cut", [1, 3, 4, 7, 10])
def test_any_chunking_gives_the_oracles_answer(cut: int) -> None:
    runner = TripwireRunner(INFO, memoryview(memory()))
    pages = [6, 2, 5, 0]
    tokens = list(PROMPT)
    for start in range(0, len(PROMPT), cut):
        count = min(cut, len(PROMPT) - start)
        last = start + count == len(PROMPT)
        sampled = runner.run([chunk(tokens, start, count, int(last), pages)], OpenGate())
    while True:
        tokens += sampled[0].tokens
        if len(tokens) == len(PROMPT) + PARAMS.max_tokens:
            break
        sampled = runner.run([chunk(tokens, len(tokens) - 1, 1, 1, pages)], OpenGate())
    assert tripwire_answer(INFO, PROMPT, PARAMS) == [(tokens[len(PROMPT) :], "length")]


def test_choices_and_seeds_differ() -> None:
    answers = tripwire_answer(INFO, PROMPT, PARAMS, n=3)
    assert len({tuple(tokens) for tokens, _ in answers}) == 3
    other = SamplingParams(max_tokens=5, seed=10)
    assert tripwire_answer(INFO, PROMPT, other) != tripwire_answer(INFO, PROMPT, PARAMS)


def test_every_byte_of_the_prefix_matters() -> None:
    data = memory()
    runner = TripwireRunner(INFO, memoryview(data))
    pages = [6, 2, 5]
    right = runner.run([chunk(PROMPT, 0, 10, 1, pages)], OpenGate())[0].tokens
    layout = INFO.layout
    for page, tokens in ((6, 4), (2, 4), (5, 1)):
        for part in range(layout.layers * 2):
            at = page * layout.full_block_bytes + (part * 4 + tokens - 1) * 32
            data[at] ^= 1
            assert runner.run([chunk(PROMPT, 9, 1, 1, pages)], OpenGate())[0].tokens != right
            data[at] ^= 1
    assert runner.run([chunk(PROMPT, 9, 1, 1, pages)], OpenGate())[0].tokens == right


def test_copy_page_takes_exactly_the_first_tokens() -> None:
    data = memory()
    before = bytes(data)
    runner = TripwireRunner(INFO, memoryview(data))
    runner.copy_page(1, 3, 2)
    size = INFO.layout.full_block_bytes
    for part in range(INFO.layout.layers * 2):
        source, target = size + part * 128, 3 * size + part * 128
        assert data[target : target + 64] == before[source : source + 64]
        assert data[target + 64 : target + 128] == before[target + 64 : target + 128]


def test_history_is_required() -> None:
    runner = TripwireRunner(INFO, memoryview(memory()))
    with pytest.raises(InvalidInput, match="history of 3 tokens"):
        runner.run([Chunk(seq=1, tokens=[1, 2, 3], start=0, pages=[0])], OpenGate())


def test_the_paced_runner_takes_the_models_time_layer_by_layer() -> None:
    class Clock:
        def __init__(self) -> None:
            self.now = 100.0
            self.done: list[float] = []

        def read(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

        def wait(self, layer: int) -> None:
            self.now += 5.0 if layer == 1 else 0.0

        def layer_done(self, layer: int) -> None:
            self.done.append(round(self.now - 100.0, 6))

    clock = Clock()

    class Gate:
        wait = staticmethod(clock.wait)
        done = staticmethod(clock.layer_done)

    inner = TripwireRunner(INFO, memoryview(memory()))
    runner = PacedRunner(inner, Pace(base_s=1.0, token_s=0.2), clock=clock.read, sleep=clock.sleep)
    assert runner.needs_history
    runner.run([chunk(PROMPT, 0, 10, 1, [0, 1, 2])], Gate())
    # 1 s + 0.2 s × (10 + 45/3000) over three layers; layer 1 also waits 5 s for its load.
    assert clock.done == [1.001, 7.002, 8.003]
