"""Is a process still the one that we knew?"""

from __future__ import annotations


def process_start(pid: int) -> int:
    """Start time of a running process in clock ticks since boot; 0 if there is none (or only its zombie)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def is_gone(pid: int, started: int) -> bool:
    """The process that started then does not run any more."""
    current = process_start(pid)
    return current == 0 or current != started
