"""What a killed node process left in the arena, as far as it can be trusted."""

from __future__ import annotations

from collections import Counter

import msgspec

from anabranch.store.actions import Recovered
from anabranch.store.live.process import is_gone
from anabranch.store.live.sealer import slot_sum
from anabranch.transfer.live.arena import Arena
from anabranch.transfer.records import COMMITTED, FREE, SlotRecord


def recovered(arena: Arena, counters: Counter[str]) -> Recovered:
    """Every committed block is verified before anyone can find it; a bad one loses its name (block_sum 0)."""
    records: dict[int, SlotRecord] = {}
    for slot in range(arena.slots):
        record = arena.record(slot)
        if record.state == COMMITTED and record.block_sum != slot_sum(arena, slot):
            counters["integrity_errors"] += record.block_sum != 0
            record = msgspec.structs.replace(record, block_sum=0)
        if record.state != FREE:
            records[slot] = record
    alive = [s for s in arena.sessions if not is_gone(s.pid, s.started)]
    return Recovered(records, alive)
