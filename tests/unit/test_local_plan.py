"""The plan of a local cluster: names, addresses, order; and when a dead process starts again."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.cluster import local
from anabranch.cluster.restart import Restart, RestartConfig, RestartPolicy
from anabranch.cluster.settings import Settings
from anabranch.cluster.spec import ClusterConfig, ClusterSpec
from anabranch.core.errors import ConfigError


def plan(settings: Settings, run_dir: str = "/run/x", cpus: int = 2) -> ClusterSpec:
    return local.plan(
        settings, run_dir=run_dir, data_dir="/data", arena_dir="/dev/shm", prepared="/p", port=8123, cpus=cpus, uid=7
    )


def test_every_member_has_addresses_of_its_own() -> None:
    spec = plan(Settings(cluster=ClusterConfig(prefill=2, decode=1, both=1)))
    assert [(m.engine_id, m.role) for m in spec.members] == [
        ("prefill-0", "prefill"),
        ("prefill-1", "prefill"),
        ("decode-0", "decode"),
        ("both-0", "both"),
    ]
    places = [a for m in spec.members for a in (m.engine_address, m.node_address, m.arena_path, m.ssd_dir)]
    assert len(set(places)) == 16
    assert spec.directory_address == "unix:/run/x/directory.sock"
    assert (spec.gateway.port, spec.model.prepared, spec.engine.threads) == (8123, "/p", 2)


def test_the_spec_survives_its_file() -> None:
    spec = plan(Settings())
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ClusterSpec) == spec


def test_arenas_of_other_clusters_have_other_names() -> None:
    one = local.arena_prefix("/run/a", "default", 7, "/dev/shm")
    assert not local.arena_prefix("/run/b", "default", 7, "/dev/shm").startswith(one)
    assert not local.arena_prefix("/run/a", "default2", 7, "/dev/shm").startswith(one)


def test_threads_that_were_set_stay() -> None:
    settings = msgspec.structs.replace(Settings(), engine=msgspec.structs.replace(Settings().engine, threads=1))
    assert plan(settings, cpus=64).engine.threads == 1


def test_a_path_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.run_dir .* too long"):
        plan(Settings(), run_dir="/run/" + "x" * 100)


def test_processes_start_after_what_they_need_and_stop_before_it() -> None:
    processes = local.processes(plan(Settings()))
    assert [p.name for p in processes] == [
        "directory",
        "prefill-0-node",
        "decode-0-node",
        "prefill-0",
        "decode-0",
        "gateway",
    ]
    stages = [local.START_STAGE[p.kind] for p in processes]
    assert stages == sorted(stages)
    assert sorted(local.STOP_STAGE, key=lambda kind: local.STOP_STAGE[kind]) == [
        "gateway",
        "engine",
        "node",
        "directory",
    ]


def test_children_get_sleeping_threads_and_no_settings() -> None:
    environment = local.child_environment(
        {"PATH": "/bin", "ANABRANCH_ENGINE_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"}
    )
    assert "ANABRANCH_ENGINE_THREADS" not in environment
    assert environment["PATH"] == "/bin"
    assert environment["OMP_WAIT_POLICY"] == "ACTIVE", "what the user set stays"
    assert environment["GOMP_SPINCOUNT"] == "0"


def test_the_first_restart_is_immediate_then_delays_double_up_to_a_second() -> None:
    policy = RestartPolicy(RestartConfig())
    restarts = [policy.died(0.1) for _ in range(9)]
    assert [r.delay_s for r in restarts] == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert [r.alarm for r in restarts].index(True) == 4
    assert sum(r.alarm for r in restarts) == 1


def test_a_long_life_forgives_what_was_before() -> None:
    policy = RestartPolicy(RestartConfig())
    for _ in range(6):
        policy.died(0.1)
    assert policy.died(11.0) == Restart(0.0, False)
    assert policy.died(0.1) == Restart(0.05, False)
