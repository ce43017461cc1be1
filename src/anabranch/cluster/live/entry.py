"""What each process of a cluster runs: from the spec to the component's own main.

The components do not know the spec; here their arguments are taken from it. Each function returns when its process is
asked to stop (SIGTERM). The optional extras are imported by the process that needs them.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from anabranch.cluster.local import is_synthetic
from anabranch.cluster.spec import ClusterSpec, Member
from anabranch.core.errors import ConfigError
from anabranch.engine.runner import ModelInfo, ModelRunner


def member_of(spec: ClusterSpec, engine_id: str) -> Member:
    """Raises ConfigError naming the members there are."""
    for member in spec.members:
        if member.engine_id == engine_id:
            return member
    known = ", ".join(member.engine_id for member in spec.members)
    raise ConfigError(f"--id {engine_id}: no such member; this cluster has {known}")


def model_info(spec: ClusterSpec) -> ModelInfo:
    """What node, engine and gateway must agree on about the model."""
    if is_synthetic(spec.model):
        from anabranch.engine.tripwire import tripwire_info

        return tripwire_info(block_tokens=spec.engine.block_tokens, name=spec.model.source)
    from anabranch.engine.live.model_files import load_model_info

    return load_model_info(Path(spec.model.prepared), spec.model.kv_dtype, spec.engine.block_tokens)


def served_name(spec: ClusterSpec) -> str:
    """What clients call the model."""
    return spec.model.served_name or model_info(spec).name


def run_directory(spec: ClusterSpec) -> None:
    from anabranch.store.live.directory_server import run_directory as run

    run(msgspec.structs.replace(spec.directory, listen=spec.directory_address))


def run_node(spec: ClusterSpec, engine_id: str) -> None:
    from anabranch.store.live.node_server import run_node as run

    member = member_of(spec, engine_id)
    run(
        engine_id,
        model_info(spec).layout,
        msgspec.structs.replace(spec.node, ssd_dir=member.ssd_dir),
        unix_address=member.node_address,
        arena_path=member.arena_path,
        directory_address=spec.directory_address,
    )


def run_gateway(spec: ClusterSpec) -> None:
    from anabranch.serving.live.server import run_gateway as run

    run(
        spec.gateway,
        model_info(spec),
        engines=[member.engine_address for member in spec.members],
        # Tenants' block names must stay the same for as long as the SSD tier lives.
        secret_dir=Path(spec.members[0].ssd_dir).parent,
        prepared=spec.model.prepared,
        served_name=spec.model.served_name,
    )


def run_engine(spec: ClusterSpec, engine_id: str) -> None:
    from anabranch.connectors.native import NativePort
    from anabranch.engine.live.server import run_engine as run

    member, info = member_of(spec, engine_id), model_info(spec)
    run(
        engine_id=engine_id,
        role=member.role,
        address=member.engine_address,
        config=spec.engine,
        info=info,
        identity=info.digest,
        port_factory=lambda sink: NativePort(member.node_address, info.layout, sink),
        runner_factory=lambda memory: _runner(spec, info, memory),
        served_name=served_name(spec),
    )


def _runner(spec: ClusterSpec, info: ModelInfo, memory: memoryview) -> ModelRunner:
    if is_synthetic(spec.model):
        from anabranch.engine.paced import Pace, PacedRunner
        from anabranch.engine.tripwire import TripwireRunner

        tripwire = TripwireRunner(info, memory)
        if spec.model.source == "tripwire":
            return tripwire
        return PacedRunner(tripwire, Pace(), clock=time.monotonic, sleep=time.sleep)
    from anabranch.engine.live.torch_runner import TorchRunner

    return TorchRunner(
        Path(spec.model.prepared),
        memory,
        kv_dtype=spec.model.kv_dtype,
        block_tokens=spec.engine.block_tokens,
        threads=spec.engine.threads,
    )
