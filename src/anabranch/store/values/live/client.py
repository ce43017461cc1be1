"""`anabranch.Client`: the value store for a program. `AsyncClient` has the same calls as coroutines."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from anabranch.core.authentication import Credentials
from anabranch.core.errors import InvalidInput, Unavailable
from anabranch.core.live.handshake import Dialer
from anabranch.core.live.tls import Tls
from anabranch.store.live.directory_link import DirectoryLink
from anabranch.store.live.etcd import SCHEME
from anabranch.store.messages import Stat
from anabranch.store.values.arguments import addresses_of, finite, flag, listed, number, text
from anabranch.store.values.config import LinkConfig, SecurityConfig, WriteConfig
from anabranch.store.values.got import Got
from anabranch.store.values.live.acquire import acquire
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.credentials import read_secret, tls_of
from anabranch.store.values.live.deposit import PutOptions
from anabranch.store.values.live.host_links import links_of
from anabranch.store.values.live.lanes import LanePool
from anabranch.store.values.live.local import LocalMemory
from anabranch.store.values.live.names import names_of
from anabranch.store.values.live.nodes import Nodes
from anabranch.store.values.live.puts import Puts
from anabranch.store.values.live.questions import Questions
from anabranch.store.values.live.reads import HotReads, Reads
from anabranch.store.values.live.recency import Recency
from anabranch.store.values.live.session import Session
from anabranch.store.values.live.sinks import BufferSink, BytesSink, Sink
from anabranch.store.values.live.views import Views
from anabranch.store.values.messages import Welcome
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.parts import parts_of
from anabranch.store.values.scope import Key, Scope, name_of
from anabranch.transfer.classes import TrafficName, traffic_class
from anabranch.transfer.live.rails import Links
from anabranch.transfer.live.workers import Workers

THREADS = 8
"""Most threads that help with large transfers of one client; they end by themselves when idle."""
PUT_WAIT_S = 0.75
"""How long a node may wait for room before it answers FULL."""


class StoreStat(msgspec.Struct, frozen=True, kw_only=True):
    """`nodes`: address → what the node says of itself; `unreachable`: address → why it says nothing; `local`: the home
    node's memory is read without calls."""

    home: str
    nodes: dict[str, Stat]
    unreachable: dict[str, str]
    lanes: int
    local: bool


