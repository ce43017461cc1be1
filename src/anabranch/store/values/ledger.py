"""What a node counts about the items of its callers, such that the counts add up.

Every item of a request is counted once when it is asked for and once when its outcome is known:

    asked{call,tenant} = Σ items{call,tenant,outcome,tier} over outcome and tier + items of requests under way

so gets = ok in dram + ok in ssd + ok in backing + missing + unknown + stale + damaged + too_big + denied + unreachable.
A counter's key may carry labels, as `labelled` makes it and `parse` reads it (`store.values.metrics`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Literal
from urllib.parse import quote, unquote

from anabranch.store.values.outcome import Outcome

Call = Literal["get", "put", "exists", "remove", "pin", "prefetch"]
MOST_TENANTS = 100
"""Tenants that are counted by name; others share the name OTHERS."""
OTHERS = "(others)"
_PLAIN = "()/@: "
"""Beside letters, digits and _.-~, what a tenant's name may show as it is."""


class Ledger:
    """Not thread-safe: its owner counts under the lock that it holds anyway, which is why counting is a dictionary's
    addition and names are made when somebody asks."""

    def __init__(self) -> None:
        self._asked: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._items: defaultdict[tuple[str, str, int, str], int] = defaultdict(int)
        self._bytes: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._tenants: set[str] = set()

    @property
    def counters(self) -> dict[str, int]:
        """A copy, by key."""
        found = {labelled("asked", call=call, tenant=tenant): count for (call, tenant), count in self._asked.items()}
        for (call, tenant, outcome, tier), count in self._items.items():
            word = Outcome(outcome).name.lower()
            found[labelled("items", call=call, outcome=word, tenant=tenant, tier=tier)] = count
        for (call, tenant, tier), count in self._bytes.items():
            found[labelled("bytes", call=call, tenant=tenant, tier=tier)] = count
        return found

    def asked(self, call: Call, tenant: str, items: int) -> None:
        self._asked[call, self._named(tenant)] += items

    def answered(self, call: Call, tenant: str, outcome: int, tier: str = "", *, items: int = 1, size: int = 0) -> None:
        """`tier`: where an OK item of a get was found; `size`: bytes of these items that went to or came from the
        caller."""
        tenant = self._named(tenant)
        self._items[call, tenant, outcome, tier] += items
        if size:
            self._bytes[call, tenant, tier] += size

    def carried(self, call: Call, tenant: str, size: int) -> None:
        """Bytes of items that were counted without theirs."""
        if size:
            self._bytes[call, self._named(tenant), ""] += size

    def answered_all(self, call: Call, tenant: str, outcomes: bytes) -> None:
        """A batch whose items have no tier or size of their own."""
        if len(outcomes) == 1:
            self.answered(call, tenant, outcomes[0])
            return
        for outcome, items in Counter(outcomes).items():
            self.answered(call, tenant, outcome, items=items)

    def _named(self, tenant: str) -> str:
        if tenant in self._tenants:
            return tenant
        if len(self._tenants) >= MOST_TENANTS:
            return OTHERS
        self._tenants.add(tenant)
        return tenant


def labelled(name: str, **labels: str) -> str:
    """The key of a counter with labels; empty labels are left out."""
    inside = ",".join(f"{label}={quote(value, safe=_PLAIN)}" for label, value in sorted(labels.items()) if value)
    return f"{name}{{{inside}}}" if inside else name


def parse(key: str) -> tuple[str, dict[str, str]]:
    """Name and labels of a counter's key."""
    name, brace, rest = key.partition("{")
    if not brace:
        return name, {}
    labels: dict[str, str] = {}
    for part in rest[:-1].split(","):
        label, _, value = part.partition("=")
        labels[label] = unquote(value)
    return name, labels
