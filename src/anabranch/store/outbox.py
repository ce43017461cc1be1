"""What a node has yet to tell one directory shard. Pure; the sender is `store.live.directory_feed`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from anabranch.store.messages import Announce
from anabranch.store.shards import split
from anabranch.store.values.scope import NAME_BYTES

MESSAGE_BYTES = 65_536 * NAME_BYTES


class Holdings(msgspec.Struct, frozen=True):
    """Everything that a node holds: tier → names (32 bytes each, end to end); and replica count → the names that want
    another number of replicas than `Join.replicas` says."""

    tiers: dict[str, bytes]
    wanted: dict[int, bytes] = {}


class Outbox:
    """Keeps changes in order, as few messages as that allows: in one message, what is removed counts before what is
    added."""

    def __init__(self, shard: int, shards: int) -> None:
        self._shard = shard
        self._shards = shards
        self._seq = 0
        self.clear()

    def __bool__(self) -> bool:
        return bool(self._closed or self._added or self._removed)

    @property
    def seq(self) -> int:
        return self._seq

    def clear(self) -> None:
        """What waited is part of the reset that follows."""
        self._closed: list[Announce] = []
        self._fresh()

    def changed(self, added: Mapping[str, bytes], removed: Mapping[str, bytes], wanted: Mapping[int, bytes]) -> None:
        """Within this call, too, what is removed counts before what is added. Names of other shards are ignored."""
        for tier, names in removed.items():
            if own := self._own(names):
                if self._added:
                    self._close()
                self._removed.setdefault(tier, []).append(own)
        for tier, names in added.items():
            if own := self._own(names):
                self._added.setdefault(tier, []).append(own)
        for count, names in wanted.items():
            if own := self._own(names):
                self._wanted.setdefault(count, []).append(own)

    def take(self) -> list[Announce]:
        if self._added or self._removed:
            self._close()
        taken, self._closed = self._closed, []
        return taken

    def reset(self, holdings: Holdings) -> Iterator[Announce]:
        """Everything anew. `last` is only true of the last message."""
        parts = [
            (tier, own[at : at + MESSAGE_BYTES])
            for tier, names in holdings.tiers.items()
            if (own := self._own(names))
            for at in range(0, len(own), MESSAGE_BYTES)
        ]
        yield self._announce(reset=True, last=not parts and not holdings.wanted)
        for i, (tier, names) in enumerate(parts):
            last = i == len(parts) - 1 and not holdings.wanted
            yield self._announce(added_names={tier: names}, last=last)
        if holdings.wanted:
            yield self._announce(wanted={count: self._own(names) for count, names in holdings.wanted.items()})

    def _announce(
        self,
        *,
        reset: bool = False,
        last: bool = True,
        added_names: dict[str, bytes] | None = None,
        wanted: dict[int, bytes] | None = None,
    ) -> Announce:
        self._seq += 1
        return Announce(seq=self._seq, reset=reset, last=last, added_names=added_names or {}, wanted=wanted or {})

    def _close(self) -> None:
        self._seq += 1
        self._closed.append(
            Announce(
                seq=self._seq,
                added_names={tier: b"".join(parts) for tier, parts in self._added.items()},
                removed_names={tier: b"".join(parts) for tier, parts in self._removed.items()},
                wanted={count: b"".join(parts) for count, parts in self._wanted.items()},
            )
        )
        self._fresh()

    def _fresh(self) -> None:
        self._added: dict[str, list[bytes]] = {}
        self._removed: dict[str, list[bytes]] = {}
        self._wanted: dict[int, list[bytes]] = {}

    def _own(self, names: bytes) -> bytes:
        return split(names, self._shards)[self._shard][0]
