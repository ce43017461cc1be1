"""Pulling blocks from peers, layer by layer, straight into arena slots."""

from __future__ import annotations

import msgspec

from anabranch.blocks.checksum import block_sum, layer_sum
from anabranch.core.errors import AnabranchError, Unavailable, WireError
from anabranch.core.faults import Faults
from anabranch.transfer.layouts import layout_digest
from anabranch.transfer.live.arena import Arena
from anabranch.transfer.live.pool import StreamPool
from anabranch.transfer.live.segments import SegmentTask
from anabranch.transfer.live.stream import Stream
from anabranch.transfer.live.tally import Tally
from anabranch.transfer.live.workers import Workers
from anabranch.transfer.messages import FetchEnd, FetchHeader, FetchReply, FetchRequest, LayerFrame

THREADS = 8


class PeerFetcher:
    """Runs fetches. Each ends its task exactly once: complete, short, or failed with a reason."""

    def __init__(self, arena: Arena, timeout_s: float, tally: Tally, faults: Faults) -> None:
        self._arena = arena
        self._digest = layout_digest(arena.layout)
        self._pool = StreamPool(timeout_s)
        self._tally = tally
        self._faults = faults
        self._workers = Workers("peer-fetch", THREADS)
        self._decoder: msgspec.msgpack.Decoder[FetchReply] = msgspec.msgpack.Decoder(FetchReply)

    def fetch(self, address: str, keys: list[bytes], tenant: bytes, deadline_s: float, task: SegmentTask) -> None:
        request = FetchRequest(keys=keys, tenant=tenant, layout=self._digest, deadline_s=deadline_s)
        self._workers.submit(lambda: self._run(address, request, task))

    def close(self) -> None:
        self._workers.close()
        self._pool.close()

    def _run(self, address: str, request: FetchRequest, task: SegmentTask) -> None:
        if not task.landing.open:
            return
        stream: Stream | None = None
        try:
            stream = self._pool.take(address)
            task.landing.wake_by(stream.shut)
            self._transfer(stream, request, task)
            task.landing.wake_by(lambda: None)
            self._pool.give(address, stream)
            task.end("")
        except (AnabranchError, OSError) as error:
            if stream is not None:
                stream.close()
            task.end(f"fetch from {address} failed: {error}")

    def _transfer(self, stream: Stream, request: FetchRequest, task: SegmentTask) -> None:
        if self._faults.at("peer.fetch.request"):
            raise Unavailable("injected")
        stream.send(request)
        header = stream.receive(self._decoder, request.deadline_s)
        if not isinstance(header, FetchHeader) or header.count > len(task.slots):
            raise WireError("the peer's answer to a fetch is not a header")
        slots = task.slots[: header.count]
        if not slots:
            raise Unavailable(header.reason or "the peer does not hold the blocks any more")
        sums: list[list[int]] = [[] for _ in slots]
        bad: set[int] = set()
        for layer in range(self._arena.layout.layers):
            self._layer(stream, layer, slots, sums, bad, task)
            if len(slots) == len(task.slots) and not bad:
                task.layers_ready(layer + 1)
        self._conclude(stream, sums, bad, task)
        if len(slots) < len(task.slots):
            self._tally.add("fetches_short")

    def _layer(
        self, stream: Stream, layer: int, slots: list[int], sums: list[list[int]], bad: set[int], task: SegmentTask
    ) -> None:
        frame = stream.receive(self._decoder)
        if not isinstance(frame, LayerFrame) or frame.layer != layer or len(frame.sums) != len(slots):
            raise WireError(f"expected layer {layer} of {len(slots)} blocks")
        views = [self._arena.layer(slot, layer) for slot in slots]
        stream.receive_views(views, task.landing)
        effect = self._faults.at("peer.fetch.payload")
        if effect == "flip":
            task.landing.copy(views[0][:1], memoryview(bytes([views[0][0] ^ 1])))
        elif effect:
            raise Unavailable("injected")
        self._tally.add("bytes_fetched", len(views) * len(views[0]))
        for i, view in enumerate(views):
            own = layer_sum(view)
            sums[i].append(own)
            if own != frame.sums[i]:
                bad.add(i)

    def _conclude(self, stream: Stream, sums: list[list[int]], bad: set[int], task: SegmentTask) -> None:
        end = stream.receive(self._decoder)
        if not isinstance(end, FetchEnd) or len(end.block_sums) != len(sums):
            raise WireError("the peer's fetch has no proper end")
        for i, layer_sums in enumerate(sums):
            whole = block_sum(layer_sums)
            if i in end.lost:
                continue
            if i in bad or (end.block_sums[i] and end.block_sums[i] != whole):
                task.corrupt.append(i)
            else:
                task.sums[i] = whole
