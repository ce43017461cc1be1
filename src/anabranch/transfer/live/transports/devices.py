"""What this machine has for transports that need more than sockets."""

from __future__ import annotations

from pathlib import Path

from anabranch.core.errors import ConfigError

RDMA_DEVICES = Path("/sys/class/infiniband")


def rdma_devices(root: Path = RDMA_DEVICES) -> list[str]:
    """Names of the host's RDMA devices, e.g. mlx5_0."""
    return sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []


def require_rdma(wanted: str, what: str, root: Path = RDMA_DEVICES) -> None:
    """Raises ConfigError unless the host has the `wanted` devices (comma-separated; empty: any)."""
    present = rdma_devices(root)
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    missing = [name for name in names if name not in present]
    if missing or not present:
        lacking = f"RDMA device {missing[0]}" if missing else "an RDMA device"
        raise ConfigError(
            f"{what} needs {lacking}; this host has {', '.join(present) or 'none'} in {root}: use tcp here"
        )
