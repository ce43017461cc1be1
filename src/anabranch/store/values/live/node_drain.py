"""How a node leaves its store: what is worth it goes to other nodes, readers finish, the directory forgets it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable

from anabranch.core.errors import AnabranchError
from anabranch.policy.placement import choose
from anabranch.store.messages import NodeRow
from anabranch.store.values.live.node_custody import Custody
from anabranch.store.values.live.node_directory import NodeDirectory, candidates
from anabranch.store.values.live.node_tiers import NodeTiers

AT_ONCE = 64
ASKED_AT_ONCE = 4096
TRIES = 2
LONGEST_DRAIN_S = 86_400.0
HandOver = Callable[[str, list[bytes]], int]
"""Copy values to the node at an address; how many are there now."""


class NodeDrain:
    """Once. `done` is set when readers have given back what they have, or the deadline has passed."""

    def __init__(
        self, node_id: str, custody: Custody, tiers: NodeTiers, directory: NodeDirectory, hand_over: HandOver
    ) -> None:
        self._node_id = node_id
        self._custody = custody
        self._tiers = tiers
        self._directory = directory
        self._hand_over = hand_over
        self._waiter: threading.Thread | None = None
        self.done = threading.Event()

    @property
    def begun(self) -> bool:
        return self._custody.puts.closing

    def run(self, deadline_s: float) -> tuple[int, int]:
        """Returns when everything worth it has gone, or the deadline has passed: (handed over, left behind)."""
        custody = self._custody
        with custody.lock:
            custody.puts.closing = True
        deadline = custody.now() + (min(deadline_s, LONGEST_DRAIN_S) if deadline_s > 0 else 0.0)
        names = self._worth()
        handed = 0
        for at in range(0, len(names), AT_ONCE):
            if custody.now() >= deadline:
                break
            handed += self._hand_over_some(names[at : at + AT_ONCE])
        self._directory.leave()
        self._waiter = threading.Thread(target=self._wait_for_readers, args=(deadline,), name="drain", daemon=True)
        self._waiter.start()
        return handed, len(names) - handed

    def close(self) -> None:
        if self._waiter is not None:
            self._waiter.join(5.0)

    def _worth(self) -> list[bytes]:
        """Names of pinned values and of those that nobody else has, in DRAM or on the SSD; the most used first."""
        custody, disk, backing = self._custody, self._tiers.disk, self._tiers.backing
        with custody.lock:
            entries = custody.shelf.entries()
        entries.sort(key=lambda entry: (entry.pin, entry.uses), reverse=True)
        pinned = {entry.name for entry in entries if entry.pin}
        names = dict.fromkeys([entry.name for entry in entries])
        if disk is not None:
            names.update(dict.fromkeys(disk.names()))
        everything = list(names)
        worth: list[bytes] = []
        for at in range(0, len(everything), ASKED_AT_ONCE):
            part = everything[at : at + ASKED_AT_ONCE]
            found = self._directory.where(b"".join(part))
            for i, name in enumerate(part):
                holders = found.holders(i) if found is not None and i < len(found) else []
                elsewhere = any(node != self._node_id for node, _, _ in holders)
                kept = backing is not None and backing.record(name) is not None
                if name in pinned or not (elsewhere or kept):
                    worth.append(name)
        return worth

    def _hand_over_some(self, names: list[bytes]) -> int:
        """A node that does not take all of its share is replaced by another one, once."""
        done = 0
        refused: set[str] = set()
        for _ in range(TRIES):
            rows = [row for row in self._others() if row.node_id not in refused]
            addresses = {row.node_id: row.address for row in rows}
            plan: dict[str, list[bytes]] = defaultdict(list)
            for name in names:
                for chosen in choose(candidates(rows), 1, "", name):
                    plan[chosen.node_id].append(name)
            names = []
            for node_id, share in plan.items():
                count = self._hand_over(addresses[node_id], share)
                if count == len(share):
                    done += count
                else:
                    refused.add(node_id)
                    names += share
        return done

    def _others(self) -> list[NodeRow]:
        try:
            return [row for row in self._directory.others() if row.accepts]
        except AnabranchError:
            return []

    def _wait_for_readers(self, deadline: float) -> None:
        custody = self._custody
        with custody.lock:
            while (len(custody.reads) or len(custody.puts)) and custody.now() < deadline and not custody.closing:
                custody.freed.wait(0.05)
        self.done.set()
