"""Slices of one transfer over all rails to a peer: the next to whoever has room, elsewhere again if a rail fails."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Sequence

import xxhash

from anabranch.core.errors import Unavailable, WireError
from anabranch.transfer.classes import TrafficClass
from anabranch.transfer.live.rails import Links, Rail, connect_rail
from anabranch.transfer.live.transports.memory import Held
from anabranch.transfer.live.transports.tcp_wire import (
    ANSWER,
    GREETING,
    MAGIC,
    READ,
    REQUEST,
    SLICE_BYTES,
    WRITE,
    receive_exactly,
    send_parts,
)
from anabranch.transfer.regions import Description
from anabranch.transfer.spread import RailQueue, Spread
from anabranch.transfer.transport import Move, Moved

ATTEMPTS = 3
"""Failures of each rail in a row after which the peer is given up, and arrivals of a damaged slice."""
ASK_AGAIN_S = 0.1
STUCK_S = 0.25
STUCK_TIMES = 10
"""A slice that takes so many times as long as expected, and STUCK_S at least, speaks against its rail."""
Piece = tuple[int, int, int]  # index of the move, start and end in it


class TcpPeer:
    """One peer: its rails, what is known of their speed, and connections that lie idle."""

    def __init__(self, description: Description, links: Links, traffic: TrafficClass, silence_s: float) -> None:
        self.regions = description.regions
        self.rails = links.rails(description.address).rails
        self.links, self.traffic, self.silence_s = links, traffic, silence_s
        self.changed = threading.Condition()
        self.spread = Spread({rail: rail.nic.bandwidth for rail in self.rails})
        self.busy = dict.fromkeys(self.rails, 0)
        self._greeting = GREETING.pack(MAGIC, description.detail, traffic)
        self._idle: dict[Rail, list[socket.socket]] = {rail: [] for rail in self.rails}

    def take(self, rail: Rail) -> socket.socket:
        """A connection for one lane of one transfer. Raises Unavailable, OSError."""
        while True:
            with self.changed:
                sock = self._idle[rail].pop() if self._idle[rail] else None
            if sock is None:
                break
            if not select.select([sock], [], [], 0)[0]:
                return sock
            sock.close()  # the peer has closed it: nothing comes unasked
        sock = connect_rail(
            rail, self.traffic, timeout_s=self.silence_s, silence_s=self.silence_s, marks=self.links.marks
        )
        sock.settimeout(self.silence_s)
        sock.sendall(self._greeting)
        return sock

    def reach(self) -> None:
        """Connect over any rail. Raises Unavailable."""
        reasons = []
        for rail in self.rails:
            try:
                self.give(rail, self.take(rail))
            except (Unavailable, OSError) as error:
                reasons.append(str(error))
            else:
                return
        raise Unavailable("; ".join(reasons))

    def give(self, rail: Rail, sock: socket.socket) -> None:
        with self.changed:
            self._idle[rail].append(sock)

    def close(self) -> None:
        with self.changed:
            idle = [sock for socks in self._idle.values() for sock in socks]
            self._idle = {rail: [] for rail in self.rails}
        for sock in idle:
            sock.close()


class _Lane:
    """A connection of one transfer."""

    def __init__(self, rail: Rail) -> None:
        self.rail = rail
        self.sock: socket.socket | None = None
        self.started = 0.0

    def interrupt(self) -> None:
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


class TcpTransfer:
    """See `transfer.transport.Transfer`. `verdicts`: what is known of each move already."""

    def __init__(
        self, peer: TcpPeer, op: int, moves: Sequence[Move], held: Held, verdicts: list[Moved | None], lanes: int
    ) -> None:
        self._peer, self._op, self._moves, self._held, self._verdicts = peer, op, moves, held, verdicts
        pieces = [
            ((index, start, min(start + SLICE_BYTES, move.size)), min(SLICE_BYTES, move.size - start))
            for index, move in enumerate(moves)
            if verdicts[index] is None
            for start in range(0, move.size, SLICE_BYTES)
        ]
        self._queue: RailQueue[Rail, Piece] = RailQueue(peer.spread, pieces)
        self._damages: dict[Piece, int] = {}
        self._failures = 0
        self._over = False
        self._active: dict[int, _Lane] = {}
        self._connecting: set[threading.Thread] = set()
        self._threads = [
            threading.Thread(target=self._run, args=(rail,), name=f"slices-{lane}", daemon=True)
            for lane, rail in enumerate([*peer.rails] * lanes)
            if lane < len(pieces)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float) -> list[Moved]:
        deadline = time.monotonic() + timeout_s
        with self._peer.changed:
            self._peer.changed.wait_for(lambda: self._over or self._queue.finished, max(0.0, timeout_s))
            late = not self._over and not self._queue.finished and time.monotonic() >= deadline
        self.stop()
        left = Moved.LATE if late else Moved.LOST
        unfinished = {index for index, _, _ in self._queue.unfinished()}
        return [
            verdict if verdict is not None else left if index in unfinished else Moved.OK
            for index, verdict in enumerate(self._verdicts)
        ]

    def stop(self) -> None:
        """No byte is written after this."""
        with self._peer.changed:
            self._over = True
            self._peer.changed.notify_all()
            for lane in self._active.values():
                lane.interrupt()
            # Who is connecting finds that it is over, and writes nothing.
            threads = [thread for thread in self._threads if thread not in self._connecting]
        for thread in threads:
            thread.join()
        self._held.release()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _run(self, rail: Rail) -> None:
        lane = _Lane(rail)
        while (piece := self._next(lane)) is not None:
            try:
                verdict = self._exchange(self._connected(lane), rail, piece)
            except (OSError, Unavailable, WireError):
                self._failed(lane, piece)
            else:
                self._done(lane, piece, verdict)
        if lane.sock is not None:
            self._peer.give(rail, lane.sock)

    def _next(self, lane: _Lane) -> Piece | None:
        peer = self._peer
        with peer.changed:
            while not self._over and not self._queue.finished:
                now = time.monotonic()
                piece = self._queue.next(lane.rail, now)
                if piece is not None:
                    peer.busy[lane.rail] += 1
                    lane.started = now
                    if lane.sock is None:
                        self._connecting.add(threading.current_thread())
                    else:
                        self._active[id(lane)] = lane
                    return piece
                peer.changed.wait(ASK_AGAIN_S)
        return None

    def _connected(self, lane: _Lane) -> socket.socket:
        if lane.sock is None:
            lane.sock = self._peer.take(lane.rail)
            with self._peer.changed:
                self._connecting.discard(threading.current_thread())
                if self._over:
                    raise Unavailable("the transfer is over")
                self._active[id(lane)] = lane
                lane.started = time.monotonic()
        return lane.sock

    def _failed(self, lane: _Lane, piece: Piece) -> None:
        peer = self._peer
        lane.drop()
        with peer.changed:
            self._leave(lane)
            now = time.monotonic()
            _, start, end = piece
            patience_s = max(STUCK_S, STUCK_TIMES * peer.spread.cost(lane.rail, lane.started) * (end - start))
            if self._over and now - lane.started < patience_s:
                self._queue.put_back(lane.rail, piece)  # interrupted by us
            else:
                self._failures += 1
                self._queue.failed(lane.rail, now)
                self._over = self._over or self._failures >= ATTEMPTS * len(peer.rails)
            peer.changed.notify_all()

    def _done(self, lane: _Lane, piece: Piece, verdict: Moved) -> None:
        peer = self._peer
        with peer.changed:
            lanes = peer.busy[lane.rail]
            self._leave(lane)
            self._failures = 0
            damages = self._damages[piece] = self._damages.get(piece, 0) + (verdict is Moved.DAMAGED)
            if verdict is Moved.DAMAGED and damages < ATTEMPTS:
                self._queue.put_back(lane.rail, piece)
            else:
                if verdict is not Moved.OK:
                    self._verdicts[piece[0]] = verdict
                now = time.monotonic()
                self._queue.done(lane.rail, piece, (now - lane.started) / lanes, now)
            peer.changed.notify_all()

    def _leave(self, lane: _Lane) -> None:
        self._peer.busy[lane.rail] -= 1
        self._active.pop(id(lane), None)
        self._connecting.discard(threading.current_thread())

    def _exchange(self, sock: socket.socket, rail: Rail, piece: Piece) -> Moved:
        index, start, end = piece
        move = self._moves[index]
        name = move.region.encode()
        with self._held.cut(move) as whole, whole[start:end] as data:
            writing = self._op == WRITE
            if writing:
                self._peer.links.shaper(rail.nic).send(self._peer.traffic, data.nbytes, self._peer.silence_s)
            total = xxhash.xxh3_64_intdigest(data) if writing else 0
            head = REQUEST.pack(self._op, len(name), move.offset + start, end - start, total) + name
            send_parts(sock, head, data if writing else None)
            answer = memoryview(bytearray(ANSWER.size))
            receive_exactly(sock, answer)
            verdict, expected = ANSWER.unpack(answer)
            if verdict not in set(Moved):
                raise WireError(f"answer {verdict}")
            if self._op == READ and verdict == Moved.OK:
                receive_exactly(sock, data)
                if xxhash.xxh3_64_intdigest(data) != expected:
                    return Moved.DAMAGED
            return Moved(verdict)
