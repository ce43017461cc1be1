"""The campaign's short form (`make chaos` runs the full one), and proof that it would notice."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from anabranch.cluster.live.chaos import campaign_settings
from anabranch.cluster.live.cluster import LocalCluster
from anabranch.cluster.live.entry import model_info
from anabranch.testing.chaos.judge import judge
from anabranch.testing.chaos.live.campaign import InProcess, run_in_process
from anabranch.testing.chaos.live.dispatch import DirectClient
from anabranch.testing.chaos.live.ledger import Ledger
from anabranch.testing.chaos.live.processes import Blow, Processes, run_processes
from anabranch.testing.chaos.live.rig import Rig, RigConfig
from anabranch.testing.chaos.workload import Workload

pytestmark = pytest.mark.cluster
VICTIMS = ("directory", "prefill-0-node", "decode-1-node", "prefill-1", "decode-0", "gateway")


@pytest.fixture(autouse=True)
def _quick_switches() -> Iterator[None]:
    """Dozens of threads hand over to each other; five milliseconds each time would be most of the test."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(usual)


def test_faults_at_named_steps_never_make_an_answer_wrong() -> None:
    rig = RigConfig(fault_scale=2.0)
    report = run_in_process(InProcess(requests=250, seed=3, trouble_s=0.2, deadline_s=8.0, rig=rig))
    assert report.problems == []
    assert report.census == {}
    assert report.verdicts["right"] > 150
    assert report.scanned > 100
    assert len(report.faults) > 12, "hardly a step was hit"


def test_a_kill_of_each_kind_of_process_costs_no_answer(tmp_path: Path) -> None:
    with LocalCluster(campaign_settings(tmp_path)) as cluster:
        blows = [Blow(process, signal.SIGKILL) for process in VICTIMS]
        plan = Processes(seed=5, blows=blows, concurrency=8, pause_s=0.1)
        report = run_processes(plan, cluster, model_info(cluster.spec))
    assert report.problems == []
    assert report.census == {}
    assert report.verdicts["right"] > 20
    assert all(kill.recovery_s is not None for kill in report.kills)
    assert {why.rpartition(" ")[2] for why in report.lost} <= {"gateway"}


def test_a_single_wrong_byte_is_noticed() -> None:
    with Rig(1, RigConfig(fault_scale=0.0)) as rig:
        asyncio.run(_spoil_a_block(rig))
    assert rig.leftovers() == {}


async def _spoil_a_block(rig: Rig) -> None:
    client = DirectClient(rig.info, rig.addresses, time.monotonic)
    ledger = Ledger(rig.info, client.keys, 1)
    await client.start(4)
    ask = msgspec.structs.replace(Workload(rig.info, 1).next(), fate="finish")
    ledger.add(ask)
    assert judge(ask, await client.put(ask)).verdict == "right"
    assert [problem for node in rig.nodes.values() for problem in ledger.scan(node)] == []
    first = client.keys(ask.tokens, ask.tenant)[0]
    for node in rig.nodes.values():
        slot = node.node.book.pool.get(first)
        if slot is not None:
            node.arena.block(slot)[5] ^= 1
    assert [problem for node in rig.nodes.values() for problem in ledger.scan(node)] != []
    again = msgspec.structs.replace(ask, number=2)
    assert judge(again, await client.put(again)).verdict == "wrong"
    await client.close()
