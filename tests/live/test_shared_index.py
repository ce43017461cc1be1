"""The shared index: same answers compiled and in plain Python, and never a wrong place, whoever dies when."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.core.errors import ConfigError, InvalidInput, Unavailable
from anabranch.store.values.contracts import Place
from anabranch.store.values.live import index
from anabranch.store.values.live.index import SharedIndexReader, SharedIndexWriter
from anabranch.store.values.live.index_file import BYTES_A_SLOT, HEADER_BYTES, SLOT_BYTES
from anabranch.store.values.live.names import names_of
from anabranch.store.values.live.native import library

SCOPES = [bytes([number]) * 16 for number in range(3)]
NAME_KEY = bytes(range(32))
DEADLINE_S = 60.0


@pytest.fixture(params=["compiled", "python"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(index, "library", lambda: None)
    elif library() is None:
        pytest.skip("no compiled library")
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "index")


@pytest.fixture
def writer(kind: str, path: str) -> Iterator[SharedIndexWriter]:
    made = SharedIndexWriter.create(path, 200)
    yield made
    made.close()


def pool(count: int, seed: int = 1) -> list[bytes]:
    """Names, a third of them with one home."""
    chance = random.Random(seed)
    first = chance.randbytes(8)
    return [first + chance.randbytes(24) if i % 3 == 0 else chance.randbytes(32) for i in range(count)]


def slot_of(path: str, name: bytes) -> int:
    """Where the file has the slot that holds `name`."""
    at = Path(path).read_bytes().index(name, HEADER_BYTES) - 8
    assert (at - HEADER_BYTES) % SLOT_BYTES == 0
    return at


# --- one process ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["compiled", "python"])
def test_random_operations(writer: SharedIndexWriter, path: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a dict; the reader is of either kind."""
    if other == "python":
        monkeypatch.setattr(index, "library", lambda: None)
    elif library() is None:
        pytest.skip("no compiled library")
    else:
        monkeypatch.setattr(index, "library", library)
    reader = SharedIndexReader.attach(path)
    chance, names, model = random.Random(4), pool(300), dict[bytes, tuple[bytes, Place]]()
    for step in range(3_000):
        name = chance.choice(names)
        if chance.random() < 0.58:
            place = Place(chance.randrange(1 << 64), chance.randrange(1 << 64), step)
            scope = chance.choice(SCOPES)
            stored = writer.put(name, scope, place)
            assert stored == (name in model or len(model) < writer.capacity)
            if stored:
                model[name] = (scope, place)
        else:
            writer.discard(name)
            model.pop(name, None)
        if step % 500 == 0:
            check(reader, names, model)
    check(reader, names, model)
    assert len(model) > 100
    assert {name: (scope, place) for name, scope, place in writer.entries()} == model
    assert len(list(writer.entries())) == len(model) == len(writer) == len(reader)


def check(reader: SharedIndexReader, names: list[bytes], model: dict[bytes, tuple[bytes, Place]]) -> None:
    for scope in SCOPES:
        expected = [model[name][1] if model.get(name, (b"",))[0] == scope else None for name in names]
        assert reader.find_many(b"".join(names), scope) == expected
        assert reader.present(b"".join(names), scope) == bytes(place is not None for place in expected)
    for name, (scope, place) in model.items():
        assert reader.find(name, scope) == place
        assert reader.still(name, place)
        assert not reader.still(name, Place(place.offset, place.size, place.generation + 1))


