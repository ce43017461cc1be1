"""Can this machine serve? Facts about it → findings, each with a remedy.

**Covers** the judgement, as a function of `Machine`. **Does not cover** finding the facts (`live.machine`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from anabranch.core.units import format_bytes

GIB = 1 << 30
LEAST_MEMORY_BYTES = 3 * GIB // 2
GOOD_MEMORY_BYTES = 3 * GIB
LEAST_DISK_BYTES = GIB
LEAST_OPEN_FILES, GOOD_OPEN_FILES = 256, 1024

Status = Literal["ok", "warn", "fail"]


class Package(msgspec.Struct, frozen=True):
    """`version`: "" if it is not installed."""

    name: str
    version: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts. A problem text is "" where there is none."""

    system: str
    python: tuple[int, int, int]
    machine: str
    cores: int
    cpu_features: tuple[str, ...]
    memory_bytes: int
    available_bytes: int
    shm_problem: str
    shm_free_bytes: int
    arena_bytes: int
    data_dir: str
    data_problem: str
    disk_free_bytes: int
    direct_io: bool
    open_files: int
    open_files_hard: int
    extras: dict[str, list[Package]]
    compiler: str
    port: int
    port_problem: str
    running: tuple[str, ...]
    leftovers: tuple[str, ...]
    leftover_bytes: int
    config_problems: tuple[str, ...] = ()


class Finding(msgspec.Struct, frozen=True):
    """`remedy`: what to do; "" when nothing has to be done."""

    check: str
    status: Status
    found: str
    remedy: str = ""


def examine(machine: Machine) -> list[Finding]:
    """One finding per check, in a fixed order."""
    return [
        _system(machine),
        _python(machine),
        _cpu(machine),
        _memory(machine),
        _shared_memory(machine),
        _data_folder(machine),
        _direct_io(machine),
        _open_files(machine),
        *(_extra(name, packages) for name, packages in machine.extras.items()),
        _compiler(machine),
        _port(machine),
        _leftovers(machine),
        _configuration(machine),
    ]


def _system(machine: Machine) -> Finding:
    if machine.system != "Linux":
        return Finding(
            "system", "fail", machine.system, "Use Linux: arenas and supervision need its shared memory and signals"
        )
    return Finding("system", "ok", f"Linux on {machine.machine}")


def _python(machine: Machine) -> Finding:
    version = ".".join(map(str, machine.python))
    if machine.python < (3, 11):
        return Finding("python", "fail", version, "Install Python 3.11 or newer")
    return Finding("python", "ok", version)


def _cpu(machine: Machine) -> Finding:
    features = " ".join(machine.cpu_features) or "no vector features"
    found = f"{machine.cores} core{'' if machine.cores == 1 else 's'}, {features}"
    if machine.machine == "x86_64" and "avx2" not in machine.cpu_features:
        return Finding(
            "cpu", "warn", found, "Without AVX2 the engine computes slowly; choose a newer processor or a GPU"
        )
    if machine.cores < 2:
        return Finding("cpu", "warn", found, "Two engines share one core: use `anabranch up --role both`")
    return Finding("cpu", "ok", found)


def _memory(machine: Machine) -> Finding:
    found = f"{format_bytes(machine.available_bytes)} available of {format_bytes(machine.memory_bytes)}"
    if machine.available_bytes < LEAST_MEMORY_BYTES:
        return Finding(
            "memory", "fail", found, f"Free memory: serving the default model takes {format_bytes(GOOD_MEMORY_BYTES)}"
        )
    if machine.available_bytes < GOOD_MEMORY_BYTES:
        return Finding(
            "memory", "warn", found, "Use one engine (`anabranch up --role both`) or a smaller node.dram_bytes"
        )
    return Finding("memory", "ok", found)


