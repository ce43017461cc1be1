"""How a block lies on disk: a 4 KiB header, then the Full Block, padded to 4 KiB.

The header carries its own checksum and that of the data. It may reach the disk before, after or without the data: in
each case the pair does not match and the block counts as absent, never as another one.
"""

from __future__ import annotations

import struct
import zlib

from anabranch.blocks.layout import KvLayout
from anabranch.store.slots import Named
from anabranch.store.ssd_index import SsdEntry

PAGE = 4096
MAGIC = b"ANBRSSD1"
VERSION = 1
SEGMENT_BYTES = 64 << 20
BODY = struct.Struct("<8sI4x32s32s16s8sQQ")  # magic, version, key, parent, layout, tenant, block sum, sequence
CRC = struct.Struct("<I")


def stride_bytes(layout: KvLayout) -> int:
    """Bytes of one slot on disk."""
    return PAGE + -(-layout.full_block_bytes // PAGE) * PAGE


def segment_slots(layout: KvLayout, limit_bytes: int) -> int:
    """Slots of one segment file: 64 MiB, or a sixteenth of a small limit; 0 if not even one block fits."""
    stride = stride_bytes(layout)
    return min(max(min(SEGMENT_BYTES, limit_bytes // 16) // stride, 1), limit_bytes // stride)


def pack_header(block: Named, layout: bytes, sequence: int) -> bytes:
    """The used part of a header; the rest of its page is zero."""
    body = BODY.pack(MAGIC, VERSION, block.key, block.parent, layout, block.tenant, block.block_sum, sequence)
    return body + CRC.pack(zlib.crc32(body))


def unpack_header(data: bytes | memoryview, layout: bytes, slot: int) -> SsdEntry | None:
    """None for anything that is not a whole header of this version and layout."""
    if len(data) < BODY.size + CRC.size:
        return None
    body = bytes(data[: BODY.size])
    magic, version, key, parent, digest, tenant, total, sequence = BODY.unpack(body)
    (crc,) = CRC.unpack_from(data, BODY.size)
    if magic != MAGIC or version != VERSION or digest != layout or crc != zlib.crc32(body):
        return None
    return SsdEntry(slot, sequence, Named(key, parent if parent.strip(b"\0") else b"", tenant, total))
