"""The nodes that a directory listens to, under small numbers; and the numbers whose keys are still in its table.

A number stands for one complete announcement of one node. It is *speaking* while what it announced may be said, *past*
when the node announces anew or is lost but may come back, *dead* when its keys only wait to be swept, and then free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator

import msgspec

from anabranch.core.errors import Overloaded
from anabranch.store.messages import Join, NodeRow

MAX_NUMBERS = 8191
"""What fits beside the tier bits in 16 bits."""
FEW_DEAD = 4
FOREVER = float("inf")


class Member(msgspec.Struct):
    """One connected node. `keys`: how many it announced under its number. Not `synced` and not `resetting`: what it
    said is in doubt. `lost`: it was silent for so long that all it said was given up."""

    join: Join
    number: int
    heard: float
    asked: float = -1e9
    seq: int = 0
    synced: bool = False
    resetting: bool = False
    keys: int = 0
    free_bytes: int = 0
    total_bytes: int = 0
    accepts: bool = True
    lost: bool = False

    @property
    def row(self) -> NodeRow:
        join = self.join
        return NodeRow(join.node_id, join.address, join.layout, self.free_bytes, self.total_bytes, self.accepts)


class Past(msgspec.Struct):
    """A number of a node that may announce its keys again until `until`."""

    node_id: str
    number: int
    until: float


class Members:
    """Connections are opaque names. A node is spoken for while its connection is open, it was heard within `ttl_s`, and
    nothing that it said was missed; it is lost `ttl_s` after it last was."""

    def __init__(self, ttl_s: float, now: float) -> None:
        self._ttl_s = ttl_s
        self._sure_from = now + ttl_s
        self._by_connection: dict[Hashable, Member] = {}
        self._by_node: dict[str, Hashable] = {}
        self._pasts: list[Past] = []
        self._expected: set[str] = set()
        self._free = deque(range(MAX_NUMBERS))
        self._fresh_until = -FOREVER
        self.dead: set[int] = set()
        self.speaking: dict[int, Member] = {}
        """By number: who may be named as a holder. Valid after `refresh`."""
        self.addresses: dict[int, tuple[str, str]] = {}
        self.settled = False
        """Every known and expected node has announced everything. Valid after `refresh`."""

    @property
    def pasts(self) -> dict[int, str]:
        """Numbers of nodes that may come back, or have not announced everything again: number → node."""
        return {past.number: past.node_id for past in self._pasts}

    def void(self, member: Member) -> list[int]:
        """Numbers whose entries give way to what this member announces: its own former ones, and dead ones."""
        if not self._pasts and not self.dead:
            return []
        own = [past.number for past in self._pasts if past.node_id == member.join.node_id]
        return own + sorted(self.dead)[:FEW_DEAD]

    @property
    def numbers_in_use(self) -> bool:
        """Some number's keys may yet be said to be somewhere."""
        return bool(self._by_connection or self._pasts)

    def __len__(self) -> int:
        return len(self._by_connection)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_connection.values())

    def items(self) -> list[tuple[Hashable, Member]]:
        return list(self._by_connection.items())

    def get(self, connection: Hashable) -> Member | None:
        return self._by_connection.get(connection)

    def named(self, node_id: str) -> Member | None:
        return self._by_connection.get(self._by_node.get(node_id))

    def connection(self, member: Member) -> Hashable:
        return self._by_node[member.join.node_id]

    def join(self, connection: Hashable, message: Join, now: float) -> Member:
        """A node's new connection replaces its former one, and everything said over that. Raises Overloaded."""
        for former in (self._by_node.get(message.node_id), connection):
            if former in self._by_connection:
                self._leave(former, FOREVER)
        member = Member(message, self._take(), now)
        self._by_connection[connection] = member
        self._by_node[message.node_id] = connection
        self._expected.discard(message.node_id)
        self.changed()
        return member

    def rival(self, connection: Hashable, message: Join, now: float) -> Member | None:
        """Who has this name already: another life of it, with a connection of its own, that is heard."""
        former = self.named(message.node_id)
        if former is None or self.connection(former) == connection or former.join.epoch == message.epoch:
            return None
        return former if not former.lost and now - former.heard <= self._ttl_s else None

    def renumber(self, member: Member) -> None:
        """The node begins to announce anew; what it announced before is past once it is through."""
        number = self._take()
        self._pasts.append(Past(member.join.node_id, member.number, FOREVER))
        member.number = number
        member.keys = 0
        self.changed()

    def gone(self, connection: Hashable, now: float) -> None:
        """The connection closed: nothing there can be fetched, but the node may come back."""
        if connection in self._by_connection:
            self._leave(connection, now + self._ttl_s)
        self.changed()

    def expect(self, node_ids: set[str]) -> None:
        """These nodes exist: until each has joined, absence proves nothing."""
        self._expected = node_ids - self._by_node.keys()
        self.changed()

    def hear(self, member: Member, now: float) -> None:
        """It said something."""
        if now - member.heard > self._ttl_s:
            self.changed()
        if member.lost:
            member.lost, member.asked = False, -1e9
        member.heard = now

    def expire(self, now: float) -> int:
        """Give up what nodes said that have been silent for twice the ttl; pasts whose time is over, or whose node has
        said everything anew, die. Returns how many nodes were given up."""
        lost = [m for m in self if now - m.heard > 2 * self._ttl_s and not m.lost]
        for member in lost:
            if not self._free:
                # No number for what it may say later: it is as if its connection had closed.
                self._leave(self.connection(member), now)
                continue
            self.renumber(member)
            member.lost, member.synced, member.resetting = True, False, False
            self._doom(member.join.node_id, now)
        for past in list(self._pasts):
            successor = self.named(past.node_id)
            if now >= past.until or (successor is not None and successor.synced):
                self._pasts.remove(past)
                self.dead.add(past.number)
                self.changed()
        return len(lost)

    def bury(self, numbers: set[int]) -> None:
        """No key of these numbers is left in the table."""
        self.dead -= numbers
        self._free.extend(sorted(numbers))

    def changed(self) -> None:
        self._fresh_until = -FOREVER

    def refresh(self, now: float) -> bool:
        """Bring `speaking`, `addresses` and `settled` up to date. False if keys of others may still be in the table."""
        if now > self._fresh_until:
            self._recount(now)
        return self._clean and not self.dead

    def sure(self, now: float) -> bool:
        """A name that nobody holds is nowhere. After `refresh`."""
        return self.settled and now >= self._sure_from

    def trust(self) -> None:
        """All nodes that exist are known (`expect`): there is no need to be old to be sure."""
        self._sure_from = -FOREVER

    def _recount(self, now: float) -> None:
        known = [member for member in self._by_connection.values() if not member.lost]
        heard = [member for member in known if now - member.heard <= self._ttl_s]
        self.speaking = {member.number: member for member in heard if member.synced or member.resetting}
        self.addresses = {n: (m.join.node_id, m.join.address) for n, m in self.speaking.items()}
        everyone = len(heard) == len(known)
        self.settled = everyone and all(m.synced for m in heard) and not self._pasts and not self._expected
        self._clean = len(self.speaking) == len(known) and not self._pasts
        self._fresh_until = min((member.heard for member in heard), default=now) + self._ttl_s

    def _leave(self, connection: Hashable, until: float) -> None:
        member = self._by_connection.pop(connection)
        node_id = member.join.node_id
        self._by_node.pop(node_id, None)
        self._pasts.append(Past(node_id, member.number, until))
        self._doom(node_id, until)

    def _doom(self, node_id: str, until: float) -> None:
        for past in self._pasts:
            if past.node_id == node_id:
                past.until = until
        self.changed()

    def _take(self) -> int:
        if not self._free:
            raise Overloaded(
                f"{MAX_NUMBERS} announcements of nodes are known or wait to be forgotten", retry_after_s=1.0
            )
        return self._free.popleft()
