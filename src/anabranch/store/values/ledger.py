"""What a node counts about the items of its callers, such that the counts add up.

Every item of a request is counted once when it is asked for and once when its outcome is known:

    asked{call,tenant} = Σ items{call,tenant,outcome,tier} over outcome and tier + items of requests under way

so gets = ok in dram + ok in ssd + ok in backing + missing + unknown + stale + damaged + too_big + denied + unreachable.
A counter's key may carry labels, as `labelled` makes it and `parse` reads it (`store.values.metrics`).
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Literal

from anabranch.store.values.outcome import Outcome

Call = Literal["get", "put", "exists", "remove", "pin", "prefetch"]
MOST_TENANTS = 100
"""Tenants that are counted by name; others share the name OTHERS."""
OTHERS = "(others)"


class Ledger:
    """Not thread-safe: its owner counts under the lock that it holds anyway."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._tenants: set[str] = set()

    def asked(self, call: Call, tenant: str, items: int) -> None:
        self.counters[_asked(call, self._named(tenant))] += items

    def answered(self, call: Call, tenant: str, outcome: int, tier: str = "", *, items: int = 1, size: int = 0) -> None:
        """`tier`: where an OK item of a get was found; `size`: bytes of these items that went to or came from the
        caller."""
        tenant = self._named(tenant)
        self.counters[_item(call, outcome, tenant, tier)] += items
        if size:
            self.counters[labelled("bytes", call=call, tenant=tenant, tier=tier)] += size

    def carried(self, call: Call, tenant: str, size: int) -> None:
        """Bytes of items that were counted without theirs."""
        if size:
            self.counters[labelled("bytes", call=call, tenant=self._named(tenant))] += size

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
    return _key(name, tuple(sorted((label, value) for label, value in labels.items() if value)))


def parse(key: str) -> tuple[str, dict[str, str]]:
    """Name and labels of a counter's key."""
    name, brace, rest = key.partition("{")
    if not brace:
        return name, {}
    labels: dict[str, str] = {}
    for part in rest[:-1].split("\x1f"):
        label, _, value = part.partition("=")
        labels[label] = value
    return name, labels


@lru_cache(maxsize=4096)
def _key(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    # A tenant's name may hold anything printable, so what is between the labels is not.
    inside = "\x1f".join(f"{label}={value}" for label, value in labels)
    return f"{name}{{{inside}}}" if inside else name


@lru_cache(maxsize=4096)
def _asked(call: str, tenant: str) -> str:
    return labelled("asked", call=call, tenant=tenant)


@lru_cache(maxsize=4096)
def _item(call: str, outcome: int, tenant: str, tier: str) -> str:
    return labelled("items", call=call, outcome=Outcome(outcome).name.lower(), tenant=tenant, tier=tier)
