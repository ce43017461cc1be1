"""Which eviction policy a configuration means."""

from __future__ import annotations

from typing import Literal

from anabranch.policy.eviction.contract import EvictionPolicy
from anabranch.policy.eviction.cost import CostAware
from anabranch.policy.eviction.lru import Lru
from anabranch.policy.eviction.s3fifo import S3Fifo

EvictionName = Literal["lru", "s3fifo", "cost"]
EVICTION_NAMES: tuple[EvictionName, ...] = ("lru", "s3fifo", "cost")


def eviction_policy(name: EvictionName, slots: int, context_blocks: float) -> EvictionPolicy:
    """A fresh policy for one pool of `slots` slots. `context_blocks`: depth, in blocks, at which a block takes twice as
    long to compute as the first."""
    if name == "lru":
        return Lru()
    if name == "s3fifo":
        return S3Fifo(slots)
    return CostAware(slots, context_blocks)
