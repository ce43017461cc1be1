"""Directory processes elect a leader through a real etcd; nodes and clients follow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from anabranch.core.errors import ConfigError, Unavailable
from anabranch.store.config import DirectoryConfig
from anabranch.store.live.directory_feed import AnnouncingNode
from anabranch.store.live.directory_link import DirectoryLink
from anabranch.store.live.directory_server import DirectoryServer
from anabranch.store.live.etcd import Etcd, KeyValue, PrefixView, parse_etcd
from anabranch.store.messages import Join
from anabranch.store.outbox import Holdings
from anabranch.testing.live.etcd import EtcdMembers, etcd_program
from anabranch.testing.store import chain

pytestmark = pytest.mark.skipif(etcd_program() is None, reason="etcd is not installed: apt-get install etcd-server")
NAMES = chain("v", 60)
PACKED = b"".join(NAMES)
HELD = [True] * 50 + [False] * 10
_CANDIDATE = """
import sys
from anabranch.store.config import DirectoryConfig
from anabranch.store.live.directory_server import run_directory
config = DirectoryConfig(etcd=sys.argv[1], leader_ttl_s=int(sys.argv[2]))
run_directory(config, ready=lambda server: print(server.address, flush=True))
"""


def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdMembers]:
    with EtcdMembers(tmp_path_factory.mktemp("etcd")) as members:
        yield members


@pytest.fixture
def etcd(members: EtcdMembers, request: pytest.FixtureRequest) -> str:
    """A cluster name of the test's own."""
    return f"{members.address}/{request.node.name}"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def node(stack: ExitStack, etcd: str, name: str, held: bytes) -> DirectoryLink:
    announcing = AnnouncingNode(
        Join(node_id=name, epoch=1, address=f"{name}:1", layout=b""), lambda: Holdings({"dram": held}), heartbeat_s=0.1
    )
    return stack.enter_context(closing(DirectoryLink(etcd, announcing)))


def known(link: DirectoryLink) -> list[bool | None]:
    try:
        return link.where(PACKED, timeout_s=0.5).known()
    except Unavailable:
        return []


def process(stack: ExitStack, etcd: str, ttl_s: int) -> tuple[subprocess.Popen[str], str]:
    child = subprocess.Popen([sys.executable, "-c", _CANDIDATE, etcd, str(ttl_s)], stdout=subprocess.PIPE, text=True)

    def end() -> None:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()

    stack.callback(end)
    return child, (child.stdout.readline().strip() if child.stdout is not None else "")


def leader_of(link: DirectoryLink) -> str:
    return (link._shards() or [""])[0]


def test_create_delete_lease_and_watch(etcd: str) -> None:
    where = parse_etcd(etcd)
    client = Etcd(where.endpoints, 5.0)
    changes, changed = [], threading.Event()

    def note(view: PrefixView) -> None:
        changes.append({name: kv.value for name, kv in view.entries.items()})
        changed.set()

    view = PrefixView(where.endpoints, where.prefix, note)
    until(lambda: view.known, "the first look")
    lease, ttl = client.grant(60)
    assert ttl == 60
    revision = client.create(where.prefix + "a", b"1", lease)
    assert isinstance(revision, int)
    other = client.create(where.prefix + "a", b"2")
    assert isinstance(other, KeyValue)
    assert (other.value, other.create_revision) == (b"1", revision)
    assert not client.delete_created_at(where.prefix + "a", revision - 1)
    assert client.keep_alive(lease) == 60
    client.put(where.prefix + "b", b"3")
    client.revoke(lease)
    assert client.keep_alive(lease) == 0
    until(lambda: changes[-1] == {"b": b"3"}, "the changes")
    assert {"a": b"1"} in changes
    view.close()
    client.close()


@pytest.mark.parametrize("text", ["etcd://", "etcd://host", "etcd://host:port/x", "etcd://a:1,:2"])
def test_bad_etcd_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="etcd"):
        parse_etcd(text)


def test_a_killed_leader_is_replaced_and_nodes_announce_to_the_new_one(stack: ExitStack, etcd: str) -> None:
    candidates = dict(reversed(process(stack, etcd, 30)) for _ in range(2))
    node(stack, etcd, "a", PACKED[: 50 * 32])
    asker = stack.enter_context(closing(DirectoryLink(etcd)))
    until(lambda: known(asker) == HELD, "a leader that knows everything")
    first = leader_of(asker)
    candidates[first].send_signal(signal.SIGKILL)
    wrong: list[list[bool | None]] = []

    def back() -> bool:
        seen = known(asker)
        if False in seen[:50]:
            wrong.append(seen)
        return seen == HELD and leader_of(asker) != first

    until(back, "another leader")
    assert not wrong  # unknown, never absent


def test_a_leader_that_hangs_is_replaced_and_yields_when_it_wakes(stack: ExitStack, etcd: str) -> None:
    candidates = dict(reversed(process(stack, etcd, 30)) for _ in range(2))
    node(stack, etcd, "a", PACKED[: 50 * 32])
    asker = stack.enter_context(closing(DirectoryLink(etcd)))
    until(lambda: known(asker) == HELD, "a leader that knows everything")
    first = leader_of(asker)
    candidates[first].send_signal(signal.SIGSTOP)
    until(lambda: leader_of(asker) != first and known(asker) == HELD, "another leader")
    candidates[first].send_signal(signal.SIGCONT)
    old = stack.enter_context(closing(DirectoryLink(first)))
    until(lambda: known(old) == [], "the old leader's resignation")
    assert known(asker) == HELD


def test_shards_have_a_leader_each_and_a_new_leader_waits_for_all_registered_nodes(stack: ExitStack, etcd: str) -> None:
    config = DirectoryConfig(etcd=etcd, shards=2, node_ttl_s=600.0)
    servers = [DirectoryServer(DirectoryConfig(etcd=etcd, shard=i, shards=2, node_ttl_s=600.0)) for i in range(2)]
    for server in servers:
        stack.callback(server.start().stop)
    asker = stack.enter_context(closing(DirectoryLink(etcd)))
    node(stack, etcd, "a", PACKED[: 30 * 32])
    # Young by far (600 s), but etcd names all nodes, and each has announced everything.
    until(lambda: known(asker) == [True] * 30 + [False] * 30, "one node")
    node(stack, etcd, "b", PACKED[30 * 32 : 50 * 32])
    until(lambda: known(asker) == HELD, "both nodes")
    with pytest.raises(ConfigError, match="shard"):
        DirectoryServer(DirectoryConfig(etcd=etcd, shard=2, shards=2)).start()
    assert config.shards == 2


def test_without_etcd_a_leader_resigns_and_with_it_leads_again(stack: ExitStack, tmp_path: Path) -> None:
    members = stack.enter_context(EtcdMembers(tmp_path / "etcd"))
    server = DirectoryServer(DirectoryConfig(etcd=members.address, leader_ttl_s=2)).start()
    stack.callback(server.stop)
    until(lambda: server.leading, "the election")
    os.kill(members.pids[0], signal.SIGSTOP)
    until(lambda: not server.leading, "the resignation")
    os.kill(members.pids[0], signal.SIGCONT)
    until(lambda: server.leading, "the second election")