@pytest.mark.parametrize("count", [0, 1, 100, 127, 128, 129, 256, 300, 5_000])
def test_keys_are_named_and_found_in_one_call(kind: str, path: str, count: int) -> None:
    writer = SharedIndexWriter.create(path, max(count, 1))
    for keys in ([f"key/{i}" for i in range(count)], [f"key\0{i}" for i in range(count)]):
        names = names_of(keys, NAME_KEY)
        for i in range(0, count, 3):
            writer.put(names[i * 32 : i * 32 + 32], SCOPES[i % 2], Place(i, 1, 0))
        expected = [i % 3 == 0 and i % 2 == 0 for i in range(count)]
        answer = writer.present_keys(keys, NAME_KEY, SCOPES[0])
        assert memoryview(answer).cast("?").tolist() == expected
        assert answer == writer.present(names, SCOPES[0])
        for i in range(0, count, 3):
            writer.discard(names[i * 32 : i * 32 + 32])
    with pytest.raises(InvalidInput, match=r"^key 1: .* has 0"):
        writer.present_keys(["a", "", "b"], NAME_KEY, SCOPES[0])
    writer.close()


def test_what_cannot_be_is_refused(writer: SharedIndexWriter) -> None:
    name, place = bytes(32), Place(0, 1, 0)
    wrong = [
        lambda: writer.find(bytes(31), SCOPES[0]),
        lambda: writer.present(name, b"short"),
        lambda: writer.put(name + name, SCOPES[0], place),
        lambda: writer.put(name, SCOPES[0], Place(0, 1, 1 << 32)),
        lambda: writer.discard(b""),
        lambda: writer.still(b"", place),
        lambda: writer.present_keys(["a"], bytes(31), SCOPES[0]),
    ]
    for call in wrong:
        with pytest.raises(InvalidInput):
            call()
    with pytest.raises(ConfigError):
        SharedIndexWriter.create("/nowhere/index", 10)
    with pytest.raises(ConfigError):
        SharedIndexWriter.create("/nowhere/index", 0)


def test_what_a_killed_creation_left_is_taken_over(kind: str, path: str) -> None:
    Path(path + ".new").write_bytes(b"half an index")
    SharedIndexWriter.create(path, 20).close()
    assert SharedIndexReader.attach(path).alive
    assert os.listdir(os.path.dirname(path)) == ["index"]


def test_one_writer_one_owner(writer: SharedIndexWriter, path: str) -> None:
    assert os.stat(path).st_mode & 0o777 == 0o600
    for again in (lambda: SharedIndexWriter.create(path, 5), lambda: SharedIndexWriter.reopen(path)):
        with pytest.raises(Unavailable, match="another process writes"):
            again()
    assert os.listdir(os.path.dirname(path)) == ["index"]
    link = path + "-link"
    os.symlink(path, link)
    with pytest.raises(Unavailable):
        SharedIndexReader.attach(link)


def test_a_new_index_ends_what_readers_of_the_old_one_find(writer: SharedIndexWriter, path: str) -> None:
    name, place = pool(1)[0], Place(4096, 4096, 1)
    writer.put(name, SCOPES[0], place)
    reader = SharedIndexReader.attach(path)
    assert reader.inode == os.stat(path).st_ino
    writer.close()
    assert reader.still(name, place)
    new = SharedIndexWriter.create(path, 50)
    new.put(name, SCOPES[0], place)
    assert not reader.alive
    assert not reader.still(name, place)
    assert reader.find(name, SCOPES[0]) is None
    assert reader.present(name, SCOPES[0]) == b"\0"
    fresh = SharedIndexReader.attach(path)
    assert fresh.alive
    assert fresh.still(name, place)
    fresh.close()
    assert fresh.find(name, SCOPES[0]) is None
    assert fresh.present_keys(["a", "b", "c"], NAME_KEY, SCOPES[0]) == bytes(3)
    assert not fresh.still(name, place)
    new.retire()
    new.close()
    with pytest.raises(Unavailable):
        SharedIndexReader.attach(path)
    assert SharedIndexWriter.reopen(path) is None


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "longer", "magic", "folder"])
def test_no_index_is_opened_from_a_damaged_file(kind: str, path: str, damage: str) -> None:
    SharedIndexWriter.create(path, 20).close()
    whole = Path(path).read_bytes()
    os.unlink(path)
    if damage == "folder":
        os.mkdir(path)
        with pytest.raises(ConfigError):
            SharedIndexWriter.create(path, 20)
        return
    if damage != "missing":
        content = {"empty": b"", "short": whole[:-8], "longer": whole + bytes(8), "magic": b"x" + whole[1:]}
        Path(path).write_bytes(content[damage])
    with pytest.raises(Unavailable):
        SharedIndexReader.attach(path)
    assert SharedIndexWriter.reopen(path) is None
    SharedIndexWriter.create(path, 20).close()
    assert SharedIndexReader.attach(path).alive


