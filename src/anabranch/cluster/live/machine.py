"""Facts about this machine for `cluster.fitness`. Looks, and leaves nothing behind."""

from __future__ import annotations

import mmap
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from anabranch.cluster.fitness import Machine, Package
from anabranch.cluster.live.capacity import SHARED_MEMORY, busy_port, engines_of
from anabranch.cluster.live.run_folder import default_data_dir, default_run_dir, supervisor_pid
from anabranch.cluster.settings import Settings

FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
SERVING_EXTRAS = ("engine", "serve")
PAGE_BYTES = 4096


def look(settings: Settings, config_problems: list[str], *, shared_memory: str = SHARED_MEMORY) -> Machine:
    """Everything that `examine` wants to know, for a cluster with these settings."""
    data_dir = default_data_dir(settings.cluster)
    data_problem, direct_io = _try_folder(data_dir)
    total, available = _memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    run_dirs = _run_dirs(default_run_dir(settings.cluster).parent)
    running = [path for path in run_dirs if supervisor_pid(path) is not None]
    leftovers = _leftovers(run_dirs, running, shared_memory)
    return Machine(
        system=platform.system(),
        python=sys.version_info[:3],
        machine=platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_features=_cpu_features(),
        memory_bytes=total,
        available_bytes=available,
        shm_problem=_shared_memory_problem(shared_memory),
        shm_free_bytes=_free(Path(shared_memory)),
        arena_bytes=settings.node.dram_bytes * max(1, engines_of(settings)),
        data_dir=str(data_dir),
        data_problem=data_problem,
        disk_free_bytes=_free(data_dir),
        direct_io=direct_io,
        open_files=_limit(soft),
        open_files_hard=_limit(hard),
        extras={extra: packages_of(extra) for extra in SERVING_EXTRAS},
        compiler=os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "",
        port=settings.gateway.port,
        port_problem=busy_port(settings.gateway.host, settings.gateway.port) or "",
        running=tuple(path.name for path in running),
        leftovers=tuple(str(path) for path in leftovers),
        leftover_bytes=sum(_size(path) for path in leftovers),
        config_problems=tuple(config_problems),
    )


def packages_of(extra: str) -> list[Package]:
    """The packages that an extra asks for and their installed versions."""
    found = []
    for requirement in metadata.requires("anabranch") or []:
        wanted, _, marker = requirement.partition(";")
        if re.search(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]", marker):
            name = re.split(r"[\s<>=!~\[(]", wanted.strip(), maxsplit=1)[0]
            found.append(Package(name, _version(name)))
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _memory() -> tuple[int, int]:
    """Total and available bytes; (0, 0) where the system does not say."""
    numbers = {"MemTotal": 0, "MemAvailable": 0}
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in numbers:
                numbers[name] = int(rest.split()[0]) * 1024
    return numbers["MemTotal"], numbers["MemAvailable"]


def _cpu_features() -> tuple[str, ...]:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                present = set(line.partition(":")[2].split())
                return tuple(feature for feature in FEATURES if feature in present)
    return ()


def _limit(value: int) -> int:
    return 1 << 30 if value == resource.RLIM_INFINITY else value


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _free(path: Path) -> int:
    try:
        stat = os.statvfs(_existing(path))
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def _shared_memory_problem(folder: str) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"cannot create files in {folder}: {error.strerror}"


def _try_folder(folder: Path) -> tuple[str, bool]:
    """Whether files can be made where the folder is or would be (the reason if not), and with O_DIRECT."""
    place = _existing(folder)
    try:
        descriptor, name = tempfile.mkstemp(prefix=".anabranch-doctor-", dir=place)
    except OSError as error:
        return f"cannot create files in {place}: {error.strerror}", False
    os.close(descriptor)
    try:
        return "", _writes_directly(name)
    finally:
        os.unlink(name)


def _writes_directly(name: str) -> bool:
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
    except (OSError, AttributeError):  # no O_DIRECT on this system
        return False
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:  # direct I/O wants aligned memory
            return os.pwrite(descriptor, page, 0) == PAGE_BYTES
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _run_dirs(parent: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in parent.iterdir() if path.is_dir())
    return []


def _leftovers(run_dirs: list[Path], running: list[Path], shared_memory: str) -> list[Path]:
    """Arenas that no process has mapped, and spec or sockets in run folders that nobody supervises."""
    arenas = sorted(Path(shared_memory).glob(f"anabranch-{os.getuid()}-*"))
    mapped = _mapped(str(Path(shared_memory) / "anabranch-")) if arenas else set()
    found = [path for path in arenas if str(path) not in mapped]
    for path in run_dirs:
        if path not in running:
            found += sorted([*path.glob("*.sock"), *path.glob("cluster.json")])
    return found


def _mapped(prefix: str) -> set[str]:
    """Files beginning with `prefix` that some process of this user has mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            content = maps.read_text(errors="replace")
            if prefix in content:
                found.update(line[line.index(prefix) :] for line in content.splitlines() if prefix in line)
    return found


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_blocks * 512
    return 0
