"""Transport through NVIDIA's NIXL (extra `nixl`): UCX by default, which uses RDMA, shared memory or TCP as it finds
them; UCX_TLS and UCX_NET_DEVICES in the environment choose.

NIXL 1.5.1 has no blocking wait: `wait` polls, ever more slowly. It cannot promise that a late transfer is withdrawn.
Peers exchange no secret of ours: keep its network private.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from anabranch.core.errors import ConfigError, InvalidInput, MissingExtra, Unavailable
from anabranch.transfer.live.transports.devices import require_rdma
from anabranch.transfer.live.transports.memory import Held, LocalRegions
from anabranch.transfer.regions import Description, describe, read_description, refused
from anabranch.transfer.transport import Capabilities, Move, Moved

KIND = "nixl"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3


def _library() -> Any:
    try:
        # Its API is untyped, and the import takes half a second: only when asked for.
        from nixl import _api

        return _api
    except ImportError as error:
        raise MissingExtra("nixl", "nixl") from error


class NixlTransport:
    """See `transfer.transport`. `backend`: a NIXL plug-in that moves memory between agents. `device`: an RDMA device
    that must be there, or empty. Raises MissingExtra; ConfigError if the plug-in or the device is not there."""

    def __init__(self, backend: str = "UCX", *, device: str = "") -> None:
        api = _library()
        if device:
            require_rdma(device, f"transport nixl with {backend}")
        self.capabilities = Capabilities(withdraws=False)
        self._name = f"{KIND}-{secrets.token_hex(8)}"
        self._backend = backend
        self._errors = _errors(api)
        self._agent = _agent(api, self._name, backend, self._errors)
        self._local = LocalRegions()
        self._registered: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._peers: dict[str, Description] = {}
        self._stuck: list[tuple[Any, Held]] = []
        self._closed = False

    def register(self, region: str, memory: memoryview, path: str = "") -> None:
        pinned = self._local.add(region, memory, path)
        if not memory.nbytes:
            return
        try:
            with self._lock:
                self._registered[region] = self._agent.register_memory([(pinned.address, memory.nbytes, 0, "")], "DRAM")
        except self._errors as error:
            self._local.remove(region).drop()
            raise ConfigError(f"NIXL cannot register '{region}' ({memory.nbytes} bytes): {error}") from error

    def release(self, region: str) -> None:
        pinned = self._local.remove(region)
        with self._lock:
            registered = self._registered.pop(region, None)
            if registered is not None:
                self._agent.deregister_memory(registered)
        pinned.drop()

    def describe(self) -> bytes:
        with self._lock:
            detail = self._agent.get_agent_metadata()
        return describe(Description(kind=KIND, name=self._name, regions=self._local.described(), detail=detail))

    def connect(self, description: bytes) -> str:
        read = read_description(description, KIND)
        with self._lock:
            try:
                if read.name in self._peers:
                    self._agent.remove_remote_agent(read.name)
                self._agent.add_remote_agent(read.detail)
            except self._errors as error:
                raise Unavailable(f"NIXL cannot use the peer's description: {error}") from error
            self._peers[read.name] = read
        return read.name

    def read(self, peer: str, moves: Sequence[Move]) -> NixlTransfer:
        return self._move("READ", peer, moves)

    def write(self, peer: str, moves: Sequence[Move]) -> NixlTransfer:
        return self._move("WRITE", peer, moves)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for name in self._peers:
                with contextlib.suppress(*self._errors):  # it may be gone already
                    self._agent.remove_remote_agent(name)
            self._peers = {}
            for _, held in self._stuck:
                held.release()
            self._stuck = []
            for registered in self._registered.values():
                self._agent.deregister_memory(registered)
            self._registered = {}
            self._agent = None
        self._local.clear()

    def _move(self, op: str, name: str, moves: Sequence[Move]) -> NixlTransfer:
        peer = self._peers.get(name)
        if peer is None:
            raise InvalidInput(f"no peer '{name}'; connect first")
        held = self._local.hold(moves)
        verdicts = refused(moves, peer.regions)
        handles: dict[int, Any] = {}
        for index, move in enumerate(moves):
            if verdicts[index] is None and move.size:
                handle = self._post(op, name, move, held.address(move), peer.regions[move.region].at + move.offset)
                if handle is None:
                    verdicts[index] = Moved.LOST
                else:
                    handles[index] = handle
        return NixlTransfer(self, held, verdicts, handles)

    def _post(self, op: str, name: str, move: Move, here: int, there: int) -> Any:
        agent = self._agent
        with self._lock:
            try:
                ours = agent.get_xfer_descs([(here, move.size, 0)], "DRAM")
                theirs = agent.get_xfer_descs([(there, move.size, 0)], "DRAM")
                handle = agent.initialize_xfer(op, ours, theirs, name)
                return handle if agent.transfer(handle) != "ERR" else None
            except self._errors:
                return None

    def state(self, handle: Any) -> Moved | None:
        """None: under way."""
        with self._lock:
            if self._closed:
                return Moved.LOST
            try:
                return {"DONE": Moved.OK, "PROC": None}.get(self._agent.check_xfer_state(handle), Moved.LOST)
            except self._errors:
                return Moved.LOST

    def drop(self, handles: Sequence[Any], held: Held) -> None:
        """The transfer is over. What NIXL cannot abort keeps its memory until close."""
        with self._lock:
            left = []
            for handle in handles:
                try:
                    if not self._closed:
                        handle.release()
                except self._errors:  # it is still active
                    left.append(handle)
            if left:
                self._stuck.append((left, held))
                return
        held.release()


class NixlTransfer:
    """One handle a move: each has its own result."""

    def __init__(
        self, transport: NixlTransport, held: Held, verdicts: list[Moved | None], handles: dict[int, Any]
    ) -> None:
        self._transport, self._held, self._verdicts, self._handles = transport, held, verdicts, handles

    def wait(self, timeout_s: float) -> list[Moved]:
        deadline, pause = time.monotonic() + timeout_s, FIRST_PAUSE_S
        under_way = dict(self._handles)
        while under_way:
            for index, handle in list(under_way.items()):
                state = self._transport.state(handle)
                if state is None:
                    break  # the later ones will hardly be done before it
                self._verdicts[index] = state
                del under_way[index]
            if under_way:
                if time.monotonic() >= deadline:
                    break
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
        for index in under_way:
            state = self._transport.state(under_way[index])
            self._verdicts[index] = Moved.LATE if state is None else state
        self._transport.drop(list(self._handles.values()), self._held)
        self._handles = {}
        return [Moved.OK if verdict is None else verdict for verdict in self._verdicts]


def _errors(api: Any) -> tuple[type[Exception], ...]:
    """What the bindings raise: types of their own, without a common base."""
    return tuple(kind for kind in vars(api.nixlBind).values() if isinstance(kind, type) and issubclass(kind, Exception))


def _agent(api: Any, name: str, backend: str, errors: tuple[type[Exception], ...]) -> Any:
    config = api.nixl_agent_config(backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    agent = api.nixl_agent(name, config)
    if backend not in agent.get_plugin_list():
        have = ", ".join(agent.get_plugin_list())
        raise ConfigError(
            f"NIXL has no plug-in {backend} here (it has {have}); install what it needs or choose another"
        )
    try:
        agent.create_backend(backend)
    except errors as error:
        raise ConfigError(f"NIXL's {backend} does not start here: {error}; is its device or driver there?") from error
    kinds = set(agent.get_backend_mem_types(backend))
    if "DRAM_SEG" not in kinds or kinds & {"FILE_SEG", "OBJ_SEG", "BLK_SEG"}:
        raise ConfigError(f"NIXL's {backend} is for {', '.join(sorted(kinds))}, not between memories; use UCX")
    return agent
