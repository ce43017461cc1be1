"""Checksums of Layer Blocks and Full Blocks (see `transfer.api` for where they are verified).

XXH3 guards against damage, not against an adversary: what names a block is its key.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

Buffer = bytes | bytearray | memoryview


def layer_sum(layer_block: Buffer) -> int:
    """xxh3_64 of one Layer Block's bytes; no copy is made."""
    return int(xxhash.xxh3_64_intdigest(layer_block))


def block_sum(layer_sums: Sequence[int]) -> int:
    """xxh3_64 of the concatenated little-endian 8-byte layer sums, in layer order."""
    return int(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(layer_sums)}Q", *layer_sums)))
