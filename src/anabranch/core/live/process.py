"""Facts about processes of this machine, and a child's promise to die with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """From now on this process is killed when the thread that started it ends, however that happens.

    Exits at once when `parent_pid` is no longer the parent: it died before this call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def is_alive(pid: int) -> bool:
    """Whether `pid` exists and is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def command_line(pid: int) -> str:
    """The command line with blanks between arguments; "" for a process that is gone or belongs to somebody else."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def resident_bytes(pid: int) -> int:
    """Proportional set size: shared pages count in equal parts for each process that maps them. 0 if it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def tell_service_manager(state: str, variables: Mapping[str, str]) -> None:
    """`READY=1`, `STOPPING=1`, … for systemd units of Type=notify (sd_notify(3)); nothing where no one listens."""
    address = variables.get("NOTIFY_SOCKET", "")
    if not address:
        return
    # A leading @ is how an abstract socket is written.
    where = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto(state.encode(), where)
