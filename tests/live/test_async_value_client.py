"""The asyncio client: the same answers, an event loop that is never held up, and calls that can be cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from value_rig import Rig, noise, rig, until

import anabranch
from anabranch.core.errors import InvalidInput, Unavailable
from anabranch.store.values.messages import Abandon, Slice
from anabranch.store.values.outcome import Outcome

OK, MISSING = Outcome.OK, Outcome.MISSING


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as one:
        yield one


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def test_all_calls_answer_as_the_client_does(here: Rig) -> None:
    node = here.node(unix=True)

    async def main() -> None:
        async with anabranch.AsyncClient(node.address, timeout_s=20) as client:
            values = [noise(3 << 20), b"b", b""]
            assert await client.put_many(["a", "b", "c"], values) == [OK] * 3
            assert await client.put("d", b"d", parent="c") is OK
            assert await asyncio.gather(*[client.get(key) for key in "abcx"]) == [*values, None]
            buffer = bytearray(3 << 20)
            assert (await client.get_into("a", buffer)).outcome is OK
            assert buffer == values[0]
            assert [got.outcome for got in await client.get_many_into(["b", "x"], [bytearray(1)] * 2)] == [OK, MISSING]
            with await client.acquire(["a", "x"]) as views:
                assert views[0] == values[0]
                assert views[1] is None
            assert await client.exists_many(["a", "x"]) == [True, False]
            assert await client.longest_prefix(["a", "b", "x"]) == 2
            assert await client.pin(["a"], 5) == [OK]
            assert await client.unpin(["a"]) == [OK]
            assert await client.prefetch(["a"]) == [OK]
            assert (await client.stat()).home == node.address
            assert await client.remove(["a", "x"]) == [OK, MISSING]
            assert sum((await client.invalidate()).values()) == 3
            with pytest.raises(InvalidInput):
                await client.put("", b"")
        with pytest.raises(Unavailable, match="closed"):
            await client.get("a")

    run(main())


def test_the_loop_runs_while_bytes_move(here: Rig) -> None:
    node = here.fake()

    async def main() -> None:
        async with anabranch.AsyncClient(node.address, timeout_s=20) as client:
            await client.put("a", b"v")
            node.faults.append("silent")
            call = asyncio.create_task(client.get("a"))
            turns = 0
            while turns < 100 or node.faults:
                await asyncio.sleep(0)
                turns += 1
            assert not call.done()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await client.get("a") == b"v"

    run(main())


def test_a_cancelled_put_is_abandoned_and_touches_nothing_any_more(here: Rig) -> None:
    node = here.fake()

    async def main() -> None:
        async with anabranch.AsyncClient(node.address, timeout_s=60, lanes=2) as client:
            await client.put("warm", b"")
            node.faults += ["silent"] * 2
            node.silent_on = Slice
            call = asyncio.create_task(client.put("a", noise(24 << 20)))
            end = time.monotonic() + 20
            while not any(isinstance(message, Slice) for message in node.received):
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            call.cancel()
            started = time.monotonic()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert time.monotonic() - started < 20
            node.faults.clear()
            until(lambda: any(isinstance(message, Abandon) for message in node.received), "the end of the put")
            assert await client.get("a") is None
            assert await client.put("a", b"other") is OK

    run(main())


def test_a_call_cancelled_before_it_began_does_nothing(here: Rig) -> None:
    node = here.fake()

    async def main() -> None:
        async with anabranch.AsyncClient(node.address, timeout_s=20, calls=1) as client:
            await client.put("a", b"v")
            node.faults.append("silent")
            first = asyncio.create_task(client.get("a"))
            second = asyncio.create_task(client.put("b", b"w"))
            while node.faults:
                await asyncio.sleep(0.01)
            for call in (second, first):
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            assert len(node.values) == 1

    run(main())


def test_closing_ends_calls_that_wait(here: Rig) -> None:
    node = here.fake()

    async def main() -> None:
        client = anabranch.AsyncClient(node.address, timeout_s=60)
        await client.put("a", b"v")
        node.faults.append("silent")
        call = asyncio.create_task(client.get_into("a", bytearray(1)))
        while node.faults:
            await asyncio.sleep(0.01)
        await client.close()
        assert (await call).outcome is Outcome.UNREACHABLE

    run(main())
