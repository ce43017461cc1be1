"""The value log on a real file system: kills, full disks, damage, hangs, limits."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from value_maker import SCOPE, Names, content, made

from anabranch.core.errors import ConfigError, Unavailable
from anabranch.store.values.live.log import ValueLog
from anabranch.store.values.live.log.direct import aligned_buffer
from anabranch.store.values.outcome import Outcome
from anabranch.testing.faults import PlannedFaults

MIB = 1 << 20
OK, FULL, MISSING = Outcome.OK, Outcome.FULL, Outcome.MISSING


def wait_for(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def check(log: ValueLog, names: list[bytes]) -> list[Outcome]:
    """Outcomes of a read of everything; what is OK has exactly its own bytes."""
    records = [log.record(name) for name in names]
    buffers = [
        aligned_buffer(r.size if r else 0) if i % 2 else memoryview(bytearray(r.size if r else 0))
        for i, r in enumerate(records)
    ]
    outcomes = log.read(names, buffers)
    for name, buffer, outcome in zip(names, buffers, outcomes, strict=True):
        if outcome is OK:
            assert bytes(buffer) == content(name, buffer.nbytes)
    return outcomes


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def test_a_full_log_keeps_within_its_bytes_forgets_whole_segments_and_says_which_values_left(tmp_path: Path) -> None:
    names, alive = Names(1), set()
    with contextlib.closing(ValueLog(str(tmp_path / "log"), 32 * MIB)) as log:
        for _ in range(25):
            batch = names.values([64, 5000, 65_536, 300_000, MIB, 2 * MIB + 5])
            assert set(log.append(batch, durable=False)) == {OK}
            alive |= {record.name for record, _ in batch}
            alive -= set(log.take_evicted())
            assert on_disk(tmp_path / "log") <= 32 * MIB + 4096
            assert set(log.names()) == alive
        assert set(check(log, sorted(alive))) == {OK}
        assert log.used_bytes <= 32 * MIB
        assert log.counters["log_evicted_segments"] > 10
        assert log.state == ""
    assert oct((tmp_path / "log").stat().st_mode)[-3:] == "700"
    assert {oct(path.stat().st_mode)[-3:] for path in (tmp_path / "log").iterdir()} == {"600"}


def test_small_values_share_pages_and_files_even_one_by_one(tmp_path: Path) -> None:
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB)) as log:
        batch = [made(n.to_bytes(32, "big"), 64) for n in range(1, 5001)]
        assert set(log.append(batch[:4800], durable=False)) == {OK}
        assert {log.append([one], durable=False)[0] for one in batch[4800:]} == {OK}
        assert log.used_bytes == MIB
        assert set(check(log, [record.name for record, _ in batch])) == {OK}


def test_a_prefix_of_512_blocks_is_at_most_32_reads_and_many_blocks_are_few_files(tmp_path: Path) -> None:
    """Scenario test 19, in small."""
    with contextlib.closing(ValueLog(str(tmp_path), 256 * MIB)) as log:
        batch = [made(n.to_bytes(32, "big"), 32 << 10, aligned=True) for n in range(1, 1025)]
        for at in range(0, 1024, 64):
            log.append(batch[at : at + 64], durable=False)
        before = log.counters["log_reads"]
        assert set(check(log, [record.name for record, _ in batch[200:712]])) == {OK}
        assert log.counters["log_reads"] - before <= 32
        assert len(list(tmp_path.glob("*.seg"))) <= 3


def test_what_is_there_is_not_written_twice_and_other_bytes_are_refused(tmp_path: Path) -> None:
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB)) as log:
        one, other = made(b"n" * 32, 1000), made(b"m" * 32, 1000)
        assert log.append([one, one], durable=True) == [OK, Outcome.PRESENT]
        differing = (one[0].__class__(one[0].name, SCOPE, 1000, other[0].sums), other[1])
        assert log.append([one, differing, other], durable=True) == [Outcome.PRESENT, Outcome.DIFFERS, OK]
        assert log.append([made(b"b" * 32, 17 * MIB)], durable=True) == [Outcome.TOO_BIG]
        assert log.read([b"n" * 32, b"m" * 32, b"x" * 32], [memoryview(bytearray(n)) for n in (999, 1001, 5)]) == [
            Outcome.TOO_BIG,
            Outcome.STALE,
            MISSING,
        ]
        assert log.present(b"n" * 32 + b"x" * 32 + b"m" * 32) == b"\1\0\1"


def test_removed_and_invalidated_values_stay_away_after_a_kill_and_new_ones_of_their_names_do_not(
    tmp_path: Path,
) -> None:
    names = Names(3)
    log = ValueLog(str(tmp_path / "a"), 16 * MIB)
    batch, other = names.values([5000] * 20), names.values([5000] * 20, scope=b"another scope...")
    log.append(batch + other, durable=True)
    keys, others = [r.name for r, _ in batch], [r.name for r, _ in other]
    assert log.remove([*keys[:5], b"?" * 32]) == [OK] * 5 + [MISSING]
    assert log.invalidate([b"another scope..."]) == 20
    again = [batch[0], other[0]]
    assert log.append(again, durable=True) == [OK, OK]
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # as a kill at this moment would leave it
    log.close()
    with contextlib.closing(ValueLog(str(tmp_path / "b"), 16 * MIB)) as killed:
        assert check(killed, keys) == [OK] + [MISSING] * 4 + [OK] * 15
        assert check(killed, others) == [OK] + [MISSING] * 19
        assert killed.take_evicted() == []
    with pytest.raises(Unavailable):
        log.append(again, durable=True)


def test_a_value_removed_or_invalidated_while_it_is_written_ends_stale_and_stays_away(tmp_path: Path) -> None:
    faults = PlannedFaults()
    log = ValueLog(str(tmp_path), 16 * MIB, faults=faults)
    batch = Names(4).values([MIB, MIB]) + Names(5).values([MIB], scope=b"another scope...")
    faults.arm("log.write", "hang")
    outcomes: list[Outcome] = []
    writer = threading.Thread(target=lambda: outcomes.extend(log.append(batch, durable=True)))
    writer.start()
    wait_for(lambda: faults.hanging == 1)
    assert log.remove([batch[0][0].name]) == [OK]
    assert log.invalidate([b"another scope..."]) == 1
    faults.release()
    writer.join(30.0)
    assert outcomes == [Outcome.STALE, OK, Outcome.STALE]
    names = [record.name for record, _ in batch]
    assert check(log, names) == [MISSING, OK, MISSING]
    log.close()
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB)) as again:
        assert check(again, names) == [MISSING, OK, MISSING]


def test_durable_values_survive_kills_at_random_moments(tmp_path: Path) -> None:
    """Scenario test 14: at least 99 % of what was acknowledged durable, nothing torn, nothing removed comes back."""
    rng, folder, capacity = random.Random(6), tmp_path / "log", 1 << 30
    said: dict[bytes, set[bytes]] = {b"+": set(), b"?": set(), b"-": set()}
    command = [sys.executable, str(Path(__file__).with_name("value_log_writer.py")), str(folder), str(capacity)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for seed in range(40):
            writer.stdin.write(b"%d\n" % seed)
            writer.stdin.flush()
            child, left = 0, rng.randrange(30)
            while (word := writer.stdout.read(33))[:1] != b".":
                if word[:1] == b"#":
                    child = int(word[1:])
                else:
                    said[word[:1]].add(word[1:])
                left -= 1
                if left < 0 and child:
                    time.sleep(rng.random() * 0.01)
                    os.kill(child, signal.SIGKILL)
                    left = 1 << 30
        writer.stdin.close()
    kept, gone = said[b"+"] - said[b"?"], said[b"-"]
    with contextlib.closing(ValueLog(str(folder), capacity, segment_bytes=4 * MIB)) as log:
        outcomes = check(log, sorted(kept))
        assert len(kept) > 100
        assert outcomes.count(OK) >= 0.99 * len(kept)
        assert Outcome.DAMAGED not in check(log, list(log.names()))
        assert not gone & set(log.names())
        assert log.counters["log_damaged"] == 0
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".seg") == ["lock", "removed.log"]


def test_a_crash_of_the_machine_loses_nothing_durable_whatever_sectors_were_written(tmp_path: Path) -> None:
    """After a flush, any mixture of old and new sectors may be on the disk."""
    rng, names = random.Random(22), Names(22)
    durable: list[bytes] = []
    with contextlib.closing(ValueLog(str(tmp_path / "log"), 16 * MIB)) as log:
        for _ in range(4):
            batch = names.values([64, 100, 5000, 4096, 70_000])
            log.append(batch, durable=True)
            durable += [record.name for record, _ in batch]
        shutil.copytree(tmp_path / "log", tmp_path / "flushed")
        later = [names.values([64, 100, 5000, 4096, 70_000]) for _ in range(4)]
        for batch in later:
            log.append(batch, durable=False)
        shutil.copytree(tmp_path / "log", tmp_path / "written")
    others = [record.name for batch in later for record, _ in batch]
    (segment,) = (path.name for path in (tmp_path / "log").glob("*.seg"))
    old, new = ((tmp_path / state / segment).read_bytes() for state in ("flushed", "written"))
    for attempt in range(12):
        crashed = tmp_path / f"crashed-{attempt}"
        shutil.copytree(tmp_path / "flushed", crashed)
        share = attempt / 11
        sectors = ((new if rng.random() < share else old)[at : at + 512] for at in range(0, len(old), 512))
        (crashed / segment).write_bytes(b"".join(sectors))
        with contextlib.closing(ValueLog(str(crashed), 16 * MIB)) as again:
            assert set(check(again, durable)) == {OK}
            assert set(check(again, others)) <= {OK, MISSING, Outcome.DAMAGED}
            assert again.append(later[0], durable=True).count(FULL) == 0
            assert set(check(again, durable)) == {OK}
        with contextlib.closing(ValueLog(str(crashed), 16 * MIB)) as again:
            assert set(check(again, durable + [record.name for record, _ in later[0]])) == {OK}


def test_many_values_are_recovered_from_the_index_areas_alone(tmp_path: Path) -> None:
    with contextlib.closing(ValueLog(str(tmp_path), 64 * MIB)) as log:
        batch = [made(n.to_bytes(32, "big"), 32) for n in range(1, 20_001)]
        assert set(log.append(batch, durable=True)) == {OK}
    with contextlib.closing(ValueLog(str(tmp_path), 64 * MIB)) as again:
        assert len(list(again.names())) == 20_000
        assert again.counters["log_reads"] == 0
        assert set(check(again, [record.name for record, _ in batch[::7]])) == {OK}


def test_restart_goes_on_in_the_last_segment(tmp_path: Path) -> None:
    names = Names(7)
    written: list[bytes] = []
    for _ in range(6):
        with contextlib.closing(ValueLog(str(tmp_path), 64 * MIB)) as log:
            batch = names.values([100, 5000, 65_536 + 9])
            assert set(log.append(batch, durable=False)) == {OK}
            written += [record.name for record, _ in batch]
            assert set(check(log, written)) == {OK}
    assert len(list(tmp_path.glob("*.seg"))) == 1


def test_other_formats_damaged_segments_and_foreign_files_are_left_alone_or_forgotten_never_misread(
    tmp_path: Path,
) -> None:
    batch = Names(8).values([50_000] * 40)
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB)) as log:
        log.append(batch, durable=True)
    segments = sorted(tmp_path.glob("v1-*.seg"))
    (tmp_path / "v2-0000000000000001.seg").write_bytes(segments[0].read_bytes())
    (tmp_path / "notes.txt").write_text("mine")
    damaged = bytearray(segments[0].read_bytes())
    damaged[60_000] ^= 1
    damaged[-3] ^= 1
    segments[0].write_bytes(damaged)
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB)) as log:
        assert log.counters["log_ignored_segments"] == 1
        assert set(check(log, [record.name for record, _ in batch])) == {OK, MISSING}
        log.append(Names(9).values([MIB] * 30), durable=False)
        assert on_disk(tmp_path) <= 16 * MIB + 4096
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "v2-0000000000000001.seg").exists()


def test_a_kill_while_a_segment_is_made_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "v1-0000000000000001.seg").write_bytes(b"")
    (tmp_path / "v1-0000000000000002.seg").write_bytes(bytes(5000))
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB)) as log:
        assert log.used_bytes == 0
        assert list(tmp_path.glob("*.seg")) == []


def test_the_record_of_removals_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.store.values.live.log.removals.REWRITE_BYTES", 2000)
    names = Names(21)
    with contextlib.closing(ValueLog(str(tmp_path), 2 * MIB)) as log:
        gone: list[bytes] = []
        for _ in range(60):
            batch = names.values([40_000] * 4)
            assert set(log.append(batch, durable=False)) == {OK}
            log.remove([record.name for record, _ in batch[:2]])
            gone += [record.name for record, _ in batch[:2]]
        assert (tmp_path / "removed.log").stat().st_size < 4500
        alive = set(log.names())
    with contextlib.closing(ValueLog(str(tmp_path), 2 * MIB)) as again:
        assert set(again.names()) == alive
        assert not alive & set(gone)


def test_a_second_process_and_impossible_sizes_are_refused_with_a_remedy(tmp_path: Path) -> None:
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB)), pytest.raises(ConfigError, match="another node"):
        ValueLog(str(tmp_path), 16 * MIB)
    ValueLog(str(tmp_path), 16 * MIB).close()
    with pytest.raises(ConfigError, match="1 MiB"):
        ValueLog(str(tmp_path / "b"), 1000)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "big").write_bytes(bytes(5 * MIB))
    with pytest.raises(ConfigError, match="whole disk"):
        ValueLog(str(tmp_path / "d"), 1 << 60)
    with pytest.raises(ConfigError, match="raise ssd_bytes"):
        ValueLog(str(tmp_path / "c"), 5 * MIB)
    with pytest.raises(ConfigError, match="cannot be used"):
        ValueLog(str(tmp_path / "c" / "big"), 16 * MIB)


def test_s14_a_smaller_capacity_after_restart(tmp_path: Path) -> None:
    names = Names(10)
    first = names.values([MIB] * 20)
    with contextlib.closing(ValueLog(str(tmp_path), 32 * MIB)) as log:
        log.append(first, durable=True)
    with contextlib.closing(ValueLog(str(tmp_path), 12 * MIB)) as log:
        assert on_disk(tmp_path) <= 12 * MIB + 4096
        outcomes = check(log, [record.name for record, _ in first])
        assert 5 <= outcomes.count(OK) <= 12
        assert outcomes[-1] is OK
        for _ in range(3):
            assert set(log.append(names.values([MIB] * 4), durable=False)) == {OK}
            assert on_disk(tmp_path) <= 12 * MIB + 4096


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB; where mounting is not allowed, the same through a limit on files is not possible, so
    the test runs on faults alone (`test_s15_writes_pause…`)."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_s15_a_full_file_system_is_a_smaller_log(small_disk: Path) -> None:
    names = Names(11)
    with contextlib.closing(ValueLog(str(small_disk / "log"), 23 * MIB)) as log:
        (small_disk / "others").write_bytes(bytes(10 * MIB))
        batches = [names.values([MIB, 100_000]) for _ in range(20)]
        for batch in batches:
            assert set(log.append(batch, durable=True)) == {OK}
            assert log.state == ""
        assert set(check(log, list(log.names()))) == {OK}
        assert log.used_bytes <= 14 * MIB
        assert log.counters["log_forced_evictions"] >= 1
        assert MISSING in check(log, [record.name for record, _ in batches[0]])


def test_s15_writes_pause_when_nothing_helps_and_go_on_when_space_returns(tmp_path: Path) -> None:
    faults, names = PlannedFaults(), Names(12)
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB, faults=faults, retry_s=0.0)) as log:
        first = names.values([MIB // 2])
        log.append(first, durable=True)
        faults.arm("log.grow", "fail", times=3)
        late = names.values([MIB // 2] * 2)
        assert log.append(late[:1], durable=True) == [OK]  # the first segment was evicted for it
        assert log.counters["log_forced_evictions"] == 1
        big = names.values([3 * MIB])
        assert log.append(big, durable=True) == [FULL]
        assert "full" in log.state
        assert log.append(late[1:], durable=True) == [OK]
        assert log.state == ""
        assert log.append(big, durable=True) == [OK]


def test_while_writes_pause_nothing_is_tried_and_reads_go_on(tmp_path: Path) -> None:
    faults, names = PlannedFaults(), Names(13)
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB, faults=faults, retry_s=3600.0)) as log:
        first = names.values([5000, 100_000])
        log.append(first, durable=True)
        faults.arm("log.write", "fail")
        assert log.append(names.values([100]), durable=True) == [FULL]
        assert "input/output error" in log.state
        assert log.append(names.values([100]), durable=False) == [FULL]
        assert set(check(log, [record.name for record, _ in first])) == {OK}


@pytest.mark.parametrize("effect", ["fail", "short"])
def test_a_failed_write_leaves_nothing_to_be_found(tmp_path: Path, effect: str) -> None:
    faults, names = PlannedFaults(), Names(14)
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB, faults=faults, retry_s=0.0)) as log:
        batch = names.values([5000, 100_000, 64])
        faults.arm("log.write", effect)
        assert log.append(batch, durable=True) == [FULL] * 3
        assert check(log, [record.name for record, _ in batch]) == [MISSING] * 3
        assert log.append(batch, durable=True) == [OK] * 3
        assert set(check(log, [record.name for record, _ in batch])) == {OK}


def test_a_failed_flush_is_no_durable_write(tmp_path: Path) -> None:
    faults = PlannedFaults()
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB, faults=faults, retry_s=0.0)) as log:
        batch = Names(15).values([5000, 100_000])
        faults.arm("log.sync", "fail")
        assert log.append(batch, durable=True) == [FULL, FULL]
        assert "flush" in log.state
        assert sorted(log.take_evicted()) == sorted(record.name for record, _ in batch)
        assert log.append(batch, durable=True) == [OK] * 2
        assert log.counters["log_syncs"] == 1


def test_s16_one_flipped_byte_is_damage_and_forgotten_for_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = PlannedFaults()
    batch = Names(16).values([600_000, 64, 100_000])
    names = [record.name for record, _ in batch]
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB, faults=faults)) as log:
        faults.arm("log.write", "flip")
        assert log.append(batch, durable=True) == [OK] * 3
        outcomes = check(log, names)
        assert sorted(outcomes) == [OK, OK, Outcome.DAMAGED]
        assert any("damaged" in record.message for record in caplog.records)
        assert check(log, names).count(MISSING) == 1
        assert log.take_evicted() == [names[outcomes.index(Outcome.DAMAGED)]]
        assert log.counters["log_damaged"] == 1
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB)) as log:
        assert check(log, names).count(MISSING) == 1


@pytest.mark.parametrize(("effect", "expected"), [("fail", Outcome.UNREACHABLE), ("short", Outcome.DAMAGED)])
def test_a_failed_read_is_an_outcome(tmp_path: Path, effect: str, expected: Outcome) -> None:
    faults = PlannedFaults()
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB, faults=faults)) as log:
        batch = Names(17).values([100_000])
        log.append(batch, durable=True)
        faults.arm("log.read", effect)
        assert check(log, [batch[0][0].name]) == [expected]
        assert check(log, [batch[0][0].name]) == [OK if effect == "fail" else MISSING]


def test_s17_a_hung_read_harms_nobody_else(tmp_path: Path) -> None:
    faults, names = PlannedFaults(), Names(18)
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB, faults=faults)) as log:
        batch = names.values([3 * MIB] * 4)
        log.append(batch, durable=False)
        keys = [record.name for record, _ in batch]
        faults.arm("log.read", "hang", times=2)
        late: list[Outcome] = []
        stuck = threading.Thread(target=lambda: late.extend(check(log, keys)))
        stuck.start()
        wait_for(lambda: faults.hanging == 2)  # both threads of that call
        threads = threading.active_count()
        for _ in range(3):
            assert set(check(log, keys)) == {OK}
        for _ in range(12):
            assert set(log.append(names.values([MIB]), durable=False)) == {OK}
        assert threading.active_count() == threads
        assert late == []
        faults.release()
        stuck.join(30.0)
        assert set(late) == {OK}  # its segments were not reused meanwhile


def test_waiting_durable_appends_share_a_flush(tmp_path: Path) -> None:
    faults, names = PlannedFaults(), Names(19)
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB, faults=faults)) as log:
        faults.arm("log.sync", "hang")
        batches = [names.values([2000]) for _ in range(8)]
        outcomes: list[Outcome] = []
        threads = [threading.Thread(target=lambda b=b: outcomes.extend(log.append(b, durable=True))) for b in batches]
        threads[0].start()
        wait_for(lambda: faults.hanging == 1)
        for thread in threads[1:]:
            thread.start()
        wait_for(lambda: log.counters["log_written_values"] == 8)
        faults.release()
        for thread in threads:
            thread.join(30.0)
        assert outcomes == [OK] * 8
        assert log.counters["log_syncs"] <= 3


def test_many_threads_never_get_another_values_bytes(tmp_path: Path) -> None:
    keys = [random.Random(n).randbytes(32) for n in range(300)]
    size = {key: random.Random(key).choice((64, 4096, 70_000, 300_000)) for key in keys}
    end = time.monotonic() + 1.5
    wrong: list[str] = []
    with contextlib.closing(ValueLog(str(tmp_path), 4 * MIB)) as log:

        def churn(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < end:
                some = rng.sample(keys, 8)
                match rng.randrange(8):
                    case 0:
                        log.remove(some[:2])
                    case 1 | 2 | 3:
                        log.append([made(key, size[key], aligned=rng.random() < 0.5) for key in some], durable=False)
                    case _:
                        buffers = [memoryview(bytearray(size[key])) for key in some]
                        for key, buffer, outcome in zip(some, buffers, log.read(some, buffers), strict=True):
                            if outcome not in (OK, MISSING) or (
                                outcome is OK and bytes(buffer) != content(key, size[key])
                            ):
                                wrong.append(outcome.name)

        threads = [threading.Thread(target=churn, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert wrong == []
        assert log.state == ""
        assert log.counters["log_evicted_segments"] > 0
        assert set(check(log, list(log.names()))) == {OK}
    assert on_disk(tmp_path) <= 4 * MIB + 8192


def test_no_room_even_for_a_removal_deletes_the_values_with_their_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(ValueLog(str(tmp_path), 16 * MIB)) as log:
        batch = Names(20).values([50_000] * 10)
        log.append(batch, durable=True)

        def refuse(*_: object, **__: object) -> None:
            raise OSError(28, "no space left on device")

        monkeypatch.setattr(log._removals, "append", refuse)
        assert log.invalidate([SCOPE]) == 10
        assert list(tmp_path.glob("*.seg")) == []
        assert log.append(batch, durable=True) == [OK] * 10
