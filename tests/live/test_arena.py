"""The arena file: who writes what, and what a successor finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anabranch.core.errors import ConfigError, LayoutMismatch, Unavailable
from anabranch.testing.store import LAYOUT
from anabranch.transfer.live.arena import Arena, arena_slots
from anabranch.transfer.records import COMMITTED, FREE, AttachedSession, SlotRecord

BYTES = 100_000
OTHER = type(LAYOUT)(layers=2, kv_heads=2, head_dim=8, block_tokens=16)


def test_engine_and_node_see_the_same_bytes_and_layer_blocks_are_cuts_of_the_full_block(tmp_path: Path) -> None:
    path = str(tmp_path / "arena")
    arena, kept = Arena.create(path, LAYOUT, BYTES)
    assert not kept
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(path).st_size <= BYTES
    engine = Arena.attach(path, LAYOUT, arena.slots)
    size = LAYOUT.full_block_bytes
    engine.data[size : 2 * size] = bytes(range(256)) * (size // 256)
    assert b"".join(bytes(arena.layer(1, layer)) for layer in range(LAYOUT.layers)) == bytes(arena.block(1))
    assert bytes(arena.block(1)) == bytes(engine.block(1))
    engine.close()
    arena.close()


def test_a_successor_finds_table_sessions_and_data(tmp_path: Path) -> None:
    path = str(tmp_path / "arena")
    arena, _ = Arena.create(path, LAYOUT, BYTES)
    record = SlotRecord(COMMITTED, 7, 0, 0, b"t" * 8, b"k" * 32, b"p" * 32)
    arena.write(3, record)
    arena.seal(3, 99)
    sessions = [AttachedSession(1, 2, b"s" * 16), AttachedSession(3, 4, b"u" * 16)]
    arena.write_sessions(sessions)
    arena.block(3)[:4] = b"data"
    epoch = arena.epoch
    arena.close()
    later, kept = Arena.create(path, LAYOUT, BYTES)
    assert kept
    assert later.epoch == epoch + 1
    assert later.record(3) == SlotRecord(COMMITTED, 7, 0, 99, b"t" * 8, b"k" * 32, b"p" * 32)
    assert later.record(2).state == FREE
    assert later.sessions == sessions
    assert bytes(later.block(3)[:4]) == b"data"
    later.close()


def test_another_layout_or_size_gets_a_fresh_file_and_an_engine_is_told(tmp_path: Path) -> None:
    path = str(tmp_path / "arena")
    arena, _ = Arena.create(path, LAYOUT, BYTES)
    arena.close()
    with pytest.raises(LayoutMismatch):
        Arena.attach(path, OTHER, arena.slots)
    for layout, size in ((OTHER, BYTES), (LAYOUT, 2 * BYTES)):
        fresh, kept = Arena.create(path, layout, size)
        assert not kept
        assert fresh.inode != arena.inode or fresh.sessions == []
        fresh.close()


def test_a_second_node_on_one_arena_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "arena")
    arena, _ = Arena.create(path, LAYOUT, BYTES)
    with pytest.raises(ConfigError, match="belongs to a running node"):
        Arena.create(path, LAYOUT, BYTES)
    with pytest.raises(ConfigError, match="belongs to a running node"):
        Arena.create(path, OTHER, BYTES)
    arena.close()
    later, kept = Arena.create(path, LAYOUT, BYTES)
    assert kept
    later.close()


def test_impossible_sizes_and_missing_arenas_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raise it"):
        arena_slots(LAYOUT, 9000)
    with pytest.raises(ConfigError, match="lower dram_bytes"):
        Arena.create(str(tmp_path / "arena"), LAYOUT, 1 << 50)
    with pytest.raises(Unavailable, match="is its node running"):
        Arena.attach(str(tmp_path / "none"), LAYOUT, 1)
