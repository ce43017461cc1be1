"""What all threads of a value node share: the brain under its lock, the arena, and who is connected."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from anabranch.core.authentication import Caller
from anabranch.core.errors import WireError
from anabranch.store.values.config import StoreConfig
from anabranch.store.values.entries import ScopeState
from anabranch.store.values.ledger import Ledger
from anabranch.store.values.live.node_lane import NodeLane
from anabranch.store.values.live.node_memory import NodeMemory
from anabranch.store.values.messages import MAX_ITEMS
from anabranch.store.values.pins import Pins
from anabranch.store.values.puts import Put, Puts
from anabranch.store.values.reads import Reads
from anabranch.store.values.scope import NAME_BYTES, SCOPE_BYTES
from anabranch.store.values.shelf import Shelf

MAX_WAIT_S = 60.0
BAR_S = 3.0
"""How long an invalidation may take until all nodes have heard of it; else it is not confirmed."""


class NodeSession:
    """All lanes of one caller. `scope`: the one of its Hello. `peer`: the name of the node that it
    is, empty for others."""

    def __init__(
        self, session: tuple[bytes, bytes, bool], caller: Caller, scope: ScopeState, *, peer: str = ""
    ) -> None:
        self.id = session
        self.caller = caller
        self.scope = scope
        self.peer = peer
        self.lanes: set[NodeLane] = set()


class Custody:
    """`lock` guards shelf, puts, reads, pins and ledger. Nobody blocks while holding it: no socket, no disk."""

    def __init__(self, shelf: Shelf, memory: NodeMemory, config: StoreConfig) -> None:
        self.lock = threading.Lock()
        self.freed = threading.Condition(self.lock)
        self.shelf = shelf
        self.memory = memory
        self.puts = Puts(shelf)
        self.reads = Reads(shelf, config.lease_s)
        self.pins = Pins(shelf, quota_bytes=config.dram_bytes // 2, max_pin_s=config.max_pin_s)
        self.ledger = Ledger()
        self.waiting = 0
        self.closing = False
        """The node stops: nobody waits for anything any more."""
        self.to_verify = self.verified = 0
        """Values that the last Verify reads, and how many it has read."""
        self._noted = 0
        self._bars: list[tuple[str, str | None, float]] = []

    def bar(self, tenant: str, epoch: str | None) -> float:
        """Under the lock: for a while, take no copies of these scopes from other nodes, which may not have heard of an
        invalidation yet. Returns when it ends."""
        end = self.now() + BAR_S
        self._bars = [*(one for one in self._bars if one[2] > self.now()), (tenant, epoch, end)]
        return end

    def barred(self, state: ScopeState) -> bool:
        """Under the lock."""
        scope, now = state.scope, self.now()
        return any(
            end > now and (scope is None or (tenant == scope.tenant and epoch in (None, scope.epoch)))
            for tenant, epoch, end in self._bars
        )

    def now(self) -> float:
        return time.monotonic()

    def notice(self) -> None:
        """Under the lock, after something may have made room: whoever waits for it looks again."""
        if self.waiting and self.shelf.room_made != self._noted:
            self._noted = self.shelf.room_made
            self.freed.notify_all()

    def expire(self, now: float) -> list[Put]:
        """Under the lock: end what is over. Returns the puts that were given up."""
        self.reads.expire(now)
        self.pins.expire(now)
        over = self.puts.expire(now)
        self.notice()
        return over

    def wait_for_room(self, put: Put, wait_s: float) -> None:
        """Place the items that found no room, as leases and pins end, for at most `wait_s`; not when only the put's own
        items are in the way."""
        # Not max(wait_s, 0): what a caller sends may be no number.
        deadline = self.now() + (min(wait_s, MAX_WAIT_S) if wait_s > 0 else 0.0)
        with self.lock:
            self.waiting += 1
            try:
                while not self.puts.place(put):
                    if put.unfinished:
                        self.freed.wait(0)  # others first
                        continue
                    now = self.now()
                    if now >= deadline or self.closing or self.puts.in_its_own_way(put):
                        return
                    ends = [end for end in (self.reads.next_end, self.pins.next_end) if end is not None]
                    self.freed.wait(max(0.001, min([deadline, *ends]) - now))
                    self.expire(self.now())
            finally:
                self.waiting -= 1

    def scopes_of(self, session: NodeSession, scopes: bytes, items: int) -> ScopeState | list[ScopeState] | None:
        """Whose the items are; None: the caller may not say. Under the lock. Raises WireError."""
        if not scopes:
            return session.scope
        if not session.caller.trusted:
            return None
        if len(scopes) != items * SCOPE_BYTES:
            raise WireError(f"{len(scopes)} bytes of scopes for {items} items")
        known = self.shelf.scopes.known
        return [known(scopes[at : at + SCOPE_BYTES]) for at in range(0, len(scopes), SCOPE_BYTES)]


def split_names(names: bytes) -> list[bytes]:
    """Raises WireError."""
    if len(names) % NAME_BYTES or len(names) > MAX_ITEMS * NAME_BYTES:
        raise WireError(f"{len(names)} bytes are not 1 to {MAX_ITEMS} names")
    if len(names) == NAME_BYTES:
        return [names]
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def check_items(sizes: Sequence[int]) -> None:
    if len(sizes) > MAX_ITEMS:
        raise WireError(f"{len(sizes)} items; a request has at most {MAX_ITEMS}")
