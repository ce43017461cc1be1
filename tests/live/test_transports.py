"""One suite for every transport whose library is installed; the others are named by one skipped test each."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import xxhash
from transport_peer import REGION, mapped, pattern

from anabranch.core.errors import ConfigError, InvalidInput, LayoutMismatch, MissingExtra, Unavailable, WireError
from anabranch.transfer.live.transports.choice import NAMES, open_transport
from anabranch.transfer.live.transports.devices import rdma_devices, require_rdma
from anabranch.transfer.regions import Description, describe
from anabranch.transfer.transport import Move, Moved, Transport

SIZE = 3 << 20
WAIT_S = 60.0
INSTALLED = [name for name in NAMES if name in ("shm", "tcp") or find_spec(name) is not None]


class PeerProcess:
    def __init__(self, kind: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("transport_peer.py"))]
            + [kind, "127.0.0.1", str(folder / "there"), str(SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.description = base64.b64decode(self._line())

    def ask(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._line()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(20)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=20)

    def _line(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("PEER "):
                return line.removeprefix("PEER ").strip()
        raise AssertionError(f"the peer process ended with {self._process.wait(20)}")


class Pair:
    """This side with a region "here" of zeros, and a peer with a region REGION of pattern(1)."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.transport: Transport = open_transport(kind)
        self.path = str(folder / "here")
        self.memory = mapped(self.path, SIZE)
        self.transport.register("here", memoryview(self.memory), self.path)
        self.peer = PeerProcess(kind, folder)
        self.name = self.transport.connect(self.peer.description)

    def close(self) -> None:
        self.transport.close()
        self.memory.close()
        self.peer.close()


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_opened_here(name: str) -> None:
    try:
        open_transport(name).close()
    except MissingExtra as error:
        pytest.skip(f"none of this suite runs on {name}: {error}")


@pytest.fixture(params=INSTALLED)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(request.param, tmp_path)
    try:
        yield pair
    finally:
        pair.close()


def test_reads_bring_the_peers_bytes_and_touch_nothing_else(pair: Pair) -> None:
    truth = pattern(1, SIZE)
    moves = [
        Move(REGION, 0, "here", 100, 1),
        Move(REGION, 4096, "here", 8192, 700_000),  # more than a slice, not a multiple of anything
        Move(REGION, SIZE - 5, "here", SIZE - 5, 5),
        Move(REGION, 17, "here", 0, 0),
    ]
    expected = bytearray(SIZE)
    for move in moves:
        expected[move.local_offset : move.local_offset + move.size] = truth[move.offset : move.offset + move.size]
    assert pair.transport.read(pair.name, moves).wait(WAIT_S) == [Moved.OK] * 4
    assert pair.memory[:] == bytes(expected)


def test_writes_arrive_in_the_peers_memory(pair: Pair) -> None:
    pair.memory[:] = pattern(2, SIZE)
    moves = [Move(REGION, 1000, "here", 0, 1_500_000), Move(REGION, SIZE - 9, "here", 50, 9)]
    assert pair.transport.write(pair.name, moves).wait(WAIT_S) == [Moved.OK, Moved.OK]
    expected = bytearray(pattern(1, SIZE))
    expected[1000:1_501_000] = pattern(2, SIZE)[:1_500_000]
    expected[-9:] = pattern(2, SIZE)[50:59]
    assert pair.peer.ask(f"sum 0 {SIZE}") == f"{xxhash.xxh3_64_intdigest(bytes(expected)):x}"


def test_a_whole_region_there_and_back_by_many_moves(pair: Pair) -> None:
    pair.peer.ask("fill 7")
    step = SIZE // 48
    moves = [Move(REGION, at, "here", SIZE - step - at, step) for at in range(0, SIZE, step)]
    assert set(pair.transport.read(pair.name, moves).wait(WAIT_S)) == {Moved.OK}
    truth = pattern(7, SIZE)
    assert pair.memory[:] == b"".join(truth[at : at + step] for at in reversed(range(0, SIZE, step)))
    assert set(pair.transport.write(pair.name, moves).wait(WAIT_S)) == {Moved.OK}
    assert pair.peer.ask(f"sum 0 {SIZE}") == f"{xxhash.xxh3_64_intdigest(truth):x}"


def test_what_the_peer_does_not_have_is_refused_and_the_rest_arrives(pair: Pair) -> None:
    moves = [
        Move(REGION, SIZE - 10, "here", 0, 11),
        Move("nowhere", 0, "here", 0, 1),
        Move(REGION, 5, "here", 5, 10),
        Move(REGION, -1, "here", 0, 1),
    ]
    results = pair.transport.read(pair.name, moves).wait(WAIT_S)
    assert results == [Moved.REFUSED, Moved.REFUSED, Moved.OK, Moved.REFUSED]
    assert pair.memory[:20] == bytes(5) + pattern(1, SIZE)[5:15] + bytes(5)


