"""Transport over TCP: slices of SLICE_BYTES with a checksum each, over every NIC that leads to the peer."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from weakref import WeakSet

from anabranch.core.errors import InvalidInput
from anabranch.transfer.classes import TrafficClass
from anabranch.transfer.live.rails import Links
from anabranch.transfer.live.transports.memory import LocalRegions
from anabranch.transfer.live.transports.tcp_server import SliceServer
from anabranch.transfer.live.transports.tcp_transfer import TcpPeer, TcpTransfer
from anabranch.transfer.live.transports.tcp_wire import MAX_NAME, READ, SECRET_BYTES, WRITE
from anabranch.transfer.regions import Description, describe, read_description, refused
from anabranch.transfer.transport import Capabilities, Move

KIND = "tcp"


class TcpTransport:
    """See `transfer.transport`. `listen`: one `host:port` for each NIC (port 0 = any). `traffic`: the class of what
    this side asks for. `lanes`: connections over each rail. A rail that is silent for `silence_s` has failed. Bytes
    are checked, not encrypted: beyond loopback it needs a network of its own."""

    def __init__(
        self,
        listen: Sequence[str] = ("127.0.0.1:0",),
        *,
        links: Links | None = None,
        traffic: TrafficClass = TrafficClass.LOAD,
        lanes: int = 2,
        silence_s: float = 5.0,
    ) -> None:
        self.capabilities = Capabilities(checked=True)
        self._name = f"{KIND}-{secrets.token_hex(8)}"
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._links = links or Links(silence_s=silence_s)
        self._traffic, self._lanes, self._silence_s = traffic, lanes, silence_s
        self._local = LocalRegions()
        self._lock = threading.Lock()
        self._peers: dict[str, TcpPeer] = {}
        self._transfers: WeakSet[TcpTransfer] = WeakSet()
        self._server = SliceServer(listen, self._secret, self._local, self._links, silence_s=silence_s)

    def register(self, region: str, memory: memoryview, path: str = "") -> None:
        if not 0 < len(region.encode()) <= MAX_NAME:
            raise InvalidInput(f"a region's name has 1 to {MAX_NAME} bytes")
        self._local.add(region, memory, path)

    def release(self, region: str) -> None:
        self._local.remove(region).drop()

    def describe(self) -> bytes:
        regions = self._local.described()
        return describe(
            Description(kind=KIND, name=self._name, regions=regions, address=self._server.address, detail=self._secret)
        )

    def connect(self, description: bytes) -> str:
        read = read_description(description, KIND)
        peer = TcpPeer(read, self._links, self._traffic, self._silence_s)
        peer.reach()
        with self._lock:
            former, self._peers[read.name] = self._peers.get(read.name), peer
        if former is not None:
            former.close()
        return read.name

    def read(self, peer: str, moves: Sequence[Move]) -> TcpTransfer:
        return self._move(READ, peer, moves)

    def write(self, peer: str, moves: Sequence[Move]) -> TcpTransfer:
        return self._move(WRITE, peer, moves)

    def rails(self, peer: str) -> dict[str, float]:
        """Bytes a second of each rail in use, as last measured."""
        known = self._peers[peer]
        with known.changed:
            return {str(rail): known.spread.bandwidth(rail) for rail in known.spread.in_use()}

    def close(self) -> None:
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.stop()
            transfer.join()
        for peer in peers:
            peer.close()
        self._server.close()
        self._local.clear()

    def _move(self, op: int, name: str, moves: Sequence[Move]) -> TcpTransfer:
        with self._lock:
            peer = self._peers.get(name)
            if peer is None:
                raise InvalidInput(f"no peer '{name}'; connect first")
            held = self._local.hold(moves)
            transfer = TcpTransfer(peer, op, list(moves), held, refused(moves, peer.regions), self._lanes)
            self._transfers.add(transfer)
        return transfer
