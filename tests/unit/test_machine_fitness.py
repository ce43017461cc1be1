from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from anabranch.cluster.fitness import GIB, Finding, Machine, Package, examine
from anabranch.cluster.live import machine as live_machine
from anabranch.cluster.live.machine import look, packages_of
from anabranch.cluster.settings import Settings, settings_of
from anabranch.core.config import Resolved

GOOD = Machine(
    system="Linux",
    python=(3, 11, 7),
    machine="x86_64",
    cores=2,
    cpu_features=("avx2", "fma"),
    memory_bytes=16 * GIB,
    available_bytes=8 * GIB,
    shm_problem="",
    shm_free_bytes=8 * GIB,
    arena_bytes=GIB,
    data_dir="/data",
    data_problem="",
    disk_free_bytes=100 * GIB,
    direct_io=True,
    open_files=4096,
    open_files_hard=4096,
    extras={"engine": [Package("torch", "2.13.0")], "serve": [Package("httpx", "0.28.1")]},
    compiler="/usr/bin/cc",
    port=8000,
    port_problem="",
    running=(),
    leftovers=(),
    leftover_bytes=0,
)


def test_a_good_machine_has_nothing_to_do() -> None:
    findings = examine(GOOD)
    assert {finding.status for finding in findings} == {"ok"}
    assert not any(finding.remedy for finding in findings)


@pytest.mark.parametrize(
    ("change", "check", "status", "remedy"),
    [
        ({"system": "Darwin"}, "system", "fail", "Use Linux"),
        ({"python": (3, 10, 0)}, "python", "fail", "3.11"),
        ({"cpu_features": ()}, "cpu", "warn", "AVX2"),
        ({"cores": 1}, "cpu", "warn", "--role both"),
        ({"available_bytes": GIB}, "memory", "fail", "3GiB"),
        ({"available_bytes": 2 * GIB}, "memory", "warn", "dram_bytes"),
        ({"shm_problem": "denied"}, "/dev/shm", "fail", "tmpfs"),
        ({"shm_free_bytes": 64 << 20}, "/dev/shm", "warn", "--shm-size"),
        ({"data_problem": "denied"}, "data folder", "fail", "cluster.data_dir"),
        ({"data_problem": "denied"}, "direct I/O", "warn", "data folder first"),
        ({"disk_free_bytes": GIB // 2}, "data folder", "fail", "1GiB"),
        ({"disk_free_bytes": 2 * GIB}, "data folder", "warn", "larger disk"),
        ({"direct_io": False}, "direct I/O", "warn", "page cache"),
        ({"open_files": 100}, "open files", "fail", "ulimit -n 4096"),
        ({"open_files": 512}, "open files", "warn", "ulimit -n 4096"),
        ({"extras": {"engine": [Package("torch", "")]}}, "extra engine", "fail", "pip install 'anabranch[engine]'"),
        ({"compiler": ""}, "C compiler", "warn", "gcc"),
        ({"port_problem": "in use"}, "port", "fail", "--port"),
        ({"leftovers": ("/dev/shm/a",), "leftover_bytes": 5}, "leftovers", "warn", "anabranch up"),
        ({"config_problems": ("node.x is unknown",)}, "configuration", "fail", "anabranch config"),
    ],
)
def test_each_problem_has_a_remedy(change: dict[str, Any], check: str, status: str, remedy: str) -> None:
    finding = one(examine(msgspec.structs.replace(GOOD, **change)), check)
    assert finding.status == status
    assert remedy in finding.remedy


def test_a_running_cluster_may_hold_the_port() -> None:
    machine = msgspec.structs.replace(GOOD, port_problem="in use", running=("default",))
    assert one(examine(machine), "port").status == "ok"


def one(findings: list[Finding], check: str) -> Finding:
    return next(finding for finding in findings if finding.check == check)


def settings(tmp_path: Path) -> Settings:
    from anabranch.cli.settings import effective

    resolved: Resolved = effective(sets=(f"cluster.data_dir={tmp_path}/data", f"cluster.run_dir={tmp_path}/run/one"))
    return settings_of(resolved)


def test_facts_are_found_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "run" / "one").mkdir(parents=True)
    (tmp_path / "run" / "one" / "cluster.json").write_text("{}")
    shm = tmp_path / "shm"
    shm.mkdir()
    prefix = f"anabranch-{live_machine.os.getuid()}-one-0123."
    (shm / f"{prefix}lost").write_bytes(bytes(8192))
    (shm / f"{prefix}used").write_bytes(bytes(8192))
    before = sorted(tmp_path.rglob("*"))
    with (shm / f"{prefix}used").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        machine = look(settings(tmp_path), ["a problem"], shared_memory=str(shm))
    assert sorted(tmp_path.rglob("*")) == before
    assert machine.leftovers == (str(shm / f"{prefix}lost"), str(tmp_path / "run" / "one" / "cluster.json"))
    assert machine.leftover_bytes > 0
    assert machine.cores >= 1
    assert machine.memory_bytes >= machine.available_bytes > 0
    assert machine.data_problem == machine.shm_problem == ""
    assert machine.disk_free_bytes > 0
    assert machine.config_problems == ("a problem",)


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    machine = look(settings(tmp_path), [], shared_memory=str(tmp_path / "none"))
    assert "cannot create files" in machine.shm_problem
    blocker = tmp_path / "data"
    blocker.write_text("a file where the folder should be")
    assert "cannot create files" in look(settings(tmp_path), []).data_problem


def test_extras_come_from_the_package_itself() -> None:
    names = {package.name for package in packages_of("serve")}
    assert {"starlette", "uvicorn", "httpx", "tokenizers"} <= names
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in names)
    assert packages_of("no-such-extra") == []
    assert live_machine._version("no-such-package-anywhere") == ""
