"""Will it fit? What the settings ask for against what this machine has, found out before anything is started.

A size that the user set and that cannot be honoured is a problem; a default that does not fit is made to fit, and
its origin says so.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from anabranch.cluster.settings import Settings
from anabranch.core.config import DEFAULT_ORIGIN, Resolved
from anabranch.core.units import format_bytes

SHARED_MEMORY = "/dev/shm"
LEAST_ARENA_BYTES = 16 << 20
SPARE_DISK_BYTES = 64 << 20
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def engines_of(settings: Settings) -> int:
    return settings.cluster.prefill + settings.cluster.decode + settings.cluster.both


def fit(resolved: Resolved, settings: Settings, ssd_dir: str) -> tuple[Resolved, list[str]]:
    """Check `node.dram_bytes` and `node.ssd_bytes` (each taken once per engine) and shrink defaults that do not fit."""
    nodes = max(1, engines_of(settings))
    problems: list[str] = []
    room, where = memory_room()
    resolved = _fit_one(resolved, "dram_bytes", settings.node.dram_bytes, nodes, room, where, problems)
    disk = disk_room(ssd_dir)
    free = f"{format_bytes(disk)} usable on the disk of {ssd_dir}"
    resolved = _fit_one(resolved, "ssd_bytes", settings.node.ssd_bytes, nodes, disk, free, problems)
    return resolved, problems


def memory_room() -> tuple[int, str]:
    """Bytes for arenas: the least of free shared memory, available memory and the control group's limit."""
    stat = os.statvfs(SHARED_MEMORY)
    rooms = [(stat.f_bavail * stat.f_frsize, f"free in {SHARED_MEMORY}"), (_available_memory(), "of memory available")]
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            rooms.append((int(Path(path).read_text()), "allowed by the memory limit of the control group"))
    room, what = min(rooms)
    return room, f"{format_bytes(room)} {what}"


def disk_room(folder: str) -> int:
    """Bytes the SSD tiers under `folder` may use: free space plus what they occupy already."""
    path = Path(folder)
    while not path.exists():
        path = path.parent
    stat = os.statvfs(path)
    occupied = sum(_occupied(Path(folder)))
    return max(0, stat.f_bavail * stat.f_frsize + occupied - SPARE_DISK_BYTES)


def busy_port(host: str, port: int) -> str | None:
    """Why `host:port` cannot be bound; None if it can (port 0 always can)."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(1)
    except OSError as error:
        return f"gateway.port = {port}: cannot listen on {host}:{port} ({error.strerror}); choose another with --port"
    return None


def _fit_one(
    resolved: Resolved, key: str, each: int, nodes: int, room: int, where: str, problems: list[str]
) -> Resolved:
    if each * nodes <= room:
        return resolved
    fitting = room // nodes // 2 // (1 << 20) * (1 << 20)
    if resolved.origin("node", key) == DEFAULT_ORIGIN and (key == "ssd_bytes" or fitting >= LEAST_ARENA_BYTES):
        node = msgspec.structs.replace(resolved.sections["node"], **{key: fitting})
        origins = resolved.origins | {"node": resolved.origins["node"] | {key: f"fitted to {where}"}}
        return Resolved(resolved.sections | {"node": node}, origins, resolved.problems)
    wanted = f"{format_bytes(each)} for each of {nodes} nodes" if nodes > 1 else format_bytes(each)
    problems.append(
        f"node.{key} = {wanted} ({resolved.origin('node', key)}) does not fit: only {where}; "
        f"set it to {max(1, room // nodes >> 20)}MiB or less"
    )
    return resolved


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _occupied(folder: Path) -> Iterator[int]:
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.stat(os.path.join(base, name)).st_blocks * 512
