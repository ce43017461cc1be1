"""Settings of nodes and of the directory."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from anabranch.policy.eviction.choice import EvictionName


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`dram_bytes` bounds the arena, `ssd_bytes` the files under `ssd_dir` (0 = no SSD tier); both are hard limits."""

    dram_bytes: Annotated[int, Meta(gt=0, description="Arena of each node, in shared memory.")] = 896 << 20
    ssd_bytes: Annotated[int, Meta(ge=0, description="SSD tier of each node; 0 = none.")] = 4 << 30
    ssd_dir: Annotated[str, Meta(description="Folder of the SSD tier; empty = under `cluster.data_dir`.")] = ""
    listen: Annotated[str, Meta(description="Where a node serves its peers, host:port (0 = any port).")] = "127.0.0.1:0"
    write_queue_bytes: Annotated[
        int, Meta(gt=0, description="Blocks waiting for the SSD; beyond it they are dropped.")
    ] = 256 << 20
    peer_timeout_s: Annotated[float, Meta(gt=0, description="Silence after which a peer counts as gone.")] = 2.0
    lease_s: Annotated[float, Meta(gt=0, description="How long a promise to a peer holds.")] = 10.0
    heartbeat_s: Annotated[float, Meta(gt=0, description="How often a node reports to the directory.")] = 0.5
    eviction: Annotated[
        EvictionName, Meta(description="What leaves a full tier first; docs/eviction.md says when to choose which.")
    ] = "cost"
    recompute_context_tokens: Annotated[
        int,
        Meta(gt=0, description="`cost`: depth at which a block is worth twice as much as an equal one at the start."),
    ] = 4194304


class DirectoryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The directory is soft state: a node that stays silent for `node_ttl_s` is forgotten until it reports again."""

    listen: Annotated[str, Meta(description="host:port; port 0 on one machine = a socket in the run folder.")] = (
        "127.0.0.1:0"
    )
    node_ttl_s: Annotated[float, Meta(gt=0, description="Silence after which a node is forgotten.")] = 2.0
    etcd: Annotated[
        str, Meta(description="etcd://host:port[,…][/cluster]: leadership through etcd; empty = this process alone.")
    ] = ""
    shard: Annotated[int, Meta(ge=0, description="With etcd: which range of keys this process is a candidate for.")] = 0
    shards: Annotated[int, Meta(ge=1, le=256, description="With etcd: into how many ranges the keys are cut.")] = 1
    advertise: Annotated[str, Meta(description="With etcd: host:port where others reach it; empty = as `listen`.")] = ""
    leader_ttl_s: Annotated[
        int, Meta(ge=1, description="With etcd: how long a leader that hangs with its host is waited for.")
    ] = 5
