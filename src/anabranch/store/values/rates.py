"""From two reports of a store to what happens in it per second."""

from __future__ import annotations

import msgspec

from anabranch.store.messages import Stat
from anabranch.store.metrics import by, total
from anabranch.store.values.report import NodeReport, StoreReport

TIERS = ("dram", "ssd", "backing")


class NodeRates(msgspec.Struct, frozen=True, kw_only=True):
    """`bytes_in`, `bytes_out`, `gets`, `puts`, `evicted`: per second. `shares`: of these gets, by tier and "miss"."""

    node_id: str
    address: str
    problem: str = ""
    accepts: bool = True
    stat: Stat | None = None
    used_bytes: int = 0
    total_bytes: int = 0
    ssd_bytes: int = 0
    queue_bytes: int = 0
    leases: int = 0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    gets: float = 0.0
    puts: float = 0.0
    evicted: float = 0.0
    shares: dict[str, float] = {}


class TenantRates(msgspec.Struct, frozen=True, kw_only=True):
    """Per second, over all nodes. `hits`: share of its gets that were found."""

    tenant: str
    bytes_in: float
    bytes_out: float
    gets: float
    puts: float
    hits: float


class StoreRates(msgspec.Struct, frozen=True, kw_only=True):
    """`keys`: as the directory counts them; of nodes without one, or if it does not answer, the values that each has.
    `problems`: of directories that do not answer."""

    keys: float
    problems: list[str] = []
    bytes_in: float
    bytes_out: float
    nodes: list[NodeRates]
    tenants: list[TenantRates]


def rates(before: StoreReport, after: StoreReport, seconds: float) -> StoreRates:
    """What happened between two reports, `seconds` apart. A node that is new or was restarted counts from zero."""
    earlier = {node.address: node.stat for node in before.nodes}
    pairs = [(node, earlier.get(node.address)) for node in after.nodes]
    nodes = [_node(node, old, seconds) for node, old in pairs]
    changes = [(old, node.stat) for node, old in pairs if node.stat is not None]
    return StoreRates(
        keys=_keys(after),
        problems=[f"directory {part.address}: {part.problem}" for part in after.directories if part.problem],
        bytes_in=sum(node.bytes_in for node in nodes),
        bytes_out=sum(node.bytes_out for node in nodes),
        nodes=nodes,
        tenants=_tenants(changes, seconds),
    )


def _keys(report: StoreReport) -> float:
    directories = [part.stat for part in report.directories if part.stat is not None]
    if directories:
        return sum(total(stat, "keys") for stat in directories)
    stats = [node.stat for node in report.nodes if node.stat is not None]
    return sum(max(total(stat, "values"), total(stat, "ssd_values")) for stat in stats)


def _node(node: NodeReport, old: Stat | None, seconds: float) -> NodeRates:
    stat = node.stat
    if stat is None:
        return NodeRates(node_id=node.node_id, address=node.address, problem=node.problem, accepts=node.accepts)
    gets = _growth(old, stat, "items", call="get")
    hits = {tier: _growth(old, stat, "items", call="get", outcome="ok", tier=tier) for tier in TIERS}
    shares = {tier: count / gets for tier, count in hits.items()} if gets else {}
    if gets:
        shares["miss"] = 1.0 - _growth(old, stat, "items", call="get", outcome="ok") / gets
    return NodeRates(
        node_id=node.node_id,
        address=node.address,
        accepts=node.accepts,
        stat=stat,
        used_bytes=int(total(stat, "used_bytes")),
        total_bytes=int(total(stat, "capacity_bytes")),
        ssd_bytes=int(total(stat, "ssd_used_bytes")),
        queue_bytes=int(total(stat, "writes_waiting_bytes")),
        leases=int(total(stat, "leases")),
        bytes_in=_growth(old, stat, "bytes", call="put") / seconds,
        bytes_out=_growth(old, stat, "bytes", call="get") / seconds,
        gets=gets / seconds,
        puts=_growth(old, stat, "items", call="put") / seconds,
        evicted=_growth(old, stat, "evicted") / seconds,
        shares=shares,
    )


def _tenants(changes: list[tuple[Stat | None, Stat]], seconds: float) -> list[TenantRates]:
    """Busiest first; those at rest are left out."""
    names = {tenant for _, stat in changes for tenant in by(stat, "asked", "tenant")}
    found = []
    for tenant in sorted(names):

        def growth(name: str, tenant: str = tenant, **labels: str) -> float:
            return sum(_growth(old, stat, name, tenant=tenant, **labels) for old, stat in changes)

        gets, puts = growth("items", call="get"), growth("items", call="put")
        if gets or puts:
            found.append(
                TenantRates(
                    tenant=tenant,
                    bytes_in=growth("bytes", call="put") / seconds,
                    bytes_out=growth("bytes", call="get") / seconds,
                    gets=gets / seconds,
                    puts=puts / seconds,
                    hits=growth("items", call="get", outcome="ok") / gets if gets else 0.0,
                )
            )
    return sorted(found, key=lambda row: -(row.bytes_in + row.bytes_out))


def _growth(old: Stat | None, new: Stat, name: str, **labels: str) -> float:
    now = total(new, name, **labels)
    then = total(old, name, **labels) if old is not None else 0.0
    return now - then if now >= then else now
