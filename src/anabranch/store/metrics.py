"""What a node's or directory's Stat means to Prometheus: names, units, help. The sums are those of `values.ledger`:

    asked_total{call="get"} = Σ items_total{call="get"} over outcome and tier + requests under way

A count that has no entry here is exported as well, under its own name: nothing that is counted stays hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from anabranch.store.messages import Stat
from anabranch.store.values.ledger import parse

Role = Literal["node", "directory"]


class Sample(msgspec.Struct, frozen=True):
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True):
    """`name` without the `_total` of counters."""

    name: str
    kind: Literal["counter", "gauge", "info"]
    help: str
    samples: list[Sample]


HELP = {
    "asked": "Items that callers asked for, by call and tenant. Equals items_total over all outcomes once answered.",
    "items": "Items whose outcome is known, by call, tenant, outcome and (gets that are ok) the tier they came from.",
    "bytes": "Bytes of items that went to callers (get) or came from them (put), by call, tenant and tier.",
    "bytes_in": "Bytes of values received on lanes, those of other nodes included.",
    "bytes_out": "Bytes of values sent on lanes, those to other nodes included.",
    "put_bytes": "Bytes of values stored.",
    "evicted": "Values that left DRAM to make room.",
    "evicted_bytes": "Bytes of values that left DRAM to make room.",
    "evicted_for_quota": "Values that left DRAM because their tenant had used up its quota.",
    "moved": "Values moved within the arena to join holes.",
    "callers_denied": "Callers that were not let in.",
    "damaged": "Copies dropped because a checksum did not match.",
    "damaged_slices": "Slices that arrived with a wrong checksum.",
    "adopted": "Values found in memory that a former process had left.",
    "loaded_from_ssd": "Values brought back to DRAM from the SSD tier.",
    "loaded_from_backing": "Values brought to DRAM from the backing store.",
    "load_failed": "Values that a lower tier has and could not deliver.",
    "load_no_room": "Values that found no room in DRAM on their way back.",
    "puts_abandoned": "Puts that ended before all of their bytes had come.",
    "joins": "Introductions of nodes.",
    "lookups": "Look-ups of prefixes.",
    "wheres": "Look-ups of values.",
    "gaps": "Announcements that were missed and asked for again.",
    "resyncs": "Nodes asked to announce everything again.",
    "given_up": "Nodes that were forgotten after their silence.",
    "keys": "Keys in the directory's table.",
    "table_bytes": "Memory of the directory's table.",
    "values": "Values in DRAM.",
    "used_bytes": "Bytes of the arena that hold values.",
    "free_bytes": "Bytes of the arena that hold nothing.",
    "capacity_bytes": "Bytes of the arena.",
    "held_bytes": "Bytes of values that cannot leave now: leased, pinned, or on their way.",
    "reserved_bytes": "Bytes of puts under way.",
    "ssd_values": "Values on the SSD tier.",
    "ssd_used_bytes": "Bytes of the SSD tier's files.",
    "leases": "Leases that readers hold now.",
    "pins": "Pinned values.",
    "puts": "Puts under way.",
    "loads": "Reads of lower tiers under way.",
    "waiting": "Puts waiting for room.",
    "writes_waiting": "Values waiting for the SSD or the backing store.",
    "writes_waiting_bytes": "Bytes waiting for the SSD or the backing store.",
    "lanes": "Open connections of clients and other nodes.",
    "sessions": "Clients and other nodes connected.",
    "threads": "Threads that serve lanes.",
    "to_verify": "Values that the last `store verify` reads.",
    "verified": "Values that the last `store verify` has read.",
    "handed_over": "Values given to other nodes on the way out.",
    "unreclaimed": "Invalidated values whose memory is still to be freed.",
    "alone": "1: the node has no directory, nobody else could take what it holds.",
    "links": "Open connections.",
    "members": "Nodes that the directory listens to.",
}
# Counted as they grow and shrink: levels, although they travel among the counters.
_LEVELS = frozenset({"keys", "table_bytes"})
_SANE = re.compile(r"[^a-zA-Z0-9_]")


def families(stat: Stat, role: Role) -> list[Family]:
    """Every figure of a Stat, sorted by name. Every sample is labelled with the process's name."""
    own: dict[str, str] = {role: stat.name}
    found: dict[str, Family] = {}
    for key, value in sorted(stat.counters.items()):
        name, labels = parse(key)
        _add(found, role, name, "gauge" if name in _LEVELS else "counter", Sample({**own, **labels}, value))
    for key, count in sorted(stat.census.items()):
        name, labels = parse(key)
        _add(found, role, name, "gauge", Sample({**own, **labels}, float(count)))
    for key, text in sorted(stat.state.items()):
        _add(found, role, f"{key}_state", "info", Sample({**own, "value": text}, 1.0))
    return [found[name] for name in sorted(found)]


def total(stat: Stat, name: str, **labels: str) -> float:
    """The sum of a counter or level over all of its labels but the given ones."""
    wanted = labels.items()
    figures: Iterable[tuple[str, float]] = (*stat.counters.items(), *stat.census.items())
    return sum(value for key, value in figures if (parsed := parse(key))[0] == name and wanted <= parsed[1].items())


def by(stat: Stat, name: str, label: str, **labels: str) -> dict[str, float]:
    """The sums of a counter for each value of one label."""
    sums: dict[str, float] = {}
    for key, value in (*stat.counters.items(), *stat.census.items()):
        own, found = parse(key)
        if own == name and label in found and labels.items() <= found.items():
            sums[found[label]] = sums.get(found[label], 0.0) + value
    return sums


def _add(
    found: dict[str, Family], role: Role, name: str, kind: Literal["counter", "gauge", "info"], one: Sample
) -> None:
    full = f"anabranch_{role}_{_SANE.sub('_', name)}"
    if full in found and found[full].kind != kind:
        full += "_now"
    if full not in found:
        text = HELP.get(name, name.replace("_", " ").replace(".", " ").capitalize() + ".")
        found[full] = Family(full, kind, text, [])
    found[full].samples.append(one)
