"""Settings of a store node, of what protects it, and of the namespaces it keeps."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from anabranch.policy.eviction.choice import EvictionName


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`dram_bytes` bounds the arena, `ssd_bytes` the files under `ssd_dir` (0 = no SSD tier); both are hard limits."""

    dram_bytes: Annotated[int, Meta(gt=0, description="Arena, in shared memory.")] = 1 << 30
    ssd_bytes: Annotated[int, Meta(ge=0, description="SSD tier; 0 = none.")] = 0
    ssd_dir: Annotated[str, Meta(description="Folder of the SSD tier; empty = under the node's data folder.")] = ""
    backing: Annotated[str, Meta(description="Shared tier: a folder, or s3://bucket/prefix; empty = none.")] = ""
    listen: Annotated[
        str,
        Meta(description="Where clients and other nodes connect: host:port (of several NICs: host:port+host:port)."),
    ] = "127.0.0.1:7070"
    advertise: Annotated[
        str, Meta(description="Where others reach it, host:port; empty = as `listen` (0.0.0.0: this host's name).")
    ] = ""
    directory: Annotated[
        str, Meta(description="Directory shards, host:port, comma-separated, or etcd://host:port; empty = alone.")
    ] = ""
    eviction: Annotated[EvictionName, Meta(description="What leaves a full arena first.")] = "cost"
    lease_s: Annotated[float, Meta(gt=0, description="How long a promise to a reader holds.")] = 10.0
    max_pin_s: Annotated[float, Meta(gt=0, description="Longest pin.")] = 3600.0
    heartbeat_s: Annotated[float, Meta(gt=0, description="How often the node reports to the directory.")] = 0.5


class WriteConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The disciplined way to the SSD and to other nodes."""

    admission: Annotated[
        str, Meta(description="What goes to the SSD: `second-use`, `all`, or `evicted` (on its way out of DRAM).")
    ] = "second-use"
    queue_bytes: Annotated[int, Meta(gt=0, description="Bytes waiting for the SSD; beyond it they are dropped.")] = (
        256 << 20
    )
    queue_age_s: Annotated[float, Meta(gt=0, description="Age at which a waiting write is dropped.")] = 30.0
    replicas: Annotated[int, Meta(ge=1, le=4, description="Nodes that hold each value, unless the put says more.")] = 1
    hot_reads: Annotated[
        int,
        Meta(ge=0, description="Remote reads of a value within a minute that copy it to the reader's node; 0 = never."),
    ] = 2


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Needed as soon as anything listens beyond loopback: a cluster secret, or mutual TLS."""

    secret_file: Annotated[str, Meta(description="Cluster secret: a file with at least 32 bytes, mode 0600.")] = ""
    tenants_file: Annotated[str, Meta(description="Tenants: TOML with secret, quota_bytes, encrypt for each.")] = ""
    keys_dir: Annotated[
        str,
        Meta(description="Keys of encrypted tenants, wrapped with the cluster secret; all nodes of a store share it."),
    ] = ""
    tls_cert: Annotated[str, Meta(description="This process's certificate chain, PEM.")] = ""
    tls_key: Annotated[str, Meta(description="Its private key, PEM, mode 0600.")] = ""
    tls_ca: Annotated[str, Meta(description="Who signs the other side's certificate, PEM.")] = ""


class LinkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The host's links: which NICs there are, how fast each is used, and whether packets carry their traffic class."""

    topology: Annotated[
        str, Meta(description="TOML file that lists the host's NICs; empty = one, chosen by the kernel.")
    ] = ""
    rate_bytes: Annotated[
        int, Meta(ge=0, description="Bytes a second that are sent over each NIC at most; 0 = as fast as it goes.")
    ] = 0
    marks: Annotated[
        bool,
        Meta(description="Mark packets with their traffic class (SO_PRIORITY and DSCP), for NIC and switch queues."),
    ] = False
