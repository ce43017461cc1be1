"""A short name for a layout, so that two processes can tell at once whether their bytes are interchangeable."""

from __future__ import annotations

import hashlib

import msgspec

from anabranch.blocks.layout import KvLayout


def layout_digest(layout: KvLayout) -> bytes:
    """16 bytes; equal if and only if the layouts are."""
    return hashlib.blake2b(msgspec.msgpack.encode(layout), digest_size=16, person=b"anabranch-layout").digest()


def tenant_digest(tenant: str) -> bytes:
    """8 bytes that stand for a tenant in tables and headers. Never all zero."""
    return hashlib.blake2b(tenant.encode(), digest_size=8, person=b"anabranch-tenant").digest()
