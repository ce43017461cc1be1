"""Settings of nodes and of the directory."""

from __future__ import annotations

import msgspec


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`dram_bytes` bounds the arena, `ssd_bytes` the files under `ssd_dir` (0 = no SSD tier); both are hard limits."""

    dram_bytes: int = 512 << 20
    ssd_bytes: int = 4 << 30
    ssd_dir: str = ""
    listen: str = "127.0.0.1:0"
    write_queue_bytes: int = 256 << 20
    peer_timeout_s: float = 2.0
    lease_s: float = 10.0
    heartbeat_s: float = 0.5


class DirectoryConfig(msgspec.Struct, frozen=True, kw_only=True):
    listen: str = "127.0.0.1:0"
    node_ttl_s: float = 2.0