# --- a writer that died -----------------------------------------------------------------------------------------


def test_a_torn_entry_is_dropped_and_a_double_kept_once(writer: SharedIndexWriter, path: str) -> None:
    """What a kill can leave: one slot marked busy; one entry in two slots."""
    names = pool(120)
    for number, name in enumerate(names):
        writer.put(name, SCOPES[0], Place(number, 1, number))
    reader = SharedIndexReader.attach(path)
    writer.close()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        torn = slot_of(path, names[0])  # the head of a run of names with one home
        memory[torn] |= 1
        slots = (len(memory) - HEADER_BYTES) // BYTES_A_SLOT
        empty = next(number for number in range(slots) if not memory[HEADER_BYTES + number * SLOT_BYTES] & 3)
        double = (slot_of(path, names[1]) - HEADER_BYTES) // SLOT_BYTES
        for start, size in ((HEADER_BYTES, SLOT_BYTES), (HEADER_BYTES + slots * SLOT_BYTES, BYTES_A_SLOT - SLOT_BYTES)):
            there, here = start + empty * size, start + double * size
            memory[there : there + size] = memory[here : here + size]
    assert reader.find(names[0], SCOPES[0]) is None
    assert reader.find(names[3], SCOPES[0]) == Place(3, 1, 3)
    again = SharedIndexWriter.reopen(path)
    assert again is not None
    expected = {name: Place(number, 1, number) for number, name in enumerate(names) if number}
    assert {name: place for name, _, place in again.entries()} == expected
    assert len(list(again.entries())) == len(expected) == len(again)
    assert reader.alive
    assert [reader.find(name, SCOPES[0]) for name in names] == [expected.get(name) for name in names]
    for name in names:
        again.discard(name)
    assert list(again.entries()) == []
    again.close()


KILLED_WRITER = """
import random, sys
from anabranch.store.values.contracts import Place
from anabranch.store.values.live.index import SharedIndexWriter
path, seed = sys.argv[1], int(sys.argv[2])
chance = random.Random(seed)
names = [random.Random(number).randbytes(32) for number in range(400)]
writer = SharedIndexWriter.reopen(path) or SharedIndexWriter.create(path, 300)
print("ready", flush=True)
generation = seed << 24
while True:
    name = chance.choice(names)
    if chance.random() < 0.6:
        generation += 1
        first = int.from_bytes(name[:4], "little")
        writer.put(name, name[:16], Place(first * generation, first + generation, generation))
    else:
        writer.discard(name)
"""


