"""Transport through Mooncake's Transfer Engine (extra `mooncake`): `tcp` anywhere, `rdma` where there is a device.

Facts of the wheel 0.3.13.post1: peers find each other without a service (P2PHANDSHAKE); a batch has one result; a batch
cannot be withdrawn; data ports listen on all interfaces and ask for no secret, so keep its network private; it needs
libibverbs1, libnuma1 and librdmacm1 of the system even for TCP.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

from anabranch.core.errors import ConfigError, InvalidInput, MissingExtra, Unavailable
from anabranch.transfer.live.transports.devices import require_rdma
from anabranch.transfer.live.transports.memory import Held, LocalRegions
from anabranch.transfer.regions import Description, describe, read_description, refused
from anabranch.transfer.transport import Capabilities, Move, Moved

KIND = "mooncake"


def _library() -> Any:
    try:
        from mooncake import engine

        return engine
    except ImportError as error:
        if "lib" in str(error) and ".so" in str(error):
            raise ConfigError(f"mooncake does not load: {error}; install libibverbs1, libnuma1, librdmacm1") from error
        raise MissingExtra("mooncake", "mooncake-transfer-engine-non-cuda") from error


class MooncakeTransport:
    """See `transfer.transport`. `host`: this host's address for peers. `device`: RDMA devices, comma-separated; empty:
    all. Raises MissingExtra; ConfigError if a system library or the device is not there."""

    def __init__(self, host: str = "127.0.0.1", *, protocol: Literal["tcp", "rdma"] = "tcp", device: str = "") -> None:
        library = _library()
        if protocol == "rdma":
            require_rdma(device, "transport mooncake over rdma")
        self.capabilities = Capabilities(withdraws=False)
        self._name = f"{KIND}-{secrets.token_hex(8)}"
        self._engine: Any = library.TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
            raise ConfigError(f"mooncake does not start on {host} over {protocol}; its log says why")
        self._address = f"{host}:{self._engine.get_rpc_port()}"
        self._local = LocalRegions()
        self._lock = threading.Lock()
        self._peers: dict[str, Description] = {}
        self._running: set[threading.Thread] = set()

    def register(self, region: str, memory: memoryview, path: str = "") -> None:
        pinned = self._local.add(region, memory, path)
        if memory.nbytes and self._engine.register_memory(pinned.address, memory.nbytes) != 0:
            self._local.remove(region).drop()
            raise ConfigError(f"mooncake cannot register '{region}' ({memory.nbytes} bytes); its log says why")

    def release(self, region: str) -> None:
        pinned = self._local.remove(region)
        if pinned.view.nbytes:
            self._engine.unregister_memory(pinned.address)
        pinned.drop()

    def describe(self) -> bytes:
        regions = self._local.described()
        return describe(Description(kind=KIND, name=self._name, regions=regions, address=self._address))

    def connect(self, description: bytes) -> str:
        read = read_description(description, KIND)
        if not read.address:
            raise Unavailable("the peer's description has no address")
        self._peers[read.name] = read
        return read.name

    def read(self, peer: str, moves: Sequence[Move]) -> MooncakeTransfer:
        return self._move(self._engine.batch_transfer_sync_read, peer, moves)

    def write(self, peer: str, moves: Sequence[Move]) -> MooncakeTransfer:
        return self._move(self._engine.batch_transfer_sync_write, peer, moves)

    def close(self) -> None:
        """Waits for batches under way: the engine cannot withdraw them. Raises Unavailable if they do not end."""
        for thread in list(self._running):
            thread.join(30.0)
        for region in list(self._local.described()):
            self.release(region)
        self._peers = {}

    def _move(self, call: Callable[..., int], name: str, moves: Sequence[Move]) -> MooncakeTransfer:
        peer = self._peers.get(name)
        if peer is None:
            raise InvalidInput(f"no peer '{name}'; connect first")
        held = self._local.hold(moves)
        verdicts = refused(moves, peer.regions)
        wanted = [move for move, verdict in zip(moves, verdicts, strict=True) if verdict is None and move.size]
        ours = [held.address(move) for move in wanted]
        theirs = [peer.regions[move.region].at + move.offset for move in wanted]
        sizes = [move.size for move in wanted]
        job = (lambda: call(peer.address, ours, theirs, sizes)) if wanted else (lambda: 0)
        transfer = MooncakeTransfer(job, held, verdicts, self._running)
        transfer.start()
        return transfer


class MooncakeTransfer(threading.Thread):
    """The engine's call blocks without the interpreter's lock; it has one result for the batch."""

    def __init__(
        self, job: Callable[[], int], held: Held, verdicts: list[Moved | None], running: set[threading.Thread]
    ) -> None:
        super().__init__(name="mooncake-transfer", daemon=True)
        self._job, self._held, self._verdicts, self._running = job, held, verdicts, running
        self._result = Moved.LOST
        running.add(self)

    def run(self) -> None:
        try:
            if self._job() == 0:
                self._result = Moved.OK
        finally:
            self._held.release()
            self._running.discard(self)

    def wait(self, timeout_s: float) -> list[Moved]:
        self.join(timeout_s)
        left = Moved.LATE if self.is_alive() else self._result
        return [left if verdict is None else verdict for verdict in self._verdicts]
