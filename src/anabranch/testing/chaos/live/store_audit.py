"""After the storm: is anything left behind, is everything there that was promised, and are all bytes right?"""

from __future__ import annotations

import signal
import time
from collections import Counter

from anabranch.core.errors import AnabranchError
from anabranch.store.values.live.client import Client
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import Scope, name_of
from anabranch.testing.chaos.live.store_rig import StoreRig
from anabranch.testing.chaos.store_oracle import POOLS, Traffic, content, key_of, size_of
from anabranch.testing.chaos.store_report import CampaignReport

QUIET_S = 20.0
REPAIR_S = 20.0
BATCH = 32


class Audit:
    """`stored`: keys of the pools `pair` and `durable` that were acknowledged."""

    def __init__(self, rig: StoreRig, report: CampaignReport, traffic: Traffic, stored: set[str]) -> None:
        self._rig = rig
        self._report = report
        self._traffic = traffic
        self._stored = stored

    def run(self) -> None:
        self._rest()
        self._pairs()
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
                census = self._rig.stat(name).census
            except AnabranchError as error:
                return {f"{name}: {error}": 1}
            self._report.census.update({f"{name}.{what}": count for what, count in census.items()})
            for what in ("leases", "open_puts", "puts", "pins", "waiting"):
                if census.get(what):
                    held[f"{name}.{what}"] = census[what]
        return held

    def _pairs(self) -> None:
        """What was acknowledged with two copies and is still there has two again."""
        wanted = [key for key in self._stored if key.startswith("pair/")]
        name_key = Scope("default").name_key(self._rig.salt())
        names = [name_of(key, name_key) for key in wanted]
        end = time.monotonic() + REPAIR_S
        while True:
            holders: Counter[bytes] = Counter()
            for node in self._rig.names("node"):
                holders.update({entry.name for entry in self._rig.entries(node)})
            there = [name for name in names if holders[name]]
            twice = sum(holders[name] >= 2 for name in there)
            if twice == len(there) or time.monotonic() >= end:
                break
            time.sleep(0.25)
        self._report.pairs = (len(there), twice)

    def _scan(self, keys: list[str]) -> int:
        """How many of the keys are there; every byte is checked."""
        found = 0
        nodes = [self._rig.addresses[name] for name in self._rig.names("node")]
        with Client(nodes, directory=self._rig.directory, local=False, timeout_s=10.0) as client:
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
