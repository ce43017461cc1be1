"""Figures of a node: they add up, each once, and every one has a name and a help text."""

from __future__ import annotations

import pytest

from anabranch.store.messages import Stat
from anabranch.store.metrics import HELP, by, families, total
from anabranch.store.values.ledger import MOST_TENANTS, OTHERS, Ledger, labelled, parse
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.rates import rates
from anabranch.store.values.report import DirectoryReport, NodeReport, StoreReport


def counted() -> Ledger:
    ledger = Ledger()
    ledger.asked("get", "a", 10)
    ledger.answered("get", "a", Outcome.OK, "dram", items=3, size=300)
    ledger.answered("get", "a", Outcome.OK, "ssd", items=2, size=20)
    ledger.answered_all("get", "a", bytes([Outcome.MISSING] * 4 + [Outcome.STALE]))
    ledger.asked("put", "b", 2)
    ledger.answered_all("put", "b", bytes([Outcome.OK, Outcome.FULL]))
    ledger.carried("put", "b", 7)
    ledger.carried("put", "b", 0)
    return ledger


def stat(ledger: Ledger, **census: int) -> Stat:
    return Stat(name="n1", census=census, counters=dict(ledger.counters))


def test_what_was_asked_is_what_was_answered() -> None:
    figures = stat(counted())
    for call in ("get", "put"):
        assert total(figures, "asked", call=call) == total(figures, "items", call=call)
    assert by(figures, "items", "outcome", call="get") == {"ok": 5, "missing": 4, "stale": 1}
    assert by(figures, "items", "tier", call="get") == {"dram": 3, "ssd": 2}
    assert by(figures, "bytes", "call") == {"get": 320, "put": 7}
    assert total(figures, "items", tenant="b") == 2


def test_tenants_beyond_the_most_share_a_name() -> None:
    ledger = Ledger()
    for number in range(MOST_TENANTS + 5):
        ledger.asked("get", f"t{number}", 1)
    ledger.asked("get", "t0", 1)
    names = by(stat(ledger), "asked", "tenant")
    assert len(names) == MOST_TENANTS + 1
    assert (names["t0"], names[OTHERS]) == (2, 5)


@pytest.mark.parametrize("tenant", ["a", "x=y", "{a,b}", 'quo"te', "ü", ""])
def test_a_labelled_key_is_read_back(tenant: str) -> None:
    key = labelled("items", call="get", tenant=tenant)
    assert parse(key) == ("items", {"call": "get", **({"tenant": tenant} if tenant else {})})
    assert parse("evicted") == ("evicted", {})


def test_families_have_kinds_units_and_help() -> None:
    figures = Stat(
        name="n1",
        census={"used_bytes": 5, "new-thing": 1},
        counters={**counted().counters, "evicted": 2.0, "keys": 9.0},
        state={"ssd": "full"},
    )
    found = {family.name: family for family in families(figures, "node")}
    assert found["anabranch_node_items"].kind == "counter"
    assert found["anabranch_node_items"].help == HELP["items"]
    assert found["anabranch_node_used_bytes"].kind == "gauge"
    assert found["anabranch_node_keys"].kind == "gauge"
    assert found["anabranch_node_new_thing"].help == "New-thing."
    assert found["anabranch_node_ssd_state"].samples[0].labels == {"node": "n1", "value": "full"}
    assert all(sample.labels["node"] == "n1" for family in found.values() for sample in family.samples)
    assert list(found) == sorted(found)


def test_a_level_and_a_count_of_one_name_stay_apart() -> None:
    figures = Stat(name="d", census={"puts": 1}, counters={"puts": 7.0})
    found = {family.name: family.samples[0].value for family in families(figures, "directory")}
    assert found == {"anabranch_directory_puts": 7.0, "anabranch_directory_puts_now": 1.0}


def test_the_page_is_what_prometheus_reads() -> None:
    client = pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from anabranch.store.live.metrics_server import _Collector

    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(_Collector("node", lambda: stat(counted(), used_bytes=5)))
    page = client.generate_latest(registry).decode()
    read = {family.name: family for family in text_string_to_metric_families(page)}
    items = [s for s in read["anabranch_node_items"].samples if s.labels["call"] == "get"]
    asked = [s for s in read["anabranch_node_asked"].samples if s.labels["call"] == "get"]
    assert sum(s.value for s in items) == sum(s.value for s in asked) == 10
    assert all(family.documentation for family in read.values())


def test_rates() -> None:
    first, second = counted(), counted()
    second.asked("get", "a", 4)
    second.answered("get", "a", Outcome.OK, "dram", items=3, size=3000)
    second.answered("get", "a", Outcome.MISSING)
    second.carried("put", "b", 100)
    before = StoreReport([], [NodeReport("n1", "h:1", True, stat(first))])
    after = StoreReport(
        [DirectoryReport("d:1", Stat(name="directory", census={}, counters={"keys": 8.0}))],
        [NodeReport("n1", "h:1", True, stat(second, used_bytes=5)), NodeReport("n2", "h:2", True, None, "gone")],
    )
    seen = rates(before, after, 2.0)
    one, two = seen.nodes
    assert (one.gets, one.bytes_out, one.bytes_in, one.used_bytes) == (2.0, 1500.0, 50.0, 5)
    assert one.shares == {"dram": 0.75, "ssd": 0.0, "backing": 0.0, "miss": 0.25}
    assert two.problem == "gone"
    assert (seen.keys, seen.bytes_out) == (8.0, 1500.0)
    assert [(row.tenant, row.gets, row.hits) for row in seen.tenants] == [("a", 2.0, 0.75)]
    # Whoever was restarted counts from zero.
    assert rates(after, before, 1.0).nodes[0].gets == 10.0
