"""The store campaign's short form (`make chaos-store` runs the full one), and proof that it would notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.testing.chaos.live import store_campaign
from anabranch.testing.chaos.live.store_campaign import Blow, StorePlan, random_blows, run_store_campaign
from anabranch.testing.chaos.live.store_rig import RigConfig
from anabranch.testing.chaos.store_oracle import Calls, Traffic, Versions, content, size_of, worst

pytestmark = pytest.mark.cluster
SMALL = RigConfig(
    callers=2, threads=1, dram_bytes=16 << 20, ssd_bytes=256 << 20, lease_s=1.0, rest_s=0.005,
    traffic=Traffic(keys=60, own=10, largest=300_000),
)  # fmt: skip
BLOWS = [
    Blow("node-0", "kill"),
    Blow("directory-0", "kill"),
    Blow("node-1", "stop", 0.3),
    Blow("caller-0", "kill"),
    Blow("node-2", "restart"),
]


def test_blows_to_every_kind_of_process_cost_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_campaign, "random_blows", lambda victims, count, seed: BLOWS)
    report = run_store_campaign(StorePlan(seed=11, blows=len(BLOWS), rig=SMALL, pause_s=0.1, repair=False), tmp_path)
    assert report.problems == []
    assert report.leaked == {}
    assert report.wrong == report.total("stale") == 0
    assert len(report.recoveries()) == len(BLOWS)
    asked, found = report.durable
    assert found >= 0.99 * asked > 5
    assert report.total("ok") > 100


def test_calls_and_blows_follow_from_the_seed() -> None:
    def first(seed: int) -> list[object]:
        calls = Calls(seed, Traffic(), "own")
        return [calls.next() for _ in range(50)]

    assert first(3) == first(3) != first(4)
    victims = ["node-0", "node-1", "directory-0"]
    blows = random_blows(victims, 30, 5)
    assert blows == random_blows(victims, 30, 5)
    assert {blow.victim for blow in blows} == set(victims)
    assert {blow.kind for blow in blows} == {"kill", "stop", "restart"}


def test_content_follows_from_key_and_version() -> None:
    traffic = Traffic(smallest=1, largest=1000)
    sizes = [size_of(f"shared/{number}", traffic) for number in range(500)]
    assert min(sizes) >= 1
    assert max(sizes) <= 1000
    assert content("a", 100) == content("a", 100)
    assert len({content("a", 100), content("b", 100), content("a", 100, 1)}) == 3


def test_a_wrong_byte_and_a_value_that_must_be_gone_are_told_apart() -> None:
    versions = Versions()
    versions.may_be_there("k")
    old = content("k", 50)
    assert versions.judge("k", 50, old) == "ok"
    assert versions.judge("k", 50, old[:-1] + bytes([old[-1] ^ 1])) == "wrong"
    versions.removed("k", confirmed=False)
    versions.may_be_there("k")
    assert versions.judge("k", 50, old) == "ok"
    versions.removed("k", confirmed=True)
    assert versions.judge("k", 50, old) == "stale"
    assert versions.judge("k", 50, content("k", 50, 1)) == "stale"
    versions.may_be_there("k")
    assert versions.judge("k", 50, content("k", 50, 2)) == "ok"
    assert worst(["ok", "stale", "miss"]) == "stale"
