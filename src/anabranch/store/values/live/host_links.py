"""A host's links as its settings describe them."""

from __future__ import annotations

from anabranch.store.values.config import LinkConfig
from anabranch.transfer.live.rails import Links, load_topology


def links_of(config: LinkConfig) -> Links:
    """Raises ConfigError if the topology file cannot be used."""
    return Links(load_topology(config.topology), rate_bytes=config.rate_bytes, marks=config.marks)
