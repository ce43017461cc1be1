"""Settings of a cluster that is to be tormented: two of each engine, tiny tiers, short patience."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from anabranch.blocks.layout import KvLayout
from anabranch.cluster.live.cluster import tripwire_settings
from anabranch.cluster.settings import Settings
from anabranch.engine.tripwire import tripwire_info
from anabranch.transfer.live.arena import PAGE, RECORD


def campaign_settings(folder: Path, *, slots: int = 96, ssd_slots: int = 200) -> Settings:
    """A 2P2D tripwire cluster under `folder` whose nodes hold `slots` blocks in memory and `ssd_slots` on disk, so that
    every pool is full and eviction, loads and preemption never rest."""
    base = tripwire_settings(folder, prefill=2, decode=2)
    layout: KvLayout = tripwire_info(block_tokens=base.engine.block_tokens).layout
    ssd_slot_bytes = PAGE + -(-layout.full_block_bytes // PAGE) * PAGE
    return replace(
        base,
        node=replace(
            base.node,
            dram_bytes=2 * PAGE + slots * (layout.full_block_bytes + RECORD.size),
            ssd_bytes=ssd_slots * ssd_slot_bytes,
        ),
        engine=replace(
            base.engine, step_tokens=256, max_running=24, spare_slots=4, load_timeout_s=3.0, handoff_timeout_s=10.0
        ),
        gateway=replace(base.gateway, retries=3),
    )
