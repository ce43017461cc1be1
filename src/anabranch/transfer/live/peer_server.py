"""What peers ask of this node, one thread per connection: serving fetches and receiving pushes."""

from __future__ import annotations

import queue
import socket
import threading
from typing import Protocol

import msgspec

from anabranch.blocks.checksum import block_sum, layer_sum
from anabranch.core.errors import AnabranchError, IntegrityError, Unavailable, WireError
from anabranch.core.faults import Faults
from anabranch.core.live.link import Listener
from anabranch.transfer.api import Address
from anabranch.transfer.layouts import layout_digest
from anabranch.transfer.live.arena import Arena
from anabranch.transfer.live.sink import Sink
from anabranch.transfer.live.stream import Stream
from anabranch.transfer.live.tally import Tally
from anabranch.transfer.messages import (
    FetchEnd,
    FetchHeader,
    FetchRequest,
    LayerFrame,
    PeerRequest,
    PushAborted,
    PushAccepted,
    PushData,
    PushFinish,
    PushFrame,
    PushOpen,
    PushRefused,
    PushResult,
)

IDLE_S = 3600.0  # a peer's pooled connection may stay silent this long
MAX_WAIT_S = 120.0
STALE = "stale ticket: the hand-off is unknown, complete, abandoned or out of time"


class Owner(Protocol):
    """Who decides about slots: `store`'s brain, reached through events."""

    def fetch_asked(self, fetch: int, request: FetchRequest, wait_s: float) -> None: ...

    def fetch_served(self, fetch: int, lost: int, damaged: list[int]) -> None: ...

    def inbound_done(self, handoff: str, reason: str) -> None: ...


class Served(msgspec.Struct, frozen=True):
    slots: list[int]
    generations: list[int]
    block_sums: list[int]
    reason: str


