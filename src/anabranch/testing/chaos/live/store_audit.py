"""After the storm: is anything left behind, is everything there that was promised, and are all bytes right?"""

from __future__ import annotations

import signal
import time
from collections import Counter

from anabranch.core.errors import AnabranchError
from anabranch.paging.extents import rounded
from anabranch.store.values.live.client import Client
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import Scope, name_of
from anabranch.testing.chaos.live.store_rig import StoreRig
from anabranch.testing.chaos.store_oracle import POOLS, Traffic, content, key_of, size_of
from anabranch.testing.chaos.store_report import CampaignReport

QUIET_S = 20.0
REPAIR_S = 20.0
BATCH = 32
REPAIRED = 100
AT_REST = ("leases", "pins", "puts", "waiting", "held_bytes", "reserved_bytes", "loads", "writes_waiting", "imports")
"""What a node's census says is 0 when nobody calls."""


class Audit:
    """`stored`: keys of the pools `pair` and `durable` that were acknowledged."""

    def __init__(self, rig: StoreRig, report: CampaignReport, traffic: Traffic, stored: set[str]) -> None:
        self._rig = rig
        self._report = report
        self._traffic = traffic
        self._stored = stored

    def run(self, *, repair: bool = True) -> None:
        self._rest()
        if repair:
            self._repair()
        self._scan([key_of(pool, number) for pool in POOLS for number in range(self._traffic.keys)])
        for name in self._rig.names("node"):
            self._rig.victims[name].strike(signal.SIGKILL)
        self._rig.wait_ready()
        durable = sorted(key for key in self._stored if key.startswith("durable/"))
        self._report.durable = (len(durable), self._scan(durable))

    def _rest(self) -> None:
        """Without callers, nodes hold values and nothing else."""
        end = time.monotonic() + QUIET_S
        while (held := self._held()) and time.monotonic() < end:
            time.sleep(0.1)
        self._report.leaked = held

    def _held(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for name in self._rig.names("node"):
            try:
                census, entries = self._rig.stat(name).census, self._rig.entries(name)
            except AnabranchError as error:
                return {f"{name}: {error}": 1}
            self._report.census.update({f"{name}.{what}": count for what, count in census.items()})
            held.update({f"{name}.{what}": census[what] for what in AT_REST if census.get(what)})
            needed = sum(rounded(entry.size) for entry in entries if entry.tier == "dram")
            if census["used_bytes"] != needed:
                held[f"{name}.used_bytes beyond its values"] = census["used_bytes"] - needed
        return held

    def _repair(self) -> None:
        """Values with two copies have two again after a node went away for good."""
        rig = self._rig
        name_key = Scope("default").name_key(rig.salt())
        keys = [f"repair/{number}" for number in range(REPAIRED)]
        with self._client() as client:
            values = [content(key, 1000) for key in keys]
            outcomes = client.put_many(keys, values, replicas=2)
        names = [name_of(key, name_key) for key, outcome in zip(keys, outcomes, strict=True) if outcome.stored]
        lost, *rest = rig.names("node")
        rig.victims[lost].remove()
        began = time.monotonic()
        twice = 0
        while twice < len(names) and time.monotonic() - began < REPAIR_S:
            time.sleep(0.1)
            holders = Counter(entry.name for node in rest for entry in rig.entries(node))
            twice = sum(holders[name] >= 2 for name in names)
        self._report.repaired = (len(names), twice)
        self._report.repair_s = time.monotonic() - began
        rig.victims[lost].restore()
        rig.wait_ready()

    def _client(self) -> Client:
        nodes = [self._rig.addresses[name] for name in self._rig.names("node")]
        return Client(nodes, directory=self._rig.directory, local=False, timeout_s=10.0)

    def _scan(self, keys: list[str]) -> int:
        """How many of the keys are there; every byte is checked."""
        found = 0
        with self._client() as client:
            for at in range(0, len(keys), BATCH):
                part = keys[at : at + BATCH]
                buffers = [memoryview(bytearray(size_of(key, self._traffic))) for key in part]
                for key, buffer, got in zip(part, buffers, client.get_many_into(part, buffers), strict=True):
                    if got.outcome is not Outcome.OK:
                        self._report.outcomes[f"audit {got.outcome.name}"] += 1
                        continue
                    found += 1
                    self._report.scanned += 1
                    if buffer != content(key, len(buffer)):
                        self._report.problems.append(f"seed {self._report.seed}: audit: {key} has other bytes")
        return found
