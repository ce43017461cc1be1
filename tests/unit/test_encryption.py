"""Encryption at rest: what opens, what does not, and what forgetting a key does."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest

from anabranch.core.errors import ConfigError, IntegrityError, StaleLease
from anabranch.store.values.contracts import Record
from anabranch.store.values.live.encryption import TenantCiphers
from anabranch.store.values.live.log import ValueLog
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.slices import SLICE_BYTES, slice_sums

SECRET = bytes(range(32))
A, B = b"scope of tenant a"[:16], b"scope of tenant b and more"[-16:]
RANDOM = random.Random(1)


def value(size: int, scope: bytes = A) -> tuple[Record, memoryview]:
    data = RANDOM.randbytes(size)
    return Record(RANDOM.randbytes(32), scope, size, tuple(slice_sums(data))), memoryview(data)


@pytest.fixture
def ciphers(tmp_path: Path) -> TenantCiphers:
    made = TenantCiphers(str(tmp_path / "keys"), SECRET)
    made.admit("a", A)
    return made


@pytest.mark.parametrize("size", [0, 1, 4096, SLICE_BYTES - 1, SLICE_BYTES, SLICE_BYTES + 1, 3 * SLICE_BYTES + 7])
def test_a_sealed_value_opens_to_itself_and_is_as_long_as_said(ciphers: TenantCiphers, size: int) -> None:
    record, data = value(size)
    sealed = memoryview(ciphers.seal(record, data))
    assert sealed.nbytes == size + ciphers.overhead(A, size)
    assert bytes(ciphers.open(record, sealed)) == bytes(data)
    assert size < 32 or bytes(data[:32]) not in bytes(sealed)


def test_equal_values_are_sealed_differently_each_time(ciphers: TenantCiphers) -> None:
    record, data = value(1000)
    assert len({bytes(ciphers.seal(record, data)) for _ in range(50)}) == 50
    assert len({bytes(ciphers.seal(record, data))[:32] for _ in range(50)}) == 50


def test_any_change_is_noticed(ciphers: TenantCiphers) -> None:
    record, data = value(2 * SLICE_BYTES + 100)
    sealed = bytearray(ciphers.seal(record, data))
    for at in [8, 31, 32, 33, SLICE_BYTES, SLICE_BYTES + 48, len(sealed) - 1]:
        sealed[at] ^= 1
        with pytest.raises(IntegrityError):
            ciphers.open(record, memoryview(sealed))
        sealed[at] ^= 1
    part = SLICE_BYTES + 16
    swapped = sealed[:32] + sealed[32 + part : 32 + 2 * part] + sealed[32 : 32 + part] + sealed[32 + 2 * part :]
    cut = sealed[: 32 + part]
    for bad in (swapped, cut, sealed[:-1], sealed + b"x", b"", sealed[:20]):
        with pytest.raises(IntegrityError):
            ciphers.open(record, memoryview(bytes(bad)))
    other, _ = value(record.size)
    with pytest.raises(IntegrityError):
        ciphers.open(other, memoryview(sealed))


def test_a_tenants_key_opens_nothing_of_another(ciphers: TenantCiphers) -> None:
    ciphers.admit("b", B)
    record, data = value(100)
    sealed = memoryview(ciphers.seal(record, data))
    with pytest.raises((IntegrityError, StaleLease)):
        ciphers.open(Record(record.name, B, record.size, record.sums), sealed)


def test_forgetting_a_key_ends_everything_of_its_tenant_also_on_other_nodes_and_after_restart(tmp_path: Path) -> None:
    folder = str(tmp_path / "keys")
    here, there = TenantCiphers(folder, SECRET), TenantCiphers(folder, SECRET)
    here.admit("a", A)
    here.admit("b", B)
    (record, data), (kept, other) = value(5000), value(5000, B)
    sealed, also = memoryview(here.seal(record, data)), memoryview(here.seal(kept, other))
    assert bytes(there.open(record, sealed)) == bytes(data)
    assert here.forget("a")
    assert not here.forget("a")
    for node in (here, there, TenantCiphers(folder, SECRET)):
        with pytest.raises(StaleLease):
            node.open(record, sealed)
        assert bytes(node.open(kept, also)) == bytes(other)
    for node in (here, there):
        with pytest.raises(StaleLease):
            node.seal(record, data)
        with pytest.raises(StaleLease):
            node.overhead(A, 100)
    here.admit("a", A)  # a new life, with a new key
    for node in (here, there):
        assert bytes(node.open(record, memoryview(node.seal(record, data)))) == bytes(data)
        with pytest.raises(StaleLease):
            node.open(record, sealed)


def test_unknown_scopes_stay_plain_or_are_refused(tmp_path: Path) -> None:
    loose, strict = TenantCiphers(str(tmp_path), SECRET), TenantCiphers(str(tmp_path), SECRET, strict=True)
    record, data = value(100)
    assert loose.overhead(A, 100) == 0
    assert loose.seal(record, data) is data
    with pytest.raises(StaleLease):
        loose.open(record, memoryview(bytes(200)))
    with pytest.raises(StaleLease):
        strict.overhead(A, 100)
    strict.admit("a", A, encrypt=False)
    assert strict.seal(record, data) is data
    assert strict.overhead(A, 100) == 0


def test_a_tenant_that_is_no_longer_encrypted_can_still_read_what_was(tmp_path: Path) -> None:
    ciphers = TenantCiphers(str(tmp_path), SECRET)
    ciphers.admit("a", A)
    record, data = value(1000)
    sealed = memoryview(ciphers.seal(record, data))
    ciphers.admit("a", A, encrypt=False)
    for node in (ciphers, TenantCiphers(str(tmp_path), SECRET)):
        assert node.overhead(A, 1000) == 0
        assert node.seal(record, data) is data
        assert bytes(node.open(record, sealed)) == bytes(data)
    ciphers.admit("a", A)
    assert ciphers.overhead(A, 1000) > 0
    assert bytes(ciphers.open(record, sealed)) == bytes(data)


def test_key_files_are_private_wrapped_and_bound_to_the_secret(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    TenantCiphers(str(folder), SECRET).admit("tenant-name", A)
    (path,) = folder.glob("*.key")
    assert oct(path.stat().st_mode)[-3:] == "600"
    assert "tenant-name" not in path.name
    with pytest.raises(ConfigError, match="another cluster secret"):
        TenantCiphers(str(folder), bytes(32))
    with pytest.raises(ConfigError, match="32 bytes"):
        TenantCiphers(str(folder), b"short")
    path.write_bytes(b"rubbish")
    with pytest.raises(ConfigError, match="not a key file"):
        TenantCiphers(str(folder), SECRET)


def test_the_disk_tier_holds_only_sealed_bytes_and_a_forgotten_tenant_is_unreadable_at_once(tmp_path: Path) -> None:
    ciphers = TenantCiphers(str(tmp_path / "keys"), SECRET)
    ciphers.admit("a", A)
    plain = [value(n, B) for n in (100, 70_000)]
    secret = [value(n) for n in (0, 100, 4096, 70_000, SLICE_BYTES + 5, 9 << 20)]
    everything = plain + secret
    names = [record.name for record, _ in everything]

    def read(log: ValueLog) -> tuple[list[Outcome], list[bytearray]]:
        buffers = [bytearray(record.size) for record, _ in everything]
        return log.read(names, [memoryview(buffer) for buffer in buffers]), buffers

    log = ValueLog(str(tmp_path / "log"), 32 << 20, cipher=ciphers)
    with contextlib.closing(log):
        assert set(log.append(everything, durable=True)) == {Outcome.OK}
        outcomes, buffers = read(log)
        assert set(outcomes) == {Outcome.OK}
        assert [bytes(b) for b in buffers] == [bytes(data) for _, data in everything]
    disk = b"".join(path.read_bytes() for path in (tmp_path / "log").glob("*.seg"))
    assert bytes(plain[0][1]) in disk
    assert all(bytes(data[:64]) not in disk for _, data in secret[1:])
    with contextlib.closing(ValueLog(str(tmp_path / "log"), 32 << 20, cipher=ciphers)) as again:
        assert set(read(again)[0]) == {Outcome.OK}
        ciphers.forget("a")
        outcomes, buffers = read(again)
        assert outcomes[:2] == [Outcome.OK] * 2
        assert set(outcomes[2:]) == {Outcome.STALE}
        assert not any(any(buffer) for buffer in buffers[2:])
        assert again.append([value(10)], durable=True) == [Outcome.STALE]
    assert os.listdir(tmp_path / "keys") == ["lock"]