class PeerServer:
    """Listens on `address` (host:port, port 0 = any)."""

    def __init__(
        self, address: str, arena: Arena, timeout_s: float, tally: Tally, faults: Faults, owner: Owner
    ) -> None:
        self._arena = arena
        self._digest = layout_digest(arena.layout)
        self._timeout_s = timeout_s
        self._tally = tally
        self._faults = faults
        self._owner = owner
        self._lock = threading.Lock()
        self._fetches = 0
        self._answers: dict[int, queue.SimpleQueue[Served]] = {}
        self._sinks: dict[str, Sink] = {}
        self._streams: dict[threading.Thread, Stream] = {}
        self._closing = False
        self._requests: msgspec.msgpack.Decoder[PeerRequest] = msgspec.msgpack.Decoder(PeerRequest)
        self._pushes: msgspec.msgpack.Decoder[PushData] = msgspec.msgpack.Decoder(PushData)
        self._listener = Listener(address, self._on_socket, name="peers")
        host, _, port = self._listener.address.rpartition(":")
        self.address = Address(host, int(port))

    def census(self) -> dict[str, int]:
        with self._lock:
            return {"peer_fetches": len(self._answers), "sinks": len(self._sinks)}

    def close(self) -> None:
        self._closing = True
        self._listener.close()
        with self._lock:
            streams = dict(self._streams)
        self.close_sinks("node stops")
        for stream in streams.values():
            stream.shut()
        for thread in streams:
            thread.join(5.0)

    # --- called by the brain's thread ---------------------------------------------------------------------------

    def serve(self, fetch: int, slots: list[int], generations: list[int], block_sums: list[int], reason: str) -> None:
        with self._lock:
            answer = self._answers.get(fetch)
        if answer is not None:
            answer.put(Served(slots, generations, block_sums, reason))

    def open_sink(self, handoff: str, secret: bytes, slots: list[int], first: int) -> None:
        def ended(reason: str) -> None:
            with self._lock:
                self._sinks.pop(handoff, None)
            self._owner.inbound_done(handoff, reason)

        with self._lock:
            sink = Sink(self._arena, secret, slots, first, self._faults, ended)
            self._sinks[handoff] = sink
        sink.begin()

    def close_sink(self, handoff: str, reason: str) -> None:
        with self._lock:
            sink = self._sinks.get(handoff)
        if sink is not None:
            sink.landing.close(reason)

    def close_sinks(self, reason: str) -> None:
        """No pushed byte is written after this returns."""
        with self._lock:
            sinks = list(self._sinks.values())
        for sink in sinks:
            sink.landing.close(reason)

    # --- connections --------------------------------------------------------------------------------------------

    def _on_socket(self, sock: socket.socket) -> None:
        stream = Stream(sock, self._timeout_s)
        thread = threading.Thread(target=self._serve, args=(stream,), name="peer", daemon=True)
        with self._lock:
            self._streams[thread] = stream
        thread.start()

    def _serve(self, stream: Stream) -> None:
        try:
            while not self._closing:
                request = stream.receive(self._requests, IDLE_S)
                if isinstance(request, FetchRequest):
                    self._fetch(stream, request)
                else:
                    self._push(stream, request)
        except WireError:
            self._tally.add("malformed_peer_frames")
        except (AnabranchError, OSError):
            self._tally.add("peer_disconnects")
        finally:
            stream.close()
            with self._lock:
                self._streams.pop(threading.current_thread(), None)

    # --- fetch --------------------------------------------------------------------------------------------------

    def _fetch(self, stream: Stream, request: FetchRequest) -> None:
        if request.layout != self._digest:
            stream.send(FetchHeader(count=0, reason="this node holds blocks of another layout"))
            return
        answer: queue.SimpleQueue[Served] = queue.SimpleQueue()
        with self._lock:
            self._fetches += 1
            fetch = self._fetches
            self._answers[fetch] = answer
        lost: list[int] = []
        damaged: list[int] = []
        wait = request.deadline_s if 0.0 <= request.deadline_s <= MAX_WAIT_S else MAX_WAIT_S
        self._owner.fetch_asked(fetch, request, wait)
        served = Served([], [], [], "")
        try:
            try:
                served = answer.get(timeout=wait)
            except queue.Empty:
                served = Served([], [], [], "the blocks could not be loaded in time")
            if self._faults.at("peer.serve.header"):
                raise Unavailable("injected")
            stream.send(FetchHeader(count=len(served.slots), reason=served.reason))
            if served.slots:
                self._send_layers(stream, served, lost, damaged)
        finally:
            with self._lock:
                del self._answers[fetch]
            self._owner.fetch_served(fetch, len(lost), [served.slots[i] for i in damaged])

    def _send_layers(self, stream: Stream, served: Served, lost: list[int], damaged: list[int]) -> None:
        """Send, then say which blocks (indices) must not be used: `lost` their lease, or found `damaged` here."""
        sums: list[list[int]] = [[] for _ in served.slots]
        for layer in range(self._arena.layout.layers):
            views = [self._arena.layer(slot, layer) for slot in served.slots]
            frame = LayerFrame(layer=layer, sums=[layer_sum(view) for view in views])
            for known, value in zip(sums, frame.sums, strict=True):
                known.append(value)
            stream.send(frame)
            effect = self._faults.at("peer.serve.payload")
            if effect == "fail":
                raise Unavailable("injected")
            if effect == "short":
                stream.send_views(views[:-1])
                raise Unavailable("injected")
            if effect == "flip":
                views = [_flipped(views[0]), *views[1:]]
            stream.send_views(views)
            self._tally.add("bytes_served", len(views) * len(views[0]))
        # The slots were leased; whoever took one away meanwhile has bumped its generation.
        for i, (slot, generation) in enumerate(zip(served.slots, served.generations, strict=True)):
            if self._arena.generation(slot) != generation:
                lost.append(i)
            elif served.block_sums[i] and served.block_sums[i] != block_sum(sums[i]):
                damaged.append(i)
        if self._faults.at("peer.serve.end"):
            raise Unavailable("injected")
        stream.send(FetchEnd(block_sums=served.block_sums, lost=[*lost, *damaged]))

    # --- push ---------------------------------------------------------------------------------------------------

    def _push(self, stream: Stream, request: PushOpen) -> None:
        with self._lock:
            sink = self._sinks.get(request.handoff)
        refused = self._faults.at("push.accept")
        if sink is None or not sink.admits(request.secret) or request.layout != self._digest or refused:
            self._tally.add("stale_tickets")
            stream.send(PushRefused(reason=STALE))
            return
        stream.send(PushAccepted())
        sink.landing.wake_by(stream.shut)
        try:
            self._receive(stream, sink)
        except IntegrityError as error:
            self._tally.add("integrity_errors")
            self._fail(stream, sink, str(error))
        except AnabranchError as error:
            self._fail(stream, sink, str(error))

    def _receive(self, stream: Stream, sink: Sink) -> None:
        while True:
            message = stream.receive(self._pushes, MAX_WAIT_S)
            if isinstance(message, PushFrame):
                sink.receive(stream, message)
                self._tally.add("bytes_received", len(message.blocks) * self._arena.layout.layer_block_bytes)
            elif isinstance(message, PushAborted):
                sink.landing.wake_by(lambda: None)
                sink.landing.close(message.reason)
                return
            elif isinstance(message, PushFinish):
                break
        sink.landing.wake_by(lambda: None)
        reason = "" if sink.complete else "the sender finished before everything was sent"
        if not sink.landing.close(reason):
            reason = STALE
        stream.send(PushResult(reason=reason))

    def _fail(self, stream: Stream, sink: Sink, reason: str) -> None:
        """The stream is out of step: say why if the peer still listens, and give it up."""
        sink.landing.wake_by(lambda: None)
        sink.landing.close(reason)
        stream.send(PushResult(reason=reason))
        raise Unavailable(reason)


def _flipped(view: memoryview) -> memoryview:
    copy = bytearray(view)
    copy[0] ^= 1
    return memoryview(copy)