def _shared_memory(machine: Machine) -> Finding:
    if machine.shm_problem:
        return Finding("/dev/shm", "fail", machine.shm_problem, "Mount a tmpfs at /dev/shm that you may write to")
    found = f"{format_bytes(machine.shm_free_bytes)} free, {format_bytes(machine.arena_bytes)} wanted for arenas"
    if machine.shm_free_bytes < machine.arena_bytes:
        remedy = "Enlarge it (in a container: --shm-size=2g) or set a smaller node.dram_bytes"
        return Finding("/dev/shm", "warn", found, remedy)
    return Finding("/dev/shm", "ok", found)


def _data_folder(machine: Machine) -> Finding:
    if machine.data_problem:
        remedy = "Choose a folder you may write to with --set cluster.data_dir=FOLDER"
        return Finding("data folder", "fail", f"{machine.data_dir}: {machine.data_problem}", remedy)
    found = f"{machine.data_dir}, {format_bytes(machine.disk_free_bytes)} free"
    if machine.disk_free_bytes < LEAST_DISK_BYTES:
        return Finding(
            "data folder", "fail", found, "Free 1GiB for the prepared model, or set cluster.data_dir elsewhere"
        )
    if machine.disk_free_bytes < 5 * GIB:
        return Finding(
            "data folder", "warn", found, "The SSD tier will be small; set cluster.data_dir to a larger disk"
        )
    return Finding("data folder", "ok", found)


def _direct_io(machine: Machine) -> Finding:
    if machine.data_problem:
        return Finding("direct I/O", "warn", "not tried: the data folder cannot be used", "Fix the data folder first")
    if not machine.direct_io:
        remedy = "It works through the page cache, which takes memory; put cluster.data_dir on ext4 or xfs"
        return Finding("direct I/O", "warn", "the file system of the data folder refuses O_DIRECT", remedy)
    return Finding("direct I/O", "ok", "O_DIRECT works in the data folder")


def _open_files(machine: Machine) -> Finding:
    found = f"{machine.open_files:,} (hard limit {machine.open_files_hard:,})"
    remedy = f"Raise it: ulimit -n {min(65536, machine.open_files_hard)}"
    if machine.open_files < LEAST_OPEN_FILES:
        return Finding("open files", "fail", found, remedy)
    if machine.open_files < GOOD_OPEN_FILES:
        return Finding("open files", "warn", found, remedy)
    return Finding("open files", "ok", found)


def _extra(name: str, packages: list[Package]) -> Finding:
    missing = [package.name for package in packages if not package.version]
    if missing:
        return Finding(f"extra {name}", "fail", f"missing: {', '.join(missing)}", f"pip install 'anabranch[{name}]'")
    return Finding(f"extra {name}", "ok", ", ".join(f"{package.name} {package.version}" for package in packages))


def _compiler(machine: Machine) -> Finding:
    if not machine.compiler:
        remedy = "Install gcc or clang (or set CC): without compiled kernels the engine is slower"
        return Finding("C compiler", "warn", "none found", remedy)
    return Finding("C compiler", "ok", machine.compiler)


def _port(machine: Machine) -> Finding:
    if not machine.port_problem:
        return Finding("port", "ok", f"{machine.port} is free")
    if machine.running:
        return Finding("port", "ok", f"{machine.port} is in use while cluster {', '.join(machine.running)} runs")
    return Finding(
        "port", "fail", machine.port_problem, "Stop what listens there, or use another: anabranch up --port 8001"
    )


def _leftovers(machine: Machine) -> Finding:
    if not machine.leftovers:
        return Finding("leftovers", "ok", "none of dead clusters")
    shown = ", ".join(machine.leftovers[:3]) + (" …" if len(machine.leftovers) > 3 else "")
    found = f"{len(machine.leftovers)} of dead clusters ({format_bytes(machine.leftover_bytes)}): {shown}"
    return Finding(
        "leftovers", "warn", found, "The next `anabranch up` of the same name removes them; or delete them by hand"
    )


def _configuration(machine: Machine) -> Finding:
    if machine.config_problems:
        return Finding("configuration", "fail", "; ".join(machine.config_problems), "See `anabranch config`")
    return Finding("configuration", "ok", "valid")
