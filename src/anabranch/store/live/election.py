"""One leader for each directory shard, through etcd; and who leads, for everybody else.

    <prefix>directory/<shard>   LeaderNote of whoever leads, on its lease
    <prefix>nodes/<node_id>     address of a node, on its lease: whom a new leader waits for

A directory is soft state: two leaders for a moment cost a "not found", never wrong bytes. So a follower that sees the
leader's process gone (connection refused), or gets no answer, need not wait for its lease: it deletes the leader's key,
if it is still that one, and stands for election.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from anabranch.core.errors import ConfigError, Unavailable
from anabranch.core.live.handshake import OPEN_DIALER, Dialer
from anabranch.core.live.seldom import Seldom
from anabranch.store.config import DirectoryConfig
from anabranch.store.live.directory_lanes import Lane
from anabranch.store.live.etcd import LOG_EVERY_S, Etcd, EtcdAddress, KeyValue, PrefixView, parse_etcd
from anabranch.store.messages import Join, StatRequest

PROBE_S = 0.2
PATIENCE_S = 1.0
"""A leader that gives no answer for this long has lost."""
NODE_TTL_S = 5
FIRST_S = 2.0
log = logging.getLogger(__name__)


class LeaderNote(msgspec.Struct, frozen=True):
    address: str
    shards: int


class Leading(Protocol):
    """What is elected (`directory_server.DirectoryServer`)."""

    address: str

    @property
    def leading(self) -> bool: ...
    def lead(self) -> None: ...
    def resign(self) -> None: ...
    def expect(self, node_ids: set[str]) -> None: ...


def check_candidacy(config: DirectoryConfig) -> EtcdAddress:
    """Raises ConfigError for settings with which nothing could be led."""
    if config.shard >= config.shards:
        raise ConfigError(f"directory.shard = {config.shard}: there are {config.shards} shards, counted from 0")
    return parse_etcd(config.etcd)


class Candidate:
    """Makes `server` (on standby) lead whenever etcd says so. It resigns when its lease may be over by its own clock,
    or its key is gone. Raises ConfigError as `check_candidacy` does."""

    def __init__(self, server: Leading, config: DirectoryConfig, *, dial: Dialer = OPEN_DIALER) -> None:
        where = check_candidacy(config)
        self._server = server
        self._dial = dial
        self._ttl_s = config.leader_ttl_s
        self._note = LeaderNote(config.advertise or server.address, config.shards)
        self._key = f"{where.prefix}directory/{config.shard}"
        self._shard = str(config.shard)
        # A round of attempts must end while the lease still has time.
        self._etcd = Etcd(where.endpoints, self._ttl_s / (3 * (len(where.endpoints) + 1)))
        self._probe: Lane | None = None
        self._lease = 0
        self._seen = False
        self._revision = 0
        self._until = 0.0
        self._seldom = Seldom(LOG_EVERY_S)
        self._closing = threading.Event()
        self._changed = threading.Event()
        self._leaders = PrefixView(where.endpoints, f"{where.prefix}directory/", lambda _: self._changed.set())
        self._nodes = PrefixView(where.endpoints, f"{where.prefix}nodes/", lambda _: self._expect())
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Resign, so that a follower need not find out."""
        self._closing.set()
        self._changed.set()
        self._thread.join(10.0)
        self._leaders.close()
        self._nodes.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                pause = self._lead() if self._server.leading else self._follow()
            except Unavailable as error:
                if self._seldom.due():
                    log.warning("election: %s", error)
                pause = PROBE_S
            if self._server.leading and time.monotonic() > self._until:
                self._resign("its lease could not be renewed in time")
            self._changed.wait(pause)
            self._changed.clear()
        if self._server.leading:
            lease = self._lease
            self._resign("it stops")
            self._etcd.revoke(lease)
        self._etcd.close()
        if self._probe is not None:
            self._probe.close()

    def _lead(self) -> float:
        """Renew the lease; the seconds until that is due again."""
        current = self._leaders.entries.get(self._shard)
        mine = current is not None and current.create_revision == self._revision
        if not mine and (self._seen or (current is not None and current.create_revision > self._revision)):
            self._resign("it was deposed")
            return 0.0
        self._seen = mine
        asked = time.monotonic()
        granted = self._etcd.keep_alive(self._lease)
        if granted <= 0:
            self._resign("its lease is over")
            return 0.0
        self._until = asked + 0.75 * granted
        return granted / 5

    def _follow(self) -> float:
        current = self._leaders.entries.get(self._shard)
        if current is not None:
            note = _note(current)
            cause = self._gone(note.address) if note is not None else "its note cannot be read"
            if not cause:
                return PROBE_S
            if self._etcd.delete_created_at(self._key, current.create_revision):
                log.warning("election: the leader of shard %s is deposed: %s", self._shard, cause)
        self._stand()
        return 0.0 if self._server.leading else PROBE_S

    def _stand(self) -> None:
        asked = time.monotonic()
        if not self._lease or self._etcd.keep_alive(self._lease) <= 0:
            self._lease, _ = self._etcd.grant(self._ttl_s)
        found = self._etcd.create(self._key, msgspec.json.encode(self._note), self._lease)
        if isinstance(found, KeyValue):
            return
        self._revision, self._until, self._seen = found, asked + 0.75 * self._ttl_s, False
        self._server.lead()
        self._expect()
        log.warning("election: leading shard %s of the directory", self._shard)

    def _gone(self, address: str) -> str:
        """Why the leader at `address` counts as gone; "" if it does not: who answers gives its lease back itself."""
        if address == self._note.address:
            return "it was this process's former life"
        deadline = time.monotonic() + PATIENCE_S
        probe, self._probe = self._probe, None
        if probe is not None and probe.address != address:
            probe.close()
            probe = None
        for lane in (probe, None):
            try:
                self._probe = lane or Lane(address, deadline, self._dial)
                self._probe.send(StatRequest(), deadline)
                self._probe.receive(deadline)
            except Unavailable as error:
                self._probe, cause = None, str(error)
            else:
                return ""
        return cause

    def _resign(self, reason: str) -> None:
        log.warning("election: resigning from shard %s: %s", self._shard, reason)
        self._server.resign()
        self._lease = 0

    def _expect(self) -> None:
        if self._server.leading and self._nodes.known:
            self._server.expect(set(self._nodes.entries))