class Client:
    """A store of values, for any number of threads.

    **Keys** are str or bytes of 1 to 1,024 bytes; the same key in another tenant, namespace or epoch is another key.
    **Values** are any object with the buffer protocol (bytes, memoryview, array, numpy), a contiguous CPU tensor
    (torch, any dtype), or a list or tuple of those, laid end to end; buffers to read into are the same, and writable.
    None of them may be changed while a call runs. Several keys, values or buffers are a list, or any other iterable.
    **Outcomes** (`Outcome`) say of each item what became of it; a miss is a value, never an exception. Every call ends
    within `timeout_s`. Raises InvalidInput for what no store could do and for arguments that are none, AccessDenied for
    a wrong secret, Unavailable if no node was ever reached; a node that is lost later makes items UNREACHABLE, and the
    next call uses another.

    `nodes`: addresses (`host:port` or `unix:/path`), or several comma-separated. The first that answers is the client's
    home, nodes on this host before others: values are put there, and asked for there first. `directory`: of the store,
    `host:port` of each shard or `etcd://…`; with it all nodes' values are found, without it those of `nodes`. Neither
    given: $ANABRANCH_STORE and $ANABRANCH_DIRECTORY. `secret`: the tenant's or the cluster's, bytes or the path of a
    file; `tls`: a `SecurityConfig` with certificate, key and authority. `local`: read the memory of a node on this host
    directly, where it lets us. `lanes`: connections for one large transfer. `links`: the host's NICs, with rate and
    marks (`LinkConfig`); `traffic`: how urgent this client's bytes are, e.g. `"prefetch"`.

    A client belongs to the process that made it (not to a forked child) and holds connections until `close`.
    """

    def __init__(
        self,
        nodes: str | Sequence[str] = (),
        *,
        directory: str | None = "",
        tenant: str = "default",
        namespace: str = "default",
        epoch: str = "",
        secret: bytes | str | Path | None = None,
        tls: Tls | SecurityConfig | None = None,
        timeout_s: float = 5.0,
        local: bool = True,
        lanes: int = 2,
        name: str = "",
        links: Links | LinkConfig | None = None,
        traffic: TrafficName = "load",
    ) -> None:
        addresses = addresses_of([nodes] if isinstance(nodes, str) else listed(nodes, "nodes"), "nodes")
        if not addresses and not directory:
            addresses = addresses_of([os.environ.get("ANABRANCH_STORE", "")], "ANABRANCH_STORE")
            directory = os.environ.get("ANABRANCH_DIRECTORY")
        if not addresses and not directory:
            raise InvalidInput("the client has no store: give nodes or directory, or set ANABRANCH_STORE")
        if directory and not text(directory, "directory").startswith(SCHEME):
            directory = ",".join(addresses_of([directory], "directory"))
        if finite(timeout_s, "timeout_s") <= 0:
            raise InvalidInput(f"timeout_s must be positive, not {timeout_s}")
        number(lanes, "lanes", 1)
        for what, given in (("tenant", tenant), ("namespace", namespace), ("epoch", epoch), ("name", name)):
            text(given, what)
        credentials = Credentials(secret=_secret(secret), tenant=tenant, namespace=namespace, epoch=epoch)
        session = Session(
            credentials,
            tls=tls_of(tls) if isinstance(tls, SecurityConfig) else tls,
            name=name,
            links=links_of(links) if isinstance(links, LinkConfig) else links,
            traffic=traffic_class(traffic),
        )
        self.timeout_s = timeout_s
        self._pid = os.getpid()
        self._scope = Scope(tenant, namespace, epoch).digest()
        self._use_local = local
        self._session = session
        self._memories: dict[str, LocalMemory] = {}
        self._memories_lock = threading.Lock()
        self._closed = False
        self._workers = Workers("store-client", THREADS)
        link = DirectoryLink(directory, dial=Dialer(credentials, session.tls)) if directory else None
        self._nodes = Nodes(session, addresses, link, self._workers, self._at_home)
        self._hot = HotReads(WriteConfig().hot_reads)
        self._reads = Reads(self._nodes, self._workers, lanes, self._read_remotely)
        self._questions = Questions(self._nodes)
        self._puts = Puts(self._nodes, self._workers, lanes, self._questions)

    # --- put ------------------------------------------------------------------------------------------------------

    def put(
        self, key: Key, value: Any, *, replicas: int = 0, durable: bool = False, parent: Key | None = None
    ) -> Outcome:
        """Store a value; it is found once this returns OK or PRESENT. See `put_many`."""
        return self.put_many([key], [value], replicas=replicas, durable=durable, parent=parent)[0]

    def put_many(
        self,
        keys: Sequence[Key],
        values: Sequence[Any],
        *,
        replicas: int = 0,
        durable: bool = False,
        chain: bool = False,
        parent: Key | None = None,
    ) -> list[Outcome]:
        """`replicas`: on how many nodes before the answer (0: what the namespace says). `durable`: on a disk before the
        answer. `chain`: each value is useless without the one before it (a prefix of blocks), and the first without
        `parent`: then the last go first when room is needed.

        A batch larger than half of what the node holds for this tenant may drive out its own values: what is gone at
        the end is FULL. OK is no promise against later eviction (`pin`)."""
        return self._put_many(keys, values, self._call(), replicas, durable, chain, parent)

    # --- get ------------------------------------------------------------------------------------------------------

    def get(self, key: Key) -> bytes | None:
        """The value; None if it did not come, for whatever reason (`get_many_into` says which)."""
        return self._get(key, self._call())

    def get_into(self, key: Key, buffer: Any) -> Got:
        """Fill the first bytes of a buffer. See `get_many_into`."""
        return self._get_many_into([key], [buffer], self._call())[0]

    def get_many_into(self, keys: Sequence[Key], buffers: Sequence[Any]) -> list[Got]:
        """Fill a buffer, or a list of parts, for each key. A buffer whose item is not OK has undefined content."""
        return self._get_many_into(keys, buffers, self._call())

    def acquire(self, keys: Sequence[Key]) -> Views:
        """Values to look at, for a while: `with client.acquire(keys) as views`. No copy is made of what the home node
        has, if it runs on this host: its views are good for `store.lease_s` (10 s) or until `renew`, and only while the
        node's process lives; ask `valid` afterwards. Arrays made of them must be gone or copied before the end."""
        return self._acquire(keys, self._call())

    # --- questions ------------------------------------------------------------------------------------------------

    def exists_many(self, keys: Sequence[Key]) -> list[bool | None]:
        """None: nobody can say at the moment. Protects nothing from eviction."""
        return self._exists_many(keys, self._call())

    def longest_prefix(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are all there."""
        return self._longest_prefix(keys, self._call())

    def remove(self, keys: Sequence[Key]) -> list[Outcome]:
        """From all nodes and tiers. OK, MISSING, or UNREACHABLE if a node could not confirm it."""
        return self._remove(keys, self._call())

    def invalidate(self, *, epoch: str | None = None, tenant: str | None = None) -> dict[str, int]:
        """Drop all values of the tenant, or those of one epoch, everywhere and for good; "node/tier" → how many.
        Another `tenant` takes the cluster's secret. Raises Unavailable naming each place that could not confirm it."""
        return self._invalidate(epoch, tenant, self._call())

    def pin(self, keys: Sequence[Key], seconds: float) -> list[Outcome]:
        """Keep values for a while; the node limits how long and how much. 0 seconds: `unpin`."""
        return self._pin(keys, seconds, self._call())

    def unpin(self, keys: Sequence[Key]) -> list[Outcome]:
        return self._pin(keys, 0.0, self._call())

    def prefetch(self, keys: Sequence[Key]) -> list[Outcome]:
        """Have values brought into the home node's DRAM; does not wait for them."""
        return self._prefetch(keys, self._call())

    def stat(self) -> StoreStat:
        """What all nodes that this client knows say of themselves."""
        return self._stat(self._call())

    def close(self) -> None:
        """Calls that still run end with an error. Views stay valid until they are released."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # the connections are the parent's
        self._nodes.close()
        self._workers.close()
        with self._memories_lock:
            for memory in self._memories.values():
                memory.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the same with a call of the caller's making (AsyncClient) -------------------------------------------------

    def _call(self) -> Call:
        if self._closed:
            raise Unavailable("the client is closed")
        if os.getpid() != self._pid:
            raise InvalidInput("this client was made by another process; make one after the fork")
        return Call(self.timeout_s)

    def _put_many(
        self,
        keys: Sequence[Key],
        values: Sequence[Any],
        call: Call,
        replicas: int,
        durable: bool,
        chain: bool,
        parent: Key | None,
    ) -> list[Outcome]:
        keys, values = listed(keys, "keys"), listed(values, "values")
        parts = [parts_of(value) for value in values]
        _equal(keys, parts)
        number(replicas, "replicas", 0, 4)
        _ = flag(durable, "durable"), flag(chain, "chain")
        if not keys:
            return []
        name_key = self._nodes.name_key(call)
        options = PutOptions(
            replicas=replicas,
            durable=durable,
            chain=chain,
            parent=b"" if parent is None else name_of(parent, name_key),
            wait_s=min(PUT_WAIT_S, self.timeout_s / 4),
        )
        return self._puts.put(names_of(keys, name_key), parts, options, call)

    def _get(self, key: Key, call: Call) -> bytes | None:
        sink = BytesSink()
        return sink.value if self._get_many([key], [sink], call)[0] else None

    def _get_many_into(self, keys: Sequence[Key], buffers: Sequence[Any], call: Call) -> list[Got]:
        keys, buffers = listed(keys, "keys"), listed(buffers, "buffers")
        return self._get_many(keys, [BufferSink(parts_of(buffer, writable=True)) for buffer in buffers], call)

    def _get_many(self, keys: Sequence[Key], sinks: Sequence[Sink], call: Call) -> list[Got]:
        _equal(keys, sinks)
        if not keys:
            return []
        names = names_of(keys, self._nodes.name_key(call))
        memory = self._memory(call)
        if memory is None:
            return self._reads.get(names, sinks, call)
        if len(sinks) == 1:
            got = memory.get_one(names, sinks[0])
            return [got] if got is not None else self._reads.get(names, sinks, call)
        near = memory.get_many(names, sinks)
        left = [i for i, one in enumerate(near) if one is None]
        if left:
            rest = names if len(left) == len(sinks) else b"".join([names[i * 32 : i * 32 + 32] for i in left])
            far = self._reads.get(rest, [sinks[i] for i in left], call)
            for i, one in zip(left, far, strict=True):
                near[i] = one
        return near  # type: ignore[return-value]  # every None was replaced

    def _acquire(self, keys: Sequence[Key], call: Call) -> Views:
        keys = listed(keys, "keys")
        names = names_of(keys, self._nodes.name_key(call)) if keys else b""
        home = self._nodes.home(call)
        return acquire(names, home, self._memory(call), self._reads.get, call)

    def _exists_many(self, keys: Sequence[Key], call: Call) -> list[bool | None]:
        keys = listed(keys, "keys")
        if not keys:
            return []
        name_key = self._nodes.name_key(call)
        memory = self._memory(call)
        if memory is None:
            return self._questions.exists(names_of(keys, name_key), call)
        here = memory.present_keys(keys, name_key)
        flags: list[bool | None] = list(map(bool, here)) if 0 in here else [True] * len(here)
        if not all(flags):
            left = [i for i, there in enumerate(flags) if not there]
            far = self._questions.exists(names_of([keys[i] for i in left], name_key), call)
            for i, there in zip(left, far, strict=True):
                flags[i] = there
        return flags

    def _longest_prefix(self, keys: Sequence[Key], call: Call) -> int:
        flags = self._exists_many(keys, call)
        return next((i for i, there in enumerate(flags) if not there), len(flags))

    def _remove(self, keys: Sequence[Key], call: Call) -> list[Outcome]:
        keys = listed(keys, "keys")
        return self._questions.remove(names_of(keys, self._nodes.name_key(call)), call) if keys else []

    def _invalidate(self, epoch: str | None, tenant: str | None, call: Call) -> dict[str, int]:
        for what, given in (("epoch", epoch), ("tenant", tenant)):
            if given is not None:
                text(given, what)
        self._nodes.name_key(call)
        return self._questions.invalidate(tenant or "", epoch, call)

    def _pin(self, keys: Sequence[Key], seconds: float, call: Call) -> list[Outcome]:
        keys = listed(keys, "keys")
        duration = finite(seconds, "seconds")
        return self._questions.pin(names_of(keys, self._nodes.name_key(call)), duration, call) if keys else []

    def _prefetch(self, keys: Sequence[Key], call: Call) -> list[Outcome]:
        keys = listed(keys, "keys")
        return self._questions.prefetch(names_of(keys, self._nodes.name_key(call)), call) if keys else []

    def _stat(self, call: Call) -> StoreStat:
        self._nodes.name_key(call)
        home = self._nodes.home(call)
        nodes, unreachable = self._questions.stat(call)
        local = self._memory(call) is not None
        return StoreStat(home=home.address, nodes=nodes, unreachable=unreachable, lanes=self._nodes.lanes, local=local)

    # --- what the parts tell --------------------------------------------------------------------------------------

    def _memory(self, call: Call) -> LocalMemory | None:
        """The home node's memory, if it can be seen from here."""
        if not self._memories:
            return None
        memory = self._memories.get(self._nodes.home(call).address)
        return memory if memory is not None and memory.alive else None

    def _at_home(self, pool: LanePool, welcome: Welcome) -> None:
        """A node let us in: perhaps a new process at an old address."""
        with self._memories_lock:  # lanes of several threads may be let in at once
            former = self._memories.get(pool.address)
            if former is not None and former.alive and former.of(welcome):
                return
            if former is not None:
                del self._memories[pool.address]
                former.close()
            if self._use_local and not self._closed:
                recency = Recency(pool, self._workers.submit)
                memory = LocalMemory.attach(welcome, self._session, self._scope, recency)
                if memory is not None:
                    self._memories[pool.address] = memory

    def _read_remotely(self, names: list[bytes], home: LanePool) -> None:
        """Values that came from another node than home: the second time a copy at home is worth it."""
        hot = self._hot.seen(names)
        if hot:
            self._workers.submit(lambda: self._questions.bring_home(b"".join(hot), home))


def _equal(keys: Sequence[Key], others: Sequence[Any]) -> None:
    if len(keys) != len(others):
        raise InvalidInput(f"{len(keys)} keys and {len(others)} values or buffers do not belong together")


def _secret(secret: bytes | str | Path | None) -> bytes:
    if secret is None or isinstance(secret, bytes):
        return secret or b""
    return read_secret(str(secret), "secret")
