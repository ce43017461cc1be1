"""A node that was away learns what the others were told meanwhile to drop, before it serves what it had.

Every node logs the invalidations and removals that it was asked for or told of. One that starts, or joins its directory
again, asks all others for what came since it was last known to be joined, by wall clocks that differ by less than
MARGIN_S, and drops that of its DRAM and SSD. If a log does not reach back so far, it drops everything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from anabranch.core.errors import AccessDenied, AnabranchError, WireError
from anabranch.store.messages import NodeRow
from anabranch.store.values.live.node_custody import Custody, NodeSession, split_names
from anabranch.store.values.live.node_lane import NodeLane
from anabranch.store.values.live.node_lanes import NodeLanes
from anabranch.store.values.live.node_tiers import NodeTiers
from anabranch.store.values.messages import Done, Missed, MissedReply
from anabranch.store.values.missed import Event, MissedLog
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import Scope

if TYPE_CHECKING:
    from anabranch.store.values.live.node_directory import NodeDirectory

MARGIN_S = 60.0
WAIT_S = 2.0
"""How long a node that starts waits for others that do not answer."""
BEAT_S = 1.0
SILENT_S = 3.0
"""Longer without a beat: the node stood still, and perhaps nobody counted on it."""
NEWCOMERS_S = 10.0
"""How often to look whether somebody else has come back, and ask it too."""
ASK_S = 2.0
_LENGTH = struct.Struct("<I")
_TIME = struct.Struct("<d")
log = logging.getLogger(__name__)


class EventFile:
    """The log, on disk: it survives a kill."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.log = MissedLog()
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            self._read(file.read())
        self._fd = -1
        self._written = 0
        self._rewrite()

    def add(self, event: Event) -> None:
        if self.log.add(event):
            os.write(self._fd, _packed(event))
            self._written += 1
            if self._written > 2 * len(self.log) + 1000:
                self._rewrite()

    def close(self) -> None:
        os.close(self._fd)

    def _read(self, data: bytes) -> None:
        decoder, at = msgspec.msgpack.Decoder(Event), 0
        while at + _LENGTH.size <= len(data):
            (length,) = _LENGTH.unpack_from(data, at)
            try:
                event = decoder.decode(data[at + _LENGTH.size : at + _LENGTH.size + length])
            except msgspec.MsgspecError:
                return  # a torn last one is what was not answered
            if event.ident:
                self.log.add(event)
            else:
                self.log.dropped = event.time
            at += _LENGTH.size + length

    def _rewrite(self) -> None:
        head = [Event(self.log.dropped, b"")] if self.log.dropped else []
        fd = os.open(self._path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(fd, b"".join(map(_packed, [*head, *self.log.events])))
        os.rename(self._path + ".tmp", self._path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._written = fd, len(self.log)


class NodeMissed:
    def __init__(
        self,
        node_id: str,
        data_dir: str,
        custody: Custody,
        tiers: NodeTiers,
        directory: NodeDirectory,
        lanes: NodeLanes,
    ) -> None:
        self._node_id = node_id
        self._custody = custody
        self._tiers = tiers
        self._directory = directory
        self._lanes = lanes
        self._lock = threading.Lock()
        self._file = EventFile(str(Path(data_dir) / "missed"))
        self._stamp = os.open(str(Path(data_dir) / "joined"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        stamp = os.pread(self._stamp, _TIME.size, 0)
        self._since = _TIME.unpack(stamp)[0] - MARGIN_S if len(stamp) == _TIME.size else 0.0
        """Everything before it was heard of."""
        self._stamped = 0.0
        self._asked: set[str] = set()
        self._caught_up = False
        self._looked = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # --- what others will ask for ---------------------------------------------------------------------------------

    def heard(self, ident: bytes, *, names: bytes = b"", tenant: str = "", epoch: str | None = None) -> bytes:
        """Before it takes effect. `ident`: as another node calls it, or empty. Returns how to call it."""
        ident = ident or secrets.token_bytes(8)
        if self._directory.configured:
            with self._lock:
                self._file.add(Event(time.time(), ident, names, tenant, epoch))
        return ident

    def answer(self, lane: NodeLane, session: NodeSession, message: Missed) -> None:
        if not session.caller.trusted:
            lane.send(Done(op=message.op, outcomes=bytes([Outcome.DENIED])))
            return
        with self._lock:
            events, complete = self._file.log.since(message.since)
        rows = [(event.time, event.ident, event.names, event.tenant, event.epoch) for event in events]
        lane.send(MissedReply(op=message.op, events=rows, complete=complete))

    # --- what this node missed ------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Before the node serves what a former process left. Returns after WAIT_S at the latest, if others do not
        answer; they are asked again later."""
        if not self._directory.configured or not (len(self._custody.shelf) or self._tiers.holds):
            return
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            try:
                if self._ask(self._directory.peek(WAIT_S / 2), end):
                    return
            except AnabranchError as error:
                log.info("node %s: %s", self._node_id, error)
            self._stopping.wait(0.1)
        log.warning("node %s: not all other nodes say what was invalidated meanwhile; it serves", self._node_id)

    def start(self) -> None:
        if self._directory.configured:
            self._thread = threading.Thread(target=self._run, name=f"{self._node_id}-missed", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(5.0)
        os.close(self._stamp)
        self._file.close()

    def _run(self) -> None:
        """Ask after each join, and whoever comes back later; note when the node was last joined."""
        joined, beat = False, time.monotonic()
        while not self._stopping.wait(BEAT_S if joined else BEAT_S / 10):
            was, joined = joined and time.monotonic() - beat < SILENT_S, self._directory.joined
            if joined:
                self._catch_up_again(joins=not was)
            beat = time.monotonic()

    def _catch_up_again(self, *, joins: bool) -> None:
        if joins:
            self._asked.clear()
            self._caught_up = False
            self._since = max(self._since, self._stamped - MARGIN_S)
        now = time.monotonic()
        if not self._caught_up or now - self._looked >= NEWCOMERS_S:
            self._looked = now
            try:
                rows = self._directory.peek(ASK_S)
                self._asked &= {row.node_id for row in rows}
                self._caught_up = self._ask(rows, now + ASK_S) or self._caught_up
            except AnabranchError as error:
                log.info("node %s: %s", self._node_id, error)
        # Not at once: a directory may yet say that another node has this name.
        if self._caught_up and self._directory.joined and not joins:
            self._stamped = time.time()
            os.pwrite(self._stamp, _TIME.pack(self._stamped), 0)

    def _ask(self, rows: Sequence[NodeRow], end: float) -> bool:
        """Whether all of them have answered by now."""
        for row in rows:
            if row.node_id in self._asked:
                continue
            left = end - time.monotonic()
            try:
                if left <= 0:
                    return False
                reply = self._lanes.ask(
                    row.address, Scope("default"), Missed(op=0, since=self._since), MissedReply, left
                )
                self._apply(reply, row.node_id)
            except (WireError, AccessDenied) as error:
                log.warning("node %s: %s does not say what was invalidated: %s", self._node_id, row.node_id, error)
            except AnabranchError as error:
                log.info("node %s: %s", self._node_id, error)
                continue
            self._asked.add(row.node_id)
        return all(row.node_id in self._asked for row in rows)

    def _apply(self, reply: MissedReply, who: str) -> None:
        with self._lock:
            events = self._file.log.unknown([Event(*row) for row in reply.events])
        dropped = 0
        if not reply.complete:
            log.warning(
                "node %s was away for longer than %s remembers what was invalidated: it drops all that it had",
                self._node_id,
                who,
            )
            dropped += self._tiers.forget_scopes(lambda scope: True)
        names = [name for event in events for name in split_names(event.names)]
        if names:
            dropped += self._tiers.forget(names)
        over = [event for event in events if not event.names]
        if over:
            tenants = {(event.tenant, event.epoch) for event in over}
            dropped += self._tiers.forget_scopes(
                lambda scope: (
                    scope is None or not tenants.isdisjoint({(scope.tenant, None), (scope.tenant, scope.epoch)})
                )
            )
        with self._lock:
            for event in events:
                self._file.add(event)
        if dropped:
            with self._custody.lock:
                self._custody.shelf.counters["missed_dropped"] += dropped
            self._directory.changed()
            log.info("node %s: %d values were invalidated or removed while it was away", self._node_id, dropped)


def _packed(event: Event) -> bytes:
    data = msgspec.msgpack.encode(event)
    return _LENGTH.pack(len(data)) + data
