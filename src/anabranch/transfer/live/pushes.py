"""Pushing Layer Blocks to another node while they are being computed: one thread per hand-off under way."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

import msgspec

from anabranch.blocks.checksum import layer_sum
from anabranch.core.errors import AnabranchError, DeadlineExceeded, StaleLease, Unavailable, WireError
from anabranch.core.faults import Faults
from anabranch.core.live.link import connect
from anabranch.transfer.api import Ticket
from anabranch.transfer.layouts import layout_digest
from anabranch.transfer.live.arena import Arena
from anabranch.transfer.live.pool import StreamPool
from anabranch.transfer.live.stream import Stream
from anabranch.transfer.live.tally import Tally
from anabranch.transfer.messages import (
    PushAborted,
    PushAccepted,
    PushFinish,
    PushFrame,
    PushOpen,
    PushRefused,
    PushReply,
    PushResult,
)

Blocks = list[tuple[int, int]]


class Outgoing:
    """One hand-off. `queue` items: (layer, blocks), or a reason to end ("" = all is pushed). `met`: the receiver has
    answered, so that it notices by itself when the connection goes."""

    def __init__(self, handoff: str, ticket: Ticket) -> None:
        self.handoff = handoff
        self.ticket = ticket
        self.queue: queue.SimpleQueue[tuple[int, Blocks] | str] = queue.SimpleQueue()
        self.until = time.monotonic() + ticket.deadline_s
        self.stream: Stream | None = None
        self.given_up = ""
        self.met = False
        self.thread: threading.Thread | None = None

    def give_up(self, reason: str) -> None:
        self.given_up = reason
        self.queue.put(reason)
        if self.stream is not None:
            self.stream.shut()


class Pusher:
    """`ended(handoff, reason)` runs once per hand-off, when its slots are not read any more."""

    def __init__(
        self, arena: Arena, timeout_s: float, tally: Tally, faults: Faults, ended: Callable[[str, str], None]
    ) -> None:
        self._arena = arena
        self._digest = layout_digest(arena.layout)
        self._timeout_s = timeout_s
        self._pool = StreamPool(timeout_s)
        self._tally = tally
        self._faults = faults
        self._ended = ended
        self._lock = threading.Lock()
        self._open: dict[str, Outgoing] = {}
        self._replies: msgspec.msgpack.Decoder[PushReply] = msgspec.msgpack.Decoder(PushReply)

    def census(self) -> dict[str, int]:
        with self._lock:
            return {"pushes": len(self._open)}

    def start(self, handoff: str, ticket: Ticket) -> None:
        outgoing = Outgoing(handoff, ticket)
        thread = threading.Thread(target=self._run, args=(outgoing,), name="push", daemon=True)
        outgoing.thread = thread
        with self._lock:
            self._open[handoff] = outgoing
        thread.start()

    def push(self, handoff: str, layer: int, blocks: Blocks) -> None:
        with self._lock:
            outgoing = self._open.get(handoff)
        if outgoing is not None:
            outgoing.queue.put((layer, blocks))

    def end(self, handoff: str, reason: str) -> None:
        with self._lock:
            outgoing = self._open.get(handoff)
        if outgoing is None:
            return
        if reason:
            outgoing.give_up(reason)
        else:
            outgoing.queue.put("")

    def close(self) -> None:
        with self._lock:
            open_now = list(self._open.values())
        for outgoing in open_now:
            outgoing.give_up("node stops")
        for outgoing in open_now:
            if outgoing.thread is not None:
                outgoing.thread.join(5.0)
        self._pool.close()

    def _run(self, outgoing: Outgoing) -> None:
        address, reason = str(outgoing.ticket.address), ""
        stream: Stream | None = None
        try:
            stream = outgoing.stream = self._pool.take(address)
            self._transfer(stream, outgoing)
            outgoing.stream = None
            self._pool.give(address, stream)
        except (AnabranchError, OSError) as error:
            reason = outgoing.given_up or f"push to {address} failed: {error}"
            outgoing.stream = None
            if stream is not None:
                stream.close()
            if not outgoing.met:
                self._excuse(outgoing.ticket, reason)
        with self._lock:
            del self._open[outgoing.handoff]
        self._ended(outgoing.handoff, reason)

    def _transfer(self, stream: Stream, outgoing: Outgoing) -> None:
        self._fault("push.open")
        ticket = outgoing.ticket
        stream.send(PushOpen(handoff=ticket.handoff, secret=ticket.secret, layout=self._digest))
        reply = stream.receive(self._replies)
        outgoing.met = True
        if isinstance(reply, PushRefused):
            raise StaleLease(reply.reason)
        if not isinstance(reply, PushAccepted):
            raise WireError("expected PushAccepted")
        while not isinstance(item := self._next(outgoing), str):
            self._send(stream, *item)
        if item:
            stream.send(PushAborted(reason=item))
            raise StaleLease(item)
        self._fault("push.finish")
        stream.send(PushFinish())
        result = stream.receive(self._replies)
        if not isinstance(result, PushResult):
            raise WireError("expected PushResult")
        if result.reason:
            raise StaleLease(result.reason)

    def _excuse(self, ticket: Ticket, reason: str) -> None:
        """The receiver never heard of this push: tell it that nothing will come, so that it need not wait for the
        deadline. Best effort, that deadline being there."""
        with contextlib.suppress(AnabranchError, OSError):
            stream = Stream(connect(str(ticket.address), timeout_s=self._timeout_s), self._timeout_s)
            try:
                stream.send(PushOpen(handoff=ticket.handoff, secret=ticket.secret, layout=self._digest))
                if isinstance(stream.receive(self._replies), PushAccepted):
                    stream.send(PushAborted(reason=reason))
            finally:
                stream.close()

    def _next(self, outgoing: Outgoing) -> tuple[int, Blocks] | str:
        try:
            return outgoing.queue.get(timeout=max(outgoing.until - time.monotonic(), 0.0))
        except queue.Empty:
            raise DeadlineExceeded("the hand-off's deadline passed") from None

    def _send(self, stream: Stream, layer: int, blocks: Blocks) -> None:
        views = [self._arena.layer(slot, layer) for slot, _ in blocks]
        sums = [layer_sum(view) for view in views]
        self._fault("push.header")
        stream.send(PushFrame(layer=layer, blocks=[index for _, index in blocks], sums=sums))
        effect = self._faults.at("push.payload")
        if effect == "flip":
            damaged = bytearray(views[0])
            damaged[0] ^= 1
            views = [memoryview(damaged), *views[1:]]
        elif effect == "short":
            stream.send_views(views[:-1])
            raise Unavailable("injected")
        elif effect:
            raise Unavailable("injected")
        stream.send_views(views)
        self._tally.add("bytes_pushed", len(views) * self._arena.layout.layer_block_bytes)

    def _fault(self, step: str) -> None:
        if self._faults.at(step):
            raise Unavailable("injected")
