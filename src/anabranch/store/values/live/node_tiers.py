"""The tiers below a node's DRAM, and what travels between them: when a value goes down, and how it comes up again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from anabranch.core.errors import AnabranchError, Unavailable
from anabranch.store.values.config import WriteConfig
from anabranch.store.values.contracts import BackingTier, DiskTier, Record
from anabranch.store.values.entries import Entry, ScopeState
from anabranch.store.values.live.node_custody import Custody
from anabranch.store.values.live.node_gets import Loaded
from anabranch.store.values.live.node_loader import Loader, Read
from anabranch.store.values.live.node_pool import WorkPool
from anabranch.store.values.live.node_scopes import ScopeFile
from anabranch.store.values.live.node_writer import Appends, TierWriter, record_of
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.puts import Put
from anabranch.store.values.scope import Scope

if TYPE_CHECKING:
    from anabranch.store.values.live.tenant_keys import TenantKeys

DISK_THREADS = 4
DURABLE_S = 30.0
REMOVE_S = 5.0
DRAM, SSD, BACKING = 0, 1, 2
VERIFIED_BYTES = 64 << 20
EVICTED_AT_ONCE = 1000


class NodeTiers:
    """`changed(tier, name, there)` is called under the lock, for the directory."""

    def __init__(
        self,
        custody: Custody,
        scopes: ScopeFile,
        writes: WriteConfig,
        disk: DiskTier | None,
        backing: BackingTier | None,
    ) -> None:
        self._custody = custody
        self._scopes = scopes
        self._admission = writes.admission
        self.disk = disk
        self.backing = backing
        self.keys: TenantKeys | None = None
        self.there = disk is not None or backing is not None
        self.ssd_changed: dict[bytes, bool] | None = None
        self._writers: list[TierWriter] = []
        self._appends = Appends(custody)
        self._pool = WorkPool("tier-read", DISK_THREADS) if self.there else None
        self.loader: Loader | None = None
        if self._pool is not None:
            self._open(writes, self._pool)

    def _open(self, writes: WriteConfig, pool: WorkPool) -> None:
        custody, disk, backing = self._custody, self.disk, self.backing
        queue_bytes = writes.queue_bytes
        reads: dict[int, Read] = {}
        if disk is not None:
            log = disk
            self._writers.append(
                TierWriter(
                    "ssd",
                    custody,
                    self._appends,
                    lambda batch: log.append(batch, durable=False),
                    queue_bytes=queue_bytes,
                    queue_age_s=writes.queue_age_s,
                    written=self._on_ssd,
                )
            )
            reads[SSD] = disk.read
        if backing is not None:
            self._writers.append(
                TierWriter(
                    "backing",
                    custody,
                    self._appends,
                    backing.store,
                    queue_bytes=queue_bytes,
                    queue_age_s=writes.queue_age_s,
                    written=lambda entry: None,
                )
            )
            reads[BACKING] = backing.load
        self.loader = Loader(custody, pool, self.locate, reads, self._loaded)
        if self._admission == "evicted":
            custody.shelf.leaving = self._leaving

    # --- down -----------------------------------------------------------------------------------------------------

    def stored(self, entries: list[Entry]) -> None:
        """Under the lock: these are new."""
        if self._admission == "all":
            self._admit(entries)

    def used(self, entries: list[Entry]) -> None:
        """Under the lock: these were read."""
        if self._writers and self._admission == "second-use":
            self._admit([entry for entry in entries if entry.uses == 1])

    def make_durable(self, put: Put, entries: list[Entry]) -> None:
        """What a put wants on disk before its answer: outcomes of items that did not get there change. Blocks."""
        custody = self._custody
        with custody.lock:
            wanted = list(entries)
            for item in put.items:
                known = item.scope.entries.get(item.name) if item.outcome is Outcome.PRESENT else None
                if known is not None:  # also if it is on disk: it may have been written without a flush
                    wanted.append(known)
            for entry in wanted:
                custody.shelf.hold(entry)
            self._appends.begin(wanted)
        outcomes = self._append(wanted) if wanted else []
        failed = {e.name: outcome for e, outcome in zip(wanted, outcomes, strict=True) if not outcome.stored}
        for item in put.items:
            if item.outcome.stored and item.name in failed:
                item.outcome = failed[item.name]

    def _append(self, entries: list[Entry]) -> list[Outcome]:
        """Durably, on the SSD if there is one, else in the backing store; ends a reference of each entry when the tier
        is done with it, however late."""
        custody, disk, backing, pool = self._custody, self.disk, self.backing, self._pool
        memory = custody.memory.data
        batch = [(record_of(e), memory[e.offset : e.offset + e.size]) for e in entries]
        outcomes = [Outcome.UNREACHABLE if self.there else Outcome.DENIED] * len(entries)

        def write() -> None:
            written: list[Outcome] = []
            try:
                if disk is not None:
                    written = disk.append(batch, durable=True)
                elif backing is not None:
                    written = backing.store(batch)
            finally:
                with custody.lock:
                    self._appends.end(entries)
                    for entry, outcome in zip(entries, written, strict=False):
                        if outcome.stored and disk is not None:
                            self._on_ssd(entry)
                    for entry in reversed(entries):
                        custody.shelf.release(entry)
                    custody.notice()
            outcomes[: len(written)] = written

        work = pool.submit(write) if pool is not None else None
        if work is None:
            with custody.lock:
                self._appends.end(entries)
                for entry in reversed(entries):
                    custody.shelf.release(entry)
        elif not work.wait(DURABLE_S):
            return [Outcome.UNREACHABLE] * len(entries)
        return outcomes

    def _admit(self, entries: list[Entry]) -> None:
        for writer in self._writers:
            for entry in entries:
                if not entry.on_disk:
                    writer.add(entry)

    def _leaving(self, entry: Entry) -> None:
        for writer in self._writers:
            if not entry.on_disk:
                writer.add(entry, leaving=True)

    def _on_ssd(self, entry: Entry) -> None:
        entry.on_disk = True
        if self.ssd_changed is not None:
            self.ssd_changed[entry.name] = True

    # --- up -------------------------------------------------------------------------------------------------------

    def locate(self, scope: ScopeState, name: bytes) -> tuple[int, Record] | None:
        """In which tier it is, from memory."""
        if self.disk is not None:
            record = self.disk.record(name)
            if record is not None and record.scope == scope.digest:
                return SSD, record
        if self.backing is not None:
            record = self.backing.record(name)
            if record is not None and record.scope == scope.digest:
                return BACKING, record
        return None

    def load(self, wanted: Sequence[tuple[ScopeState, bytes]]) -> list[Loaded]:
        return self.loader.load(wanted) if self.loader is not None else []

    def prefetch(self, scope: ScopeState, names: list[bytes]) -> list[Outcome]:
        """OK: it is in DRAM or on its way there from a tier of this node."""
        if self.loader is None:
            return [Outcome.OK if name in scope.entries else Outcome.MISSING for name in names]
        return self.loader.prefetch([(scope, name) for name in names])

    def presence(self, scope: ScopeState, names: list[bytes], tiers: bytearray) -> None:
        """Fill in `Presence.tiers` where DRAM has nothing."""
        for i, name in enumerate(names):
            if not tiers[i]:
                located = self.locate(scope, name)
                if located is not None:
                    tiers[i] = located[0] + 1

    def _loaded(self, entry: Entry, tier: int) -> None:
        entry.on_disk = tier == SSD
        self._custody.shelf.counters[f"loaded_from_{'ssd' if tier == SSD else 'backing'}"] += 1

    # --- gone -----------------------------------------------------------------------------------------------------

    def remove(self, scope: ScopeState, names: list[bytes], outcomes: bytearray) -> None:
        """Also from here; what was here becomes OK in `outcomes`, UNREACHABLE if it cannot be made sure."""
        if not self.there:
            return
        wanted = set(names)
        with self._custody.lock:
            if self.loader is not None:
                self.loader.cancel(names)
            for writer in self._writers:
                writer.cancel(names)
            sure = self._appends.wait(lambda entry: entry.name in wanted, REMOVE_S)
        if not sure:
            outcomes[:] = bytes([Outcome.UNREACHABLE]) * len(names)
        for tier in (self.disk, self.backing):
            if tier is None:
                continue
            mine = [i for i, name in enumerate(names) if (r := tier.record(name)) and r.scope == scope.digest]
            gone = tier.remove([names[i] for i in mine]) if mine else []
            for i, outcome in zip(mine, gone, strict=True):
                if outcome is Outcome.OK and sure:
                    outcomes[i] = Outcome.OK
            if tier is self.disk and self.ssd_changed is not None:
                with self._custody.lock:
                    self.ssd_changed.update((names[i], False) for i in mine)

    def admit(self, scope: Scope) -> None:
        """Not under the lock, before `open_scope`: it may write a key file. Raises Unavailable if it cannot."""
        if self.keys is not None:
            try:
                self.keys.admit(scope)
            except OSError as error:
                raise Unavailable(f"no key for tenant '{scope.tenant}': {error}") from error

    def open_scope(self, scope: Scope) -> ScopeState:
        """Under the lock. It is filed with its first value."""
        return self._custody.shelf.scopes.open(scope)

    def invalidate(self, states: list[ScopeState], *, shared: bool = True) -> dict[str, int]:
        """Tier → how many values went, -1 where it could not be made sure. When this returns, nobody finds them.
        `shared`: also from the tier that other nodes use too."""
        custody = self._custody
        digests = [state.digest for state in states]
        places = {"dram": self._drop(states, digests)}
        dead = set(states)
        with custody.lock:
            sure = self._appends.wait(lambda entry: entry.scope in dead, REMOVE_S)
        for tier, name in ((self.disk, "ssd"), (self.backing if shared else None, "backing")):
            if tier is not None:
                try:
                    gone = tier.invalidate(digests)
                except (OSError, AnabranchError):
                    gone = -1
                places[name] = gone if sure else -1
        if self.there:
            # What was loaded meanwhile came from a tier that still had it.
            self._drop(states, digests)
        return places

    def forget(self, names: list[bytes]) -> int:
        """Drop what others removed while this node was away, here only; how many it had."""
        gone, wanted = 0, set(names)
        with self._custody.lock:
            if self.loader is not None:
                self.loader.cancel(names)
            for writer in self._writers:
                writer.cancel(names)
            self._appends.wait(lambda entry: entry.name in wanted, REMOVE_S)
            for state in self._custody.shelf.scopes.states():
                found = [entry for name in wanted if (entry := state.entries.get(name)) is not None]
                for entry in found:
                    self._custody.shelf.drop(entry)
                gone += len(found)
            self._custody.notice()
        disk = self.disk
        mine = [name for name in names if disk.record(name) is not None] if disk is not None else []
        if disk is not None and mine:
            disk.remove(mine)
            with self._custody.lock:
                if self.ssd_changed is not None:
                    self.ssd_changed.update(dict.fromkeys(mine, False))
        return gone + len(mine)

    def forget_scopes(self, concerned: Callable[[Scope | None], bool]) -> int:
        """Drop what others invalidated while this node was away, here only; how many values went. None: a scope of
        which only the digest is known."""
        disk = self.disk
        records = (disk.record(name) for name in disk.names()) if disk is not None else ()
        digests = {record.scope for record in records if record is not None}
        with self._custody.lock:
            scopes = self._custody.shelf.scopes
            for digest in digests:
                scopes.known(digest)
            states = [state for state in scopes.states() if concerned(state.scope)]
        return sum(max(0, count) for count in self.invalidate(states, shared=False).values()) if states else 0

    def _drop(self, states: list[ScopeState], digests: list[bytes]) -> int:
        """From DRAM; how many there were."""
        custody = self._custody
        with custody.lock:
            gone = sum(custody.shelf.scopes.invalidate(state) for state in states)
            generation = custody.shelf.generation
        # Not under the lock: it waits for the disk. Nothing is found any more, and what a crash now would bring back
        # nobody was told to be gone.
        self._scopes.invalidated(digests, generation)
        left = 1
        while left:
            with custody.lock:
                left = custody.shelf.drain_reclaim(256)
                custody.notice()
        return gone

    # --- oversight ------------------------------------------------------------------------------------------------

    def rows(self, after: bytes, known: set[bytes]) -> list[tuple[bytes, int, bytes, str, int]]:
        rows = []
        for name in self.disk.names() if self.disk is not None else ():
            record = self.disk.record(name) if self.disk is not None and name > after and name not in known else None
            if record is not None:
                rows.append((name, record.size, record.scope, "ssd", 0))
        return rows

    @property
    def holds(self) -> bool:
        """There is something on the SSD."""
        return self.disk is not None and self.disk.used_bytes > 0

    @property
    def on_disk(self) -> int:
        """Values on the SSD."""
        return 0 if self.disk is None else len(list(self.disk.names()))

    def verify(self) -> dict[str, int]:
        """Read everything on the SSD and compare it with its sums."""
        if self.disk is None:
            return {}
        good = damaged = 0
        for name in list(self.disk.names()):
            record = self.disk.record(name)
            if record is None:
                continue
            outcome = self.disk.read([name], [memoryview(bytearray(record.size))])[0]
            good += outcome is Outcome.OK
            damaged += outcome is Outcome.DAMAGED
            self._custody.verified += 1
        return {"ssd/good": good, "ssd/damaged": damaged}

    def tick(self) -> None:
        """Outside the lock."""
        if self.disk is not None:
            gone = self.disk.take_evicted()
            for at in range(0, len(gone), EVICTED_AT_ONCE):
                with self._custody.lock:
                    self._left_ssd(gone[at : at + EVICTED_AT_ONCE])

    def _left_ssd(self, names: Sequence[bytes]) -> None:
        """Under the lock."""
        states = list(self._custody.shelf.scopes.states())
        for name in names:
            if self.ssd_changed is not None:
                self.ssd_changed[name] = False
            for state in states:
                entry = state.entries.get(name)
                if entry is not None:
                    entry.on_disk = False  # else it would not be written again

    def census(self) -> dict[str, int]:
        census = {"loads": len(self.loader) if self.loader is not None else 0}
        census["writes_waiting"] = sum(map(len, self._writers))
        census["writes_waiting_bytes"] = sum(writer.waiting_bytes for writer in self._writers)
        if self.disk is not None:
            census["ssd_used_bytes"] = self.disk.used_bytes
            census["ssd_values"] = self.disk.count
        return census

    def state(self) -> dict[str, str]:
        state = {}
        if self.disk is not None and self.disk.state:
            state["ssd"] = self.disk.state
        if self._pool is not None and self._pool.stuck:
            state["tiers"] = "all reads have been stuck for long"
        for writer in self._writers:
            if writer.problem:
                state["writes"] = writer.problem
        return state

    def close(self) -> bool:
        """False: a thread is stuck in a call that does not return."""
        ended = [writer.close() for writer in self._writers]
        if self._pool is not None:
            ended.append(self._pool.close())
        for tier in (self.disk, self.backing):
            if tier is not None and all(ended):
                tier.close()
        return all(ended)
