"""Which directory process answers for a name: key ranges, cut by the name's first byte.

Names are digests, so equal ranges hold equally many. All functions take names of 32 bytes, end to end.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from anabranch.core.errors import ConfigError
from anabranch.store.values.key_table import HOLDERS
from anabranch.store.values.scope import NAME_BYTES

MAX_SHARDS = 256


def shard_of(name: bytes, shards: int) -> int:
    return name[0] * shards >> 8


def split(names: bytes, shards: int) -> list[tuple[bytes, list[int] | None]]:
    """For each shard: its names, and where they were in `names` (None: all of them, in order)."""
    if shards == 1:
        return [(names, None)]
    owners = names[::NAME_BYTES].translate(_owners(shards))
    places: list[list[int]] = [[] for _ in range(shards)]
    for i, owner in enumerate(owners):
        places[owner].append(i)
    return [(b"".join([names[i * NAME_BYTES : (i + 1) * NAME_BYTES] for i in own]), own) for own in places]


class Whereabouts(msgspec.Struct, frozen=True):
    """Who holds each of the names that were asked for. `places`: as in `messages.Places`; shorter than asked after a
    look-up with `run`. `unknown`: that nobody is named for a name proves nothing."""

    places: bytes
    members: dict[int, tuple[str, str]] = {}
    unknown: bool = False

    def __len__(self) -> int:
        return len(self.places) // (2 * HOLDERS)

    def holders(self, i: int) -> list[tuple[str, str, int]]:
        """(node_id, address, tier bits: dram 1, ssd 2, backing 4) of everybody who holds name i."""
        row = memoryview(self.places).cast("H")[i * HOLDERS : (i + 1) * HOLDERS]
        return [(*self.members[(entry - 1) >> 3], (entry - 1) & 7) for entry in row if entry]

    def known(self) -> list[bool | None]:
        """For each name: somebody holds it, nobody does, or (None) nobody can say."""
        absent = None if self.unknown else False
        return [True if entry else absent for entry in memoryview(self.places).cast("H")[::HOLDERS].tolist()]

    @property
    def run(self) -> int:
        """How many names come before the first that nobody is known to hold."""
        firsts = memoryview(self.places).cast("H")[::HOLDERS].tolist()
        return firsts.index(0) if 0 in firsts else len(firsts)


def join(count: int, parts: Sequence[tuple[Whereabouts, list[int] | None]]) -> Whereabouts:
    """One answer about `count` names from those of the shards. A shard's answer may be short (`run`, or the shard is
    down): what it does not mention, nobody is named for."""
    if len(parts) == 1 and parts[0][1] is None:
        return parts[0][0]
    out = array("H", bytes(count * HOLDERS * 2))
    numbers: dict[tuple[str, str], int] = {}
    for part, own in parts:
        renumbered = _renumbered(part, numbers)
        for i, at in enumerate(own or ()):
            if i == len(part):
                break
            out[at * HOLDERS : (at + 1) * HOLDERS] = renumbered[i * HOLDERS : (i + 1) * HOLDERS]
    members = {number: node for node, number in numbers.items()}
    return Whereabouts(out.tobytes(), members, any(part.unknown for part, _ in parts))


def shard_addresses(text: str) -> list[str]:
    """The addresses of a comma-separated list, one a shard, in order. Raises ConfigError."""
    addresses = [address.strip() for address in text.split(",")]
    if not all(addresses) or len(addresses) > MAX_SHARDS or len(set(addresses)) < len(addresses):
        raise ConfigError(f"directory {text!r}: expected up to {MAX_SHARDS} different addresses, e.g. 10.0.0.1:7060")
    return addresses


def _renumbered(part: Whereabouts, numbers: dict[tuple[str, str], int]) -> array[int]:
    """The same entries under numbers that all parts share."""
    new: Mapping[int, int] = {old: numbers.setdefault(node, len(numbers)) for old, node in part.members.items()}
    return array(
        "H",
        [
            entry and 1 + (new[(entry - 1) >> 3] << 3 | (entry - 1) & 7)
            for entry in memoryview(part.places).cast("H").tolist()
        ],
    )


@lru_cache(maxsize=8)
def _owners(shards: int) -> bytes:
    return bytes(first * shards >> 8 for first in range(256))
