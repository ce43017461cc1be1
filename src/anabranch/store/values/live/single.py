"""One small value, put or got: one request, one answer, and as little else as can be.

None as a result: it did not go the short way, and the whole machinery (`fetch`, `deposit`) should try.
"""

from __future__ import annotations

from anabranch.core.errors import Retryable, WireError
from anabranch.store.values.got import Got
from anabranch.store.values.live.attempts import Ended
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.fetch import Fetch
from anabranch.store.values.live.lane import Lane
from anabranch.store.values.live.lanes import LanePool
from anabranch.store.values.live.sinks import Sink
from anabranch.store.values.messages import INLINE_BYTES, TIERS, Found, Get, Offer, Put, Stored
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.parts import Parts, sum_of
from anabranch.transfer.live.workers import Workers

STREAMED_BYTES = 128 << 10
"""From here on a sum before the bytes would cost more than one more call of the kernel."""
_UNREACHABLE = Got(Outcome.UNREACHABLE)


def get_one(pool: LanePool, workers: Workers, name: bytes, sink: Sink, call: Call, *, lanes: int) -> Got | None:
    """For a sink of at most INLINE_BYTES or of unknown size."""
    try:
        lane = pool.take(call)
    except (Retryable, WireError):
        return _UNREACHABLE
    try:
        lane.send(Get(op=0, names=name, limit=INLINE_BYTES))
        found = lane.answer(Found, 0)
        if found.outcomes != b"\0":
            got: Got | None = Got(Outcome(found.outcomes[0]))
        elif found.inline:
            got = _receive(lane, found, sink)
        else:
            fetch = Fetch(pool, workers, name, [sink], call, lanes=lanes)
            fetch.adopt(lane, found)
            pool.give(lane, call)
            return fetch.run()[0]
    except (Retryable, WireError) as error:
        return _UNREACHABLE if pool.broken(lane, error, call) is Ended.FOR_GOOD else None
    except (ValueError, IndexError):
        _failed(pool, lane, call)
        return None
    except BaseException:
        pool.drop(lane, call)
        raise
    pool.give(lane, call)
    return got


def put_one(pool: LanePool, offer: Offer, value: Parts, call: Call) -> Outcome | None:
    """For a value of at most STREAM_BYTES."""
    try:
        lane = pool.take(call)
    except (Retryable, WireError):
        return Outcome.UNREACHABLE
    try:
        if value.size < STREAMED_BYTES:
            lane.send(Put(offer=offer, sums=value.sums()), payload=value.views)
        else:
            lane.send_stream(Put(offer=offer), [value])
        outcome = Outcome(lane.answer(Stored, offer.op).outcomes[0])
    except (Retryable, WireError) as error:
        return Outcome.UNREACHABLE if pool.broken(lane, error, call) is Ended.FOR_GOOD else None
    except (ValueError, IndexError):
        _failed(pool, lane, call)
        return None
    except BaseException:
        pool.drop(lane, call)
        raise
    pool.give(lane, call)
    return None if outcome is Outcome.DAMAGED else outcome


def _receive(lane: Lane, found: Found, sink: Sink) -> Got | None:
    size, room = found.sizes[0], sink.room
    fits = room is None or size <= room
    parts = sink.open(size) if fits else Parts([memoryview(bytearray(size))])
    good = True
    for index, expected in enumerate(found.sums):
        views = parts.slice(index, size)
        lane.receive_into(views)
        good = good and sum_of(views) == expected
    if not good:
        return None
    return Got(Outcome.OK, size, TIERS[found.tiers[0]]) if fits else Got(Outcome.TOO_BIG, size)


def _failed(pool: LanePool, lane: Lane, call: Call) -> None:
    pool.drop(lane, call)
    if not call.cancelled:
        pool.failed(lane)