class Electorate:
    """Who leads each shard, as etcd has it; the last known while etcd is away. With `join`, the node is registered, so
    that new leaders wait for what it announces. `changed()` runs on a thread of this object."""

    def __init__(self, etcd: str, changed: Callable[[], None], join: Join | None = None) -> None:
        where = parse_etcd(etcd)
        self._on_change = changed
        self._addresses: list[str] = []
        self._seldom = Seldom(LOG_EVERY_S)
        self._closing = threading.Event()
        self._first = threading.Event()
        self._patient_until = time.monotonic() + FIRST_S
        self._leaders = PrefixView(where.endpoints, f"{where.prefix}directory/", self._led)
        self._thread: threading.Thread | None = None
        if join is not None:
            key = f"{where.prefix}nodes/{join.node_id}"
            self._thread = threading.Thread(
                target=self._register, args=(Etcd(where.endpoints), key, join.address), name="registration", daemon=True
            )
            self._thread.start()

    def addresses(self) -> list[str]:
        """One for each shard, "" where nobody leads; empty as long as nothing is known."""
        return self._addresses

    @property
    def problem(self) -> str:
        """Why etcd does not say who leads; "" if it does."""
        return self._leaders.problem

    def first_known(self, deadline: float) -> list[str]:
        """`addresses`, after waiting for them if this object is younger than FIRST_S: a question right after the start
        need not fail. `deadline`: monotonic."""
        if not self._addresses:
            self._first.wait(max(0.0, min(deadline, self._patient_until) - time.monotonic()))
        return self._addresses

    def close(self) -> None:
        """The node's registration ends too."""
        self._closing.set()
        self._leaders.close()
        if self._thread is not None:
            self._thread.join(5.0)

    def _led(self, view: PrefixView) -> None:
        notes = {int(shard): note for shard, kv in view.entries.items() if shard.isdigit() and (note := _note(kv))}
        shards = max([note.shards for note in notes.values()] + [len(self._addresses)], default=0)
        # Who led last is kept: if it is still there it answers, and if not that is soon found out.
        former = self._addresses + [""] * (shards - len(self._addresses))
        self._addresses = [notes[i].address if i in notes else former[i] for i in range(shards)]
        if any(self._addresses):
            self._first.set()
        self._on_change()

    def _register(self, etcd: Etcd, key: str, address: str) -> None:
        lease, pause = 0, 0.0
        while not self._closing.wait(pause):
            pause = NODE_TTL_S / 4
            try:
                if lease and etcd.keep_alive(lease) > 0:
                    continue
                lease, _ = etcd.grant(NODE_TTL_S)
                etcd.put(key, address.encode(), lease)
            except Unavailable as error:
                if self._seldom.due():
                    log.warning("registration: %s", error)
                pause = PROBE_S
        if lease:
            etcd.revoke(lease)
        etcd.close()


def _note(kv: KeyValue) -> LeaderNote | None:
    try:
        return msgspec.json.decode(kv.value, type=LeaderNote)
    except msgspec.MsgspecError as error:
        log.warning("election: %s holds no leader's note: %s", kv.key.decode(errors="replace"), error)
        return None
