"""What a node tells the directory: changes with sequence numbers, everything on request, a heartbeat in between."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.store.actions import NodeAction, SendDirectory
from anabranch.store.messages import Announce, Heartbeat
from anabranch.store.slots import Changes

KEYS_A_MESSAGE = 100_000


class Announcer:
    """Silent until `reset`, i.e. until the directory is there; what changed before is part of the reset."""

    def __init__(
        self, node_id: str, address: str, layout: bytes, heartbeat_s: float, act: Callable[[NodeAction], None]
    ) -> None:
        self.node_id = node_id
        self.address = address
        self.layout = layout
        self._heartbeat_s = heartbeat_s
        self._act = act
        self._up = False
        self._seq = 0
        self._spoke = 0.0
        self._added: dict[str, list[bytes]] = {}
        self._removed: dict[str, list[bytes]] = {}

    def reset(self, tiers: dict[str, list[bytes]], now: float) -> None:
        """Announce everything."""
        self._up = True
        self._added, self._removed = {}, {}
        parts = [
            (tier, keys[at : at + KEYS_A_MESSAGE])
            for tier, keys in tiers.items()
            for at in range(0, len(keys), KEYS_A_MESSAGE)
        ] or [("dram", [])]
        for i, (tier, keys) in enumerate(parts):
            self._seq += 1
            last = i == len(parts) - 1
            packed = {tier: b"".join(keys)}
            self._act(SendDirectory(Announce(seq=self._seq, added_names=packed, reset=i == 0, last=last)))
        self._spoke = now

    def down(self) -> None:
        self._up = False

    def changed(self, tier: str, changes: Changes) -> None:
        if self._up and changes.added:
            self._added.setdefault(tier, []).extend(changes.added)
        if self._up and changes.removed:
            self._removed.setdefault(tier, []).extend(changes.removed)

    def flush(self, now: float) -> None:
        """Send what piled up, or a heartbeat if it is time for one."""
        if not self._up:
            return
        if self._added or self._removed:
            self._seq += 1
            added = {tier: b"".join(keys) for tier, keys in self._added.items()}
            removed = {tier: b"".join(keys) for tier, keys in self._removed.items()}
            self._act(SendDirectory(Announce(seq=self._seq, added_names=added, removed_names=removed)))
            self._added, self._removed = {}, {}
            self._spoke = now
        elif now - self._spoke >= self._heartbeat_s:
            self._act(SendDirectory(Heartbeat(seq=self._seq)))
            self._spoke = now
