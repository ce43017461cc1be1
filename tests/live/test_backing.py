"""The backing tier in a folder and in an S3-compatible store, and what it has in common with the SSD tier."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from value_maker import SCOPE, Names, content, made

from anabranch.core.errors import ConfigError, InvalidInput, Unavailable
from anabranch.core.faults import NO_FAULTS, Faults
from anabranch.store.values.contracts import Cipher, Record
from anabranch.store.values.live.backing import FolderBacking, ObjectBacking, PackedBacking, open_backing
from anabranch.store.values.live.encryption import TenantCiphers
from anabranch.store.values.live.log import ValueLog
from anabranch.store.values.live.log.direct import aligned_buffer
from anabranch.store.values.outcome import Outcome
from anabranch.testing.faults import PlannedFaults

OK, MISSING, PRESENT, DIFFERS = Outcome.OK, Outcome.MISSING, Outcome.PRESENT, Outcome.DIFFERS
OTHER = b"another scope..."
Open = Callable[..., PackedBacking]


@pytest.fixture(scope="module")
def bucket() -> Iterator[Callable[[], tuple[str, dict[str, str]]]]:
    """A fresh bucket of an S3 server on loopback: (url, options)."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    numbers = itertools.count()

    def fresh() -> tuple[str, dict[str, str]]:
        name = f"bucket-{next(numbers)}"
        with urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/{name}", method="PUT")):
            options = {"aws_endpoint": f"http://{host}:{port}", "aws_region": "us-east-1"}
            options |= {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
            return f"s3://{name}/some/prefix", options

    yield fresh
    server.stop()


@pytest.fixture(params=["folder", "object"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same place once more each time it is called: another node."""
    url, options = (str(tmp_path / "backing"), {})
    if request.param == "object":
        url, options = request.getfixturevalue("bucket")()
    with contextlib.ExitStack() as stack:

        def make(*, cipher: Cipher | None = None, faults: Faults = NO_FAULTS) -> PackedBacking:
            made = open_backing(url, options=options, cipher=cipher, faults=faults, refresh_s=None)
            assert isinstance(made, FolderBacking if request.param == "folder" else ObjectBacking)
            return stack.enter_context(contextlib.closing(made))

        yield make


class DiskAsTier:
    """The SSD tier under the backing tier's names."""

    def __init__(self, folder: Path) -> None:
        self._log = ValueLog(str(folder), 64 << 20)
        self.load, self.record, self.present = self._log.read, self._log.record, self._log.present
        self.remove, self.invalidate, self.close = self._log.remove, self._log.invalidate, self._log.close

    def store(self, batch: Sequence[tuple[Record, memoryview]]) -> list[Outcome]:
        return self._log.append(batch, durable=True)


@pytest.fixture(params=["log", "folder", "object"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], DiskAsTier | PackedBacking]]:
    """Opens the tier; closes it before it opens it again."""
    opened: list[DiskAsTier | PackedBacking] = []
    url, options = (str(tmp_path / "tier"), {})
    if request.param == "object":
        url, options = request.getfixturevalue("bucket")()

    def make() -> DiskAsTier | PackedBacking:
        for old in opened:
            old.close()
        if request.param == "log":
            opened.append(DiskAsTier(tmp_path / "log"))
        else:
            backing = open_backing(url, options=options)
            assert backing is not None
            opened.append(backing)
        return opened[-1]

    yield make
    for old in opened:
        old.close()


def load(tier: DiskAsTier | PackedBacking, names: list[bytes]) -> list[Outcome]:
    records = [tier.record(name) for name in names]
    sizes = [record.size if record else 0 for record in records]
    buffers = [aligned_buffer(n) if i % 2 else memoryview(bytearray(n)) for i, n in enumerate(sizes)]
    outcomes = tier.load(names, buffers)
    for name, buffer, outcome in zip(names, buffers, outcomes, strict=True):
        if outcome is OK:
            assert bytes(buffer) == content(name, buffer.nbytes)
    return outcomes


# --- what every tier below DRAM promises ----------------------------------------------------------------------------


def test_what_was_stored_is_found_whole_also_after_a_restart(tier: Callable[[], DiskAsTier | PackedBacking]) -> None:
    batch = Names(1).values([0, 1, 64, 4095, 4096, 70_001, 1 << 20, (2 << 20) + 3])
    names = [record.name for record, _ in batch]
    assert tier().store(batch) == [OK] * 8
    opened = tier()
    for _ in range(2):
        assert load(opened, names) == [OK] * 8
        assert load(opened, names[::-3]) == [OK] * 3
        assert [opened.record(name) for name in names] == [record for record, _ in batch]
        assert opened.present(names[0] + b"?" * 32 + names[7]) == b"\1\0\1"
        assert opened.record(b"?" * 32) is None


def test_a_value_is_stored_once_and_a_differing_one_is_refused(tier: Callable[[], DiskAsTier | PackedBacking]) -> None:
    opened = tier()
    one, other = made(b"n" * 32, 1000), made(b"m" * 32, 1000)
    assert opened.store([one]) == [OK]
    differing = (Record(one[0].name, SCOPE, 1000, other[0].sums), other[1])
    assert opened.store([one, differing, other]) == [PRESENT, DIFFERS, OK]
    assert load(opened, [b"n" * 32, b"m" * 32]) == [OK, OK]


def test_each_item_of_a_load_has_its_own_outcome(tier: Callable[[], DiskAsTier | PackedBacking]) -> None:
    opened = tier()
    opened.store([made(b"n" * 32, 1000), made(b"m" * 32, 1000), made(b"k" * 32, 1000)])
    buffers = [memoryview(bytearray(n)) for n in (999, 1001, 1000, 7)]
    assert opened.load([b"n" * 32, b"m" * 32, b"k" * 32, b"?" * 32], buffers) == [
        Outcome.TOO_BIG,
        Outcome.STALE,
        OK,
        MISSING,
    ]


def test_what_was_removed_stays_away_and_its_name_is_free(tier: Callable[[], DiskAsTier | PackedBacking]) -> None:
    opened, names = tier(), Names(2)
    batch = names.values([5000] * 10) + names.values([3000] * 5, scope=OTHER)
    keys = [record.name for record, _ in batch]
    opened.store(batch)
    assert opened.remove([keys[0], keys[1], b"?" * 32]) == [OK, OK, MISSING]
    assert opened.remove([keys[0]]) == [MISSING]
    assert opened.invalidate([OTHER]) == 5
    assert opened.invalidate([OTHER]) == 0
    assert opened.store([batch[0], batch[10]]) == [OK, OK]
    expected = [OK, MISSING] + [OK] * 8 + [OK] + [MISSING] * 4
    assert load(opened, keys) == expected
    assert load(tier(), keys) == expected


def test_a_record_that_does_not_fit_its_bytes_is_refused(tier: Callable[[], DiskAsTier | PackedBacking]) -> None:
    opened = tier()
    record, data = made(b"n" * 32, 1000)
    for wrong in (
        Record(record.name, SCOPE, 999, record.sums),
        Record(record.name, SCOPE, 1000, ()),
        Record(b"short", SCOPE, 1000, record.sums),
        Record(record.name, b"short", 1000, record.sums),
    ):
        with pytest.raises(InvalidInput):
            opened.store([(record, data), (wrong, data)])
    assert load(opened, [record.name]) == [MISSING]


def test_a_closed_tier_says_so(tier: Callable[[], DiskAsTier | PackedBacking]) -> None:
    opened = tier()
    opened.close()
    with pytest.raises(Unavailable):
        opened.store([made(b"n" * 32, 10)])


# --- what nodes that share a backing tier promise each other --------------------------------------------------------


def test_other_nodes_learn_of_packs_and_removals_by_refreshing(opened: Open) -> None:
    here, there, names = opened(), opened(), Names(3)
    batch = names.values([5000] * 6) + names.values([5000] * 6, scope=OTHER)
    keys = [record.name for record, _ in batch]
    here.store(batch[:4])
    here.store(batch[4:])
    assert load(there, keys) == [MISSING] * 12
    assert there.refresh() == 2
    assert there.refresh() == 0
    assert load(there, keys) == [OK] * 12
    assert there.remove(keys[:2]) == [OK, OK]
    assert here.invalidate([OTHER]) == 6
    assert load(here, keys) == [MISSING] * 2 + [OK] * 4 + [MISSING] * 6
    there.refresh()
    assert load(there, keys) == [MISSING] * 2 + [OK] * 4 + [MISSING] * 6
    assert load(opened(), keys) == [MISSING] * 2 + [OK] * 4 + [MISSING] * 6


def test_a_removal_covers_what_another_node_wrote_unseen(opened: Open) -> None:
    here, there = opened(), opened()
    one = made(b"n" * 32, 1000)
    here.store([one])
    assert there.remove([b"n" * 32]) == [OK]
    here.refresh()
    assert load(here, [b"n" * 32]) == [MISSING]


def test_packs_that_are_mostly_dead_are_rewritten_and_small_ones_joined(opened: Open) -> None:
    here, there, names = opened(), opened(), Names(4)
    batches = [names.values([20_000] * 10) for _ in range(5)]
    for batch in batches:
        here.store(batch)
    keys = [record.name for batch in batches for record, _ in batch]
    there.refresh()
    here.remove(keys[:7])
    assert here.compact() == 10
    assert here.compact() == 0
    assert here.counters["backing_packs_rewritten"] == 5
    expected = [MISSING] * 7 + [OK] * 43
    for node in (here, there, opened()):  # `there` only knows packs that are gone
        assert load(node, keys) == expected
    here.invalidate([SCOPE])
    assert here.compact() == 2
    assert load(opened(), keys) == [MISSING] * 50


def test_a_removal_by_a_node_that_only_knew_the_old_pack_counts_in_the_rewritten_one(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, names = opened(), opened(), Names(5)
    batch = names.values([20_000] * 10)
    keys = [record.name for record, _ in batch]
    here.store(batch)
    here.remove(keys[:7])
    there.refresh()
    assert here.compact() == 2
    monkeypatch.setattr(there, "refresh", lambda: 0)
    assert there.remove([keys[9]]) == [OK]
    here.refresh()
    for node in (here, opened()):
        assert load(node, keys) == [MISSING] * 7 + [OK] * 2 + [MISSING]


def test_copies_of_a_value_are_one_after_tidying(opened: Open) -> None:
    """Two nodes that did not know of each other stored the same values; each of them then tidies."""
    here, there, names = opened(), opened(), Names(14)
    batch = names.values([20_000] * 10)
    keys = [record.name for record, _ in batch]
    assert set(here.store(batch)) == set(there.store(batch)) == {OK}
    here.refresh()
    there.refresh()
    assert here.compact() == 2
    for node in (here, there, opened()):
        node.refresh()
        assert load(node, keys) == [OK] * 10
    assert there.compact() == 0
    there.remove(keys[:3])
    assert load(opened(), keys) == [MISSING] * 3 + [OK] * 7


def test_many_removals_become_one_and_still_count(opened: Open) -> None:
    here, there, names = opened(), opened(), Names(11)
    batch = names.values([20_000] * 60)
    keys = [record.name for record, _ in batch]
    here.store(batch)
    there.refresh()
    for key in keys[:20]:
        here.remove([key])
    assert here.compact() == 20
    assert len(here._objects.list("gone/")) == 1
    assert here.refresh() == there.refresh() == 0
    for node in (here, there, opened()):
        assert load(node, keys) == [MISSING] * 20 + [OK] * 40
    there.remove(keys[20:22])
    here.refresh()
    assert load(here, keys) == [MISSING] * 22 + [OK] * 38


def test_values_removed_or_invalidated_while_they_are_written_end_stale_everywhere(opened: Open) -> None:
    faults, names = PlannedFaults(), Names(6)
    here = opened(faults=faults)
    batch = names.values([5000] * 2) + names.values([5000], scope=OTHER)
    keys = [record.name for record, _ in batch]
    faults.arm("backing.store", "hang")
    outcomes: list[Outcome] = []
    writer = threading.Thread(target=lambda: outcomes.extend(here.store(batch)))
    writer.start()
    while not faults.hanging:
        writer.join(0.01)
    assert here.remove([keys[0]]) == [OK]
    assert here.invalidate([OTHER]) == 1
    faults.release()
    writer.join(30.0)
    assert outcomes == [Outcome.STALE, OK, Outcome.STALE]
    assert load(here, keys) == [MISSING, OK, MISSING]
    assert load(opened(), keys) == [MISSING, OK, MISSING]


def test_a_pack_whose_writer_died_before_publishing_is_nowhere(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    here = opened()
    put = here._objects.put

    def dies(name: str, parts: Sequence[memoryview]) -> None:
        if name.startswith("index/"):
            raise OSError(5, "the writer is gone")
        put(name, parts)

    monkeypatch.setattr(here._objects, "put", dies)
    one = made(b"n" * 32, 1000)
    assert here.store([one]) == [Outcome.UNREACHABLE]
    for node in (here, opened()):
        assert load(node, [b"n" * 32]) == [MISSING]
        assert len(node._objects.list("packs/")) == 1
    monkeypatch.setattr(here._objects, "put", put)
    assert here.store([one]) == [OK]
    assert load(here, [b"n" * 32]) == [OK]


@pytest.mark.parametrize(
    ("effect", "expected"), [("fail", Outcome.UNREACHABLE), ("flip", Outcome.DAMAGED), ("short", Outcome.DAMAGED)]
)
def test_a_failed_or_damaged_load_is_an_outcome(opened: Open, effect: str, expected: Outcome) -> None:
    faults = PlannedFaults()
    here = opened(faults=faults)
    one = made(b"n" * 32, 600_000)
    here.store([one])
    faults.arm("backing.load", effect)
    assert load(here, [b"n" * 32]) == [expected]
    assert load(here, [b"n" * 32]) == [OK if effect == "fail" else MISSING]


def test_objects_of_other_formats_are_ignored_and_kept(opened: Open) -> None:
    here = opened()
    here._objects.put("index/00000000000000aa.idx", [memoryview(b"\xff something new")])
    here._objects.put("gone/00000000000000bb.gone", [memoryview(b"\xff something new")])
    there = opened()
    assert there.counters["backing_ignored_objects"] == 2
    assert there.refresh() == 0
    assert there.store([made(b"n" * 32, 100)]) == [OK]
    there.compact()
    assert {item.name for item in there._objects.list("index/")} >= {"index/00000000000000aa.idx"}


def test_a_prefix_is_few_requests(opened: Open) -> None:
    here, names = opened(), Names(7)
    batch = names.values([8192] * 512)
    assert set(here.store(batch)) == {OK}
    assert set(load(here, [record.name for record, _ in batch])) == {OK}
    assert here.counters["backing_loads"] == 1
    assert len(here._objects.list("packs/")) == 1


def test_a_tenants_values_are_sealed_there_and_end_with_its_key(opened: Open, tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    ciphers, others = TenantCiphers(keys, bytes(range(32))), TenantCiphers(keys, bytes(range(32)))
    ciphers.admit("tenant", SCOPE)
    here, there = opened(cipher=ciphers), opened(cipher=others)
    batch = Names(8).values([100, 70_000]) + Names(9).values([5000], scope=OTHER)
    names = [record.name for record, _ in batch]
    assert here.store(batch) == [OK] * 3
    there.refresh()
    assert load(there, names) == [OK] * 3
    (pack,) = here._objects.list("packs/")
    data = here._objects.get(pack.name)
    assert content(names[2], 5000) in data
    assert content(names[1], 64) not in data
    assert load(opened(), names) == [Outcome.STALE, Outcome.STALE, OK]
    assert here.compact() == 0
    ciphers.forget("tenant")
    for node in (here, there):
        assert load(node, names) == [Outcome.STALE, Outcome.STALE, OK]
    assert here.store([made(b"x" * 32, 10)]) == [Outcome.STALE]


def test_a_node_learns_by_itself_when_told_to(tmp_path: Path) -> None:
    here, there = (open_backing(str(tmp_path), refresh_s=0.01) for _ in range(2))
    assert here is not None
    assert there is not None
    with contextlib.closing(here), contextlib.closing(there):
        here.store([made(b"n" * 32, 100)])
        end = time.monotonic() + 30.0
        while there.record(b"n" * 32) is None:
            assert time.monotonic() < end
            time.sleep(0.005)
    assert "backing-upkeep" not in {thread.name for thread in threading.enumerate()}


# --- opening --------------------------------------------------------------------------------------------------------


def test_a_url_says_where_or_is_refused(tmp_path: Path) -> None:
    assert open_backing("") is None
    for url in (str(tmp_path / "a"), f"file://{tmp_path}/b"):
        backing = open_backing(url)
        assert isinstance(backing, FolderBacking)
        backing.close()
    for url in ("ftp://host/path", "s3://", "s3:///prefix", "file://relative"):
        with pytest.raises(ConfigError):
            open_backing(url)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="name another"):
        open_backing(str(tmp_path / "file"))
    with pytest.raises(ConfigError):
        open_backing("s3://bucket", options={"no_such_option": "x"})


def test_an_object_store_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    from anabranch.store.values.live.backing.s3 import S3Objects

    monkeypatch.setattr(S3Objects, "RETRY", timedelta(milliseconds=200))
    options = {"aws_endpoint": "http://127.0.0.1:9", "aws_region": "x", "aws_access_key_id": "x"}
    with pytest.raises(Unavailable, match="cannot be reached"):
        open_backing("s3://bucket", options=options | {"aws_secret_access_key": "x"})


def test_a_full_file_system_is_an_outcome_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(FolderBacking(str(tmp_path / "b"))) as backing:
        batch = Names(12).values([1000, 2000])

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "no space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "writev", full)
            assert backing.store(batch) == [Outcome.FULL] * 2
        assert [path for path in (tmp_path / "b").rglob("*") if path.is_file()] == []
        assert backing.store(batch) == [OK, OK]


def test_a_large_batch_is_packs_of_64_mib(tmp_path: Path) -> None:
    with contextlib.closing(FolderBacking(str(tmp_path / "b"))) as backing:
        batch = Names(13).values([30 << 20] * 3)
        assert backing.store(batch) == [OK] * 3
        sizes = sorted(path.stat().st_size >> 20 for path in (tmp_path / "b" / "packs").iterdir())
        assert sizes == [30, 60]
        assert load(backing, [record.name for record, _ in batch]) == [OK] * 3


def test_a_folders_files_are_private_and_leave_nothing_behind(tmp_path: Path) -> None:
    with contextlib.closing(FolderBacking(str(tmp_path / "b"))) as backing:
        backing.store(Names(10).values([1000, 2000]))
        backing.remove(list(backing.names())[:1])
    files = [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode)[-3:] for path in files} == {"600"}
    assert sorted(path.suffix for path in files) == [".gone", ".idx", ".pack"]
    stale = tmp_path / "b" / "packs" / "0.pack.1.tmp"
    stale.write_bytes(b"x")
    os.utime(stale, (0, 0))
    FolderBacking(str(tmp_path / "b")).close()
    assert not stale.exists()