def test_a_writer_killed_at_any_moment_leaves_only_whole_entries(path: str) -> None:
    names = [random.Random(number).randbytes(32) for number in range(400)]
    reader: SharedIndexReader | None = None
    for seed in range(1, 7):
        command = [sys.executable, "-c", KILLED_WRITER, path, str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            reader = reader or SharedIndexReader.attach(path)
            found, until = 0, time.monotonic() + DEADLINE_S
            while found < 2_000 and time.monotonic() < until:
                found += sum(whole(name, reader.find(name, name[:16])) for name in names)
            process.send_signal(signal.SIGKILL)
        assert found >= 2_000
    writer = SharedIndexWriter.reopen(path)
    assert writer is not None
    assert reader is not None
    entries = list(writer.entries())
    assert len(entries) == len({name for name, _, _ in entries}) == len(writer) > 0
    for name, scope, place in entries:
        assert scope == name[:16]
        assert whole(name, place)
        assert reader.find(name, scope) == place
    for name in names:
        writer.discard(name)
    assert len(writer) == 0
    assert all(writer.put(name, name[:16], Place(0, 1, 0)) for name in names[: writer.capacity])
    writer.close()


def whole(name: bytes, place: Place | None) -> bool:
    """False: not there. Fails if the place is not one that the writer gave to this name."""
    if place is not None:
        first = int.from_bytes(name[:4], "little")
        assert (place.offset, place.size) == (first * place.generation, first + place.generation)
    return place is not None


# --- readers while the writer works -----------------------------------------------------------------------------

EXTENT, EXTENTS = 4096, 16
FILL = struct.Struct("<32sI")
READER = """
import mmap, random, sys
from anabranch.store.values.live import index
if sys.argv[4] == "python":
    index.library = lambda: None
reader = index.SharedIndexReader.attach(sys.argv[1])
with open(sys.argv[2], "rb") as file:
    arena = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
names = [random.Random(number).randbytes(32) for number in range(40)]
scope, chance, vouched, doubted, wrong = bytes(16), random.Random(int(sys.argv[3])), 0, 0, 0
print("ready", flush=True)
while True:
    for _ in range(500):
        name = chance.choice(names)
        place = reader.find(name, scope)
        if place is None:
            continue
        data = arena[place.offset : place.offset + place.size]
        if not reader.still(name, place):
            doubted += 1
            continue
        vouched += 1
        unit = name + place.generation.to_bytes(4, "little")
        wrong += data != (unit * (len(data) // len(unit) + 1))[: len(data)]
    print(vouched, doubted, wrong, flush=True)
"""


class Churn:
    """A node in small: extents of an arena change hands all the time, always out of the index first."""

    def __init__(self, folder: Path) -> None:
        self.path, self.arena_path = str(folder / "index"), str(folder / "arena")
        self.names = [random.Random(number).randbytes(32) for number in range(40)]
        self.writer = SharedIndexWriter.create(self.path, EXTENTS)
        Path(self.arena_path).write_bytes(bytes(EXTENT * EXTENTS))
        with open(self.arena_path, "r+b") as file:
            self.arena = mmap.mmap(file.fileno(), 0)
        self.chance, self.generation = random.Random(9), 0
        self.holders: list[bytes | None] = [None] * EXTENTS

    def step(self) -> None:
        extent, name = self.chance.randrange(EXTENTS), self.chance.choice(self.names)
        if name in self.holders:
            return
        old = self.holders[extent]
        if old is not None:
            self.writer.discard(old)
        self.generation += 1
        size, at = self.chance.randint(36, EXTENT), extent * EXTENT
        unit = FILL.pack(name, self.generation)
        self.arena[at : at + size] = (unit * (size // len(unit) + 1))[:size]
        assert self.writer.put(name, bytes(16), Place(at, size, self.generation))
        self.holders[extent] = name

    def close(self) -> None:
        self.writer.close()
        self.arena.close()


def test_no_reader_vouches_for_wrong_bytes_and_a_dead_one_holds_nothing_up(tmp_path: Path) -> None:
    kinds = ["python", "python"] if library() is None else ["compiled", "python"]
    churn = Churn(tmp_path)
    command = [sys.executable, "-c", READER, churn.path, churn.arena_path]
    readers = [
        subprocess.Popen([*command, str(number), kind], stdout=subprocess.PIPE, text=True)
        for number, kind in enumerate(kinds)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            for _ in range(100):
                churn.step()
        for reader in readers:
            reader.kill()
        for _ in range(1_000):
            churn.step()
        results = [reader.communicate(timeout=DEADLINE_S)[0].splitlines() for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
            if reader.stdout is not None:
                reader.stdout.close()
        churn.close()
    whole_lines = [[line for line in lines if len(line.split()) == 3] for lines in results]
    counts = [tuple(map(int, lines[-1].split())) for lines in whole_lines]
    assert all(vouched > 0 for vouched, _, _ in counts), counts
    assert [wrong for _, _, wrong in counts] == [0, 0]
