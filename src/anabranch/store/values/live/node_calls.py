"""What a caller asks of a node that moves no bytes to it: exists, remove, pin, listing, verify."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anabranch.store.values.entries import Entry
from anabranch.store.values.live.node_custody import Custody, NodeSession, split_names
from anabranch.store.values.live.node_gets import GetDesk
from anabranch.store.values.live.node_lane import NodeLane
from anabranch.store.values.messages import Done, Entries, Exists, Introduce, Listing, Pin, Presence, Verify
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import Scope

if TYPE_CHECKING:
    from anabranch.store.values.live.node_tiers import NodeTiers

IN_DRAM, ON_SSD, IN_BACKING = 1, 2, 3
MOST_LISTED = 10_000
DROPPED_AT_ONCE = 128
VERIFIED_AT_ONCE = 64


class CallDesk:
    def __init__(self, custody: Custody, gets: GetDesk, tiers: NodeTiers) -> None:
        self._custody = custody
        self._gets = gets
        self._tiers = tiers

    def exists(self, lane: NodeLane, session: NodeSession, message: Exists) -> None:
        names = split_names(message.names)
        custody = self._custody
        entries = session.scope.entries
        tiers = bytearray(name in entries for name in names)
        if self._tiers.there and not all(tiers):
            self._tiers.presence(session.scope, names, tiers)
        if message.run and 0 in tiers:
            first = tiers.index(0)
            tiers[first:] = bytes(len(tiers) - first)
        found = len(tiers) - tiers.count(0)
        with custody.lock:
            tenant = session.caller.tenant
            custody.ledger.asked("exists", tenant, len(names))
            if found:
                custody.ledger.answered("exists", tenant, Outcome.OK, items=found)
            if found < len(names):
                custody.ledger.answered("exists", tenant, Outcome.MISSING, items=len(names) - found)
        lane.send(Presence(op=message.op, tiers=bytes(tiers)))

    def remove(self, session: NodeSession, names: list[bytes]) -> bytes:
        """From all tiers of this node. OK: it was here; MISSING: not."""
        custody = self._custody
        outcomes = bytearray([Outcome.MISSING]) * len(names)
        with custody.lock:
            custody.ledger.asked("remove", session.caller.tenant, len(names))
        for at in range(0, len(names), DROPPED_AT_ONCE):
            with custody.lock:
                for i, name in enumerate(names[at : at + DROPPED_AT_ONCE], at):
                    entry = session.scope.entries.get(name)
                    if entry is not None:
                        custody.shelf.drop(entry)
                        outcomes[i] = Outcome.OK
                custody.notice()
        self._tiers.remove(session.scope, names, outcomes)
        with custody.lock:
            custody.ledger.answered_all("remove", session.caller.tenant, bytes(outcomes))
        return bytes(outcomes)

    def pin(self, lane: NodeLane, session: NodeSession, message: Pin) -> None:
        names = split_names(message.names)
        custody = self._custody
        outcomes = bytearray([Outcome.MISSING]) * len(names)
        for at in range(0, len(names), DROPPED_AT_ONCE):
            with custody.lock:
                for i, name in enumerate(names[at : at + DROPPED_AT_ONCE], at):
                    entry = session.scope.entries.get(name)
                    if entry is not None:
                        outcomes[i] = custody.pins.pin(entry, message.seconds, custody.now())
        with custody.lock:
            custody.ledger.asked("pin", session.caller.tenant, len(names))
            custody.ledger.answered_all("pin", session.caller.tenant, bytes(outcomes))
            custody.notice()
        lane.send(Done(op=message.op, outcomes=bytes(outcomes)))

    def introduce(self, session: NodeSession, message: Introduce) -> None:
        if session.caller.trusted:
            scopes = [Scope(*parts) for parts in message.scopes]
            for scope in scopes:
                self._tiers.admit(scope)
            with self._custody.lock:
                for scope in scopes:
                    self._tiers.open_scope(scope)

    def listing(self, lane: NodeLane, session: NodeSession, message: Listing) -> None:
        rows: list[tuple[bytes, int, bytes, str, int]] = []
        if session.caller.trusted:
            with self._custody.lock:
                entries = self._custody.shelf.entries()
            rows = [(e.name, e.size, e.scope.digest, "dram", e.uses) for e in entries if e.name > message.after]
            here = {e.name for e in entries}
            rows += self._tiers.rows(message.after, here)
            rows.sort()
        lane.send(Entries(op=message.op, rows=rows[: max(0, min(message.limit, MOST_LISTED))]))

    def verify(self, lane: NodeLane, session: NodeSession, message: Verify) -> None:
        """Everything is read and compared with its sums, a few values at a time; what is damaged goes."""
        places: dict[str, int] = {}
        if session.caller.trusted:
            good, damaged = self._verify_dram()
            places = {"dram/good": good, "dram/damaged": damaged, **self._tiers.verify()}
        lane.send(Done(op=message.op, places=places))

    def _verify_dram(self) -> tuple[int, int]:
        custody, on_disk = self._custody, self._tiers.on_disk
        with custody.lock:
            entries = custody.shelf.entries()
            custody.to_verify, custody.verified = len(entries) + on_disk, 0
        good = damaged = 0
        for at in range(0, len(entries), VERIFIED_AT_ONCE):
            held: list[Entry] = []
            with custody.lock:
                for entry in entries[at : at + VERIFIED_AT_ONCE]:
                    if entry.live:
                        custody.shelf.hold(entry)
                        held.append(entry)
            for entry in held:
                if self._gets.check(entry):
                    good += 1
                else:
                    damaged += 1
            with custody.lock:
                custody.verified += VERIFIED_AT_ONCE
                for entry in reversed(held):
                    custody.shelf.release(entry)
                custody.notice()
        return good, damaged
