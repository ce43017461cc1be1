"""What a transport says of itself to its peers, and the checks that all transports share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from anabranch.core.errors import InvalidInput, LayoutMismatch, WireError
from anabranch.transfer.transport import Move, Moved


class RemoteRegion(msgspec.Struct, frozen=True):
    """`at`: where the peer has it: an address, an index, whatever the transport calls it."""

    size: int
    at: int = 0
    path: str = ""
    inode: int = 0


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` names the transport; `detail` is its own."""

    kind: str
    name: str
    regions: dict[str, RemoteRegion]
    address: str = ""
    detail: bytes = b""


def describe(description: Description) -> bytes:
    return msgspec.msgpack.encode(description)


def read_description(data: bytes, kind: str) -> Description:
    """Raises WireError if it is none, LayoutMismatch if another transport wrote it."""
    try:
        description = msgspec.msgpack.decode(data, type=Description)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a transport's description: {error}") from error
    if description.kind != kind:
        raise LayoutMismatch(f"the peer speaks {description.kind}, this side {kind}; use the same transport")
    return description


def check_local(moves: Sequence[Move], sizes: Mapping[str, int]) -> None:
    """Raises InvalidInput for a move outside of this side's regions."""
    for move in moves:
        if move.local not in sizes:
            raise InvalidInput(f"no region '{move.local}' is registered here (there are: {', '.join(sizes) or 'none'})")
        if move.size < 0 or move.local_offset < 0 or move.local_offset + move.size > sizes[move.local]:
            raise InvalidInput(
                f"{move.size} bytes at {move.local_offset} are outside of '{move.local}' ({sizes[move.local]} bytes)"
            )


def check_memory(region: str, memory: memoryview, taken: Mapping[str, object]) -> memoryview:
    """The memory as writable bytes. Raises InvalidInput."""
    if region in taken:
        raise InvalidInput(f"region '{region}' is registered already; release it first")
    if memory.readonly or not memory.c_contiguous:
        raise InvalidInput(f"the memory of '{region}' must be writable and contiguous")
    return memory.cast("B")


def refused(moves: Sequence[Move], regions: Mapping[str, RemoteRegion]) -> list[Moved | None]:
    """REFUSED for each move outside of the peer's regions, None for the others."""
    return [
        None
        if (there := regions.get(move.region)) is not None and 0 <= move.offset <= there.size - move.size
        else Moved.REFUSED
        for move in moves
    ]
