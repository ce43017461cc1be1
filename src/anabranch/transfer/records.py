"""What an arena's header and table say about sessions and slots (`transfer.live.arena` stores it)."""

from __future__ import annotations

import msgspec

FREE, RESERVED, COMMITTED = 0, 1, 2


class SlotRecord(msgspec.Struct, frozen=True):
    """`owner`: first 8 bytes of the session that was given the slot; `block_sum` 0: not known yet."""

    state: int
    generation: int
    owner: int = 0
    block_sum: int = 0
    tenant: bytes = b""
    key: bytes = b""
    parent: bytes = b""


class AttachedSession(msgspec.Struct, frozen=True):
    """An engine port and its process, exactly: a reused process id has another start time."""

    pid: int
    started: int
    session: bytes


def owner_of(session: bytes) -> int:
    return int.from_bytes(session[:8], "little")