@pytest.mark.parametrize(
    ("move", "says"),
    [
        (Move(REGION, 0, "elsewhere", 0, 1), "no region 'elsewhere'"),
        (Move(REGION, 0, "here", SIZE, 1), "outside of 'here'"),
        (Move(REGION, 0, "here", -1, 1), "outside of 'here'"),
        (Move(REGION, 0, "here", 0, -1), "outside of 'here'"),
    ],
)
def test_moves_outside_of_local_memory_are_errors(pair: Pair, move: Move, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        pair.transport.read(pair.name, [move])


def test_wrong_use_is_named(pair: Pair) -> None:
    with pytest.raises(InvalidInput, match="no peer 'stranger'"):
        pair.transport.read("stranger", [])
    with pytest.raises(InvalidInput, match="registered already"):
        pair.transport.register("here", memoryview(pair.memory), pair.path)
    with pytest.raises(InvalidInput, match="writable"):
        pair.transport.register("constant", memoryview(bytes(10)), pair.path)
    with pytest.raises(InvalidInput, match="no region 'gone'"):
        pair.transport.release("gone")
    with pytest.raises(WireError):
        pair.transport.connect(b"nonsense")
    other = open_transport("tcp" if pair.kind == "shm" else "shm")
    try:
        with pytest.raises(LayoutMismatch, match="use the same transport"):
            pair.transport.connect(other.describe())
    finally:
        other.close()
    assert pair.transport.read(pair.name, []).wait(WAIT_S) == []


def test_memory_that_was_released_can_be_unmapped_and_is_used_no_more(pair: Pair) -> None:
    path = str(pair.folder / "second")
    second = mapped(path, 4096)
    pair.transport.register("second", memoryview(second), path)
    assert pair.transport.read(pair.name, [Move(REGION, 0, "second", 0, 4096)]).wait(WAIT_S) == [Moved.OK]
    pair.transport.release("second")
    second.close()
    with pytest.raises(InvalidInput, match="no region 'second'"):
        pair.transport.read(pair.name, [Move(REGION, 0, "second", 0, 1)])


def test_calls_from_many_threads(pair: Pair) -> None:
    truth, step, problems = pattern(1, SIZE), SIZE // 8, []

    def work(part: int) -> None:
        move = Move(REGION, part * step, "here", part * step, step)
        problems.extend(part for _ in range(5) if pair.transport.read(pair.name, [move]).wait(WAIT_S) != [Moved.OK])

    threads = [threading.Thread(target=work, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not problems
    assert pair.memory[:] == truth


def test_a_killed_peer_is_lost_or_late_never_wrong(pair: Pair) -> None:
    if pair.transport.capabilities.mapped_only:
        pytest.skip("a mapping outlives the process that made it")
    move = Move(REGION, 0, "here", 0, SIZE)
    assert pair.transport.read(pair.name, [move]).wait(WAIT_S) == [Moved.OK]
    pair.peer.kill()
    (result,) = pair.transport.read(pair.name, [move]).wait(10.0)
    assert result in (Moved.LOST, Moved.LATE)


def test_a_file_that_is_not_the_peers_any_more_is_not_used(tmp_path: Path) -> None:
    pair = Pair("shm", tmp_path)
    try:
        (tmp_path / "there").unlink()
        assert pair.transport.read(pair.name, [Move(REGION, 0, "here", 0, 9)]).wait(WAIT_S) == [Moved.LOST]
        with pytest.raises(Unavailable, match="cannot map the peer's region"):
            pair.transport.connect(pair.peer.description)
        mapped(str(tmp_path / "there"), SIZE).close()
        with pytest.raises(Unavailable, match="not the peer's file any more"):
            pair.transport.connect(pair.peer.description)
        assert pair.memory[:9] == bytes(9)
        with pytest.raises(InvalidInput, match="needs the path"):
            pair.transport.register("pathless", memoryview(bytearray(9)))
    finally:
        pair.close()


def test_tcp_asks_for_the_secret_and_ends_in_time(tmp_path: Path) -> None:
    pair = Pair("tcp", tmp_path)
    try:
        real = msgspec.msgpack.decode(pair.peer.description, type=Description)
        forged = msgspec.structs.replace(real, name="forged", detail=bytes(32))
        stranger = pair.transport.connect(describe(forged))
        assert pair.transport.read(stranger, [Move(REGION, 0, "here", 0, SIZE)]).wait(WAIT_S) == [Moved.LOST]
        assert pair.memory[:] == bytes(SIZE)
        gone = msgspec.structs.replace(real, name="gone", address="127.0.0.1:1")
        with pytest.raises(Unavailable):
            pair.transport.connect(describe(gone))
        pair.peer.ask("release")
        assert pair.transport.read(pair.name, [Move(REGION, 0, "here", 0, 9)]).wait(WAIT_S) == [Moved.REFUSED]
        assert pair.transport.write(pair.name, [Move(REGION, 0, "here", 0, 9)]).wait(WAIT_S) == [Moved.REFUSED]
    finally:
        pair.close()


def test_what_this_machine_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no transport 'pigeon'; there are shm, tcp, nixl, mooncake"):
        open_transport("pigeon")
    (tmp_path / "mlx5_0").mkdir()
    assert rdma_devices(tmp_path) == ["mlx5_0"]
    require_rdma("mlx5_0", "transport x", tmp_path)
    with pytest.raises(ConfigError, match="needs RDMA device mlx5_1; this host has mlx5_0"):
        require_rdma("mlx5_0,mlx5_1", "transport x", tmp_path)
    with pytest.raises(ConfigError, match="needs an RDMA device; this host has none"):
        require_rdma("", "transport x", tmp_path / "absent")


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_without_its_library_a_transport_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"anabranch\[{name}\]"):
        open_transport(name)
