"""A value node that does as it is told, wrongly too: for tests of clients. A dict behind the wire protocol, no limits.

**See also** `store.values.live`: the real one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from typing import Any

import msgspec

from anabranch.core.live.link import Listener
from anabranch.core.wire import HEADER, encode
from anabranch.store.messages import Stat, StatRequest
from anabranch.store.values import messages as m
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import NAME_BYTES
from anabranch.store.values.slices import SLICE_BYTES, slice_bounds, slice_count, slice_sum, slice_sums

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(m.ClientToNode)


class FakeValueNode:
    """`faults`: names of what goes wrong, consumed one by one where they apply: "flip-inline", "flip-slice",
    "lease-over", "cut-read", "cut-slice", "lose-slice", "silent"."""

    def __init__(self, node_id: str = "fake", address: str = "127.0.0.1:0", salt: bytes = b"salt") -> None:
        self.node_id, self.salt = node_id, salt
        self.place: dict[str, Any] = {}
        """What the welcome says of its own memory, if anything."""
        self.values: dict[bytes, bytes] = {}
        self.faults: list[str] = []
        self.silent_on: type = object
        self.received: list[Any] = []
        self.outcomes: dict[bytes, Outcome] = {}
        self.lock = threading.Lock()
        self._puts: dict[int, tuple[m.Offer, list[bytearray], set[tuple[int, int]]]] = {}
        self.leases: dict[int, list[bytes]] = {}
        self._next = 0
        self._lanes: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = Listener(address, self._accept)
        self.address = self._listener.address

    def close(self) -> None:
        self._listener.close()
        with self.lock:
            lanes = list(self._lanes)
        for sock in lanes:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)

    def _accept(self, sock: socket.socket) -> None:
        with self.lock:
            self._lanes.add(sock)
        thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _fault(self, name: str) -> bool:
        with self.lock:
            if name in self.faults:
                self.faults.remove(name)
                return True
        return False

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.sendall(encode(m.Greeting(node_id=self.node_id, nonce=os.urandom(16))))
            while True:
                message = _decoder.decode(_exactly(sock, HEADER.unpack(_exactly(sock, 4))[0]))
                with self.lock:
                    self.received.append(message)
                self._handle(sock, message)
        except (OSError, EOFError, msgspec.MsgspecError):
            pass  # the caller is gone, or this node is closed
        finally:
            with self.lock:
                self._lanes.discard(sock)
            sock.close()

    def _handle(self, sock: socket.socket, message: Any) -> None:
        if isinstance(message, self.silent_on) and self._fault("silent"):
            _exactly(sock, 1 << 40)
        name = type(message).__name__.lower()
        getattr(self, f"_on_{name}")(sock, message)

    def _on_hello(self, sock: socket.socket, message: m.Hello) -> None:
        sock.sendall(encode(m.Welcome(node_id=self.node_id, salt=self.salt, trusted=True, **self.place)))

    def _on_put(self, sock: socket.socket, message: m.Put) -> None:
        outcomes = bytearray()
        values: list[tuple[bytes, bytes]] = []
        own: list[int] = []
        for name, size in zip(_names(message.offer.names), message.offer.sizes, strict=True):
            value = bytes(_exactly(sock, size))
            values.append((name, value))
            own += slice_sums(value)
        sums = message.sums or list(struct.unpack(f"<{len(own)}Q", bytes(_exactly(sock, 8 * len(own)))))
        if own != sums:
            raise EOFError("a put with wrong sums")
        outcomes += bytes([self._store(name, value) for name, value in values])
        sock.sendall(encode(m.Stored(op=message.offer.op, outcomes=bytes(outcomes))))

    def _on_offer(self, sock: socket.socket, message: m.Offer) -> None:
        with self.lock:
            self._next += 1
            number = self._next
            names = _names(message.names)
            known = [self.outcomes.get(n) or (Outcome.PRESENT if n in self.values else Outcome.SEND) for n in names]
            self._puts[number] = (message, [bytearray(size) for size in message.sizes], set())
        sock.sendall(encode(m.Granted(op=message.op, put=number, outcomes=bytes(known))))

    def _on_slice(self, sock: socket.socket, message: m.Slice) -> None:
        offer, data, here = self._puts[message.put]
        at = message.slice * SLICE_BYTES
        size = min(SLICE_BYTES, offer.sizes[message.item] - at)
        if self._fault("cut-slice"):
            _exactly(sock, size // 2)
            raise EOFError("cut")
        value = _exactly(sock, size)
        if self._fault("lose-slice") or slice_sum(value) != message.sum:
            return
        data[message.item][at : at + size] = value
        here.add((message.item, message.slice))

    def _on_seal(self, sock: socket.socket, message: m.Seal) -> None:
        offer, data, here = self._puts[message.put]
        names = _names(offer.names)
        missing = [
            (i, s)
            for i, size in enumerate(offer.sizes)
            for s in range(slice_count(size))
            if (i, s) not in here and names[i] not in self.values and names[i] not in self.outcomes
        ]
        outcomes = bytes([Outcome.SEND] * len(names)) if missing else bytes(map(self._store, names, map(bytes, data)))
        sock.sendall(encode(m.Stored(op=message.op, outcomes=outcomes, missing=missing)))

    def _on_abandon(self, sock: socket.socket, message: m.Abandon) -> None:
        self._puts.pop(message.put, None)

    def _store(self, name: bytes, value: bytes) -> int:
        with self.lock:
            if name in self.outcomes:
                return self.outcomes[name]
            former = self.values.setdefault(name, value)
        return Outcome.OK if former is value else Outcome.PRESENT if former == value else Outcome.DIFFERS

    def _on_get(self, sock: socket.socket, message: m.Get) -> None:
        names = _names(message.names)
        there = [name for name in names if name in self.values]
        values = [self.values[name] for name in there]
        inline = sum(map(len, values)) <= message.limit
        lease = 0
        if there and not inline:
            with self.lock:
                self._next += 1
                lease = self._next
                self.leases[lease] = there
        found = m.Found(
            op=message.op,
            outcomes=bytes(Outcome.OK if name in self.values else Outcome.MISSING for name in names),
            sizes=list(map(len, values)),
            sums=[one for value in values for one in slice_sums(value)],
            tiers=bytes(len(values)),
            inline=inline,
            lease=lease,
            lease_s=10.0,
        )
        body = bytearray(b"".join(values)) if inline else bytearray()
        if body and self._fault("flip-inline"):
            body[-1] ^= 1
        sock.sendall(encode(found) + body)

    def _on_read(self, sock: socket.socket, message: m.Read) -> None:
        if self._fault("lease-over"):
            self.leases.pop(message.lease, None)
        if message.lease not in self.leases:
            sock.sendall(struct.pack("<Q", 0))
            return
        value = self.values[self.leases[message.lease][message.item]]
        start, end = list(slice_bounds(len(value)))[message.slice]
        data = bytearray(value[start:end])
        if self._fault("cut-read"):
            sock.sendall(struct.pack("<Q", len(data)) + data[: len(data) // 2])
            raise EOFError("cut")
        if self._fault("flip-slice"):
            data[0] ^= 1
        sock.sendall(struct.pack("<Q", len(data)) + data)

    def _on_return(self, sock: socket.socket, message: m.Return) -> None:
        self.leases.pop(message.lease, None)

    def _on_damaged(self, sock: socket.socket, message: m.Damaged) -> None:
        leased = self.leases.get(message.lease, [])  # given back already, over another lane?
        for item in message.items if leased else ():
            self.values.pop(leased[item], None)

    def _on_exists(self, sock: socket.socket, message: m.Exists) -> None:
        tiers = bytes(int(name in self.values) for name in _names(message.names))
        sock.sendall(encode(m.Presence(op=message.op, tiers=tiers)))

    def _on_remove(self, sock: socket.socket, message: m.Remove) -> None:
        gone = [self.values.pop(name, None) for name in _names(message.names)]
        outcomes = bytes(Outcome.MISSING if value is None else Outcome.OK for value in gone)
        sock.sendall(encode(m.Done(op=message.op, outcomes=outcomes)))

    def _on_invalidate(self, sock: socket.socket, message: m.Invalidate) -> None:
        count = -1 if self._fault("unconfirmed") else len(self.values)
        self.values.clear()
        sock.sendall(encode(m.Done(op=message.op, places={f"{self.node_id}/dram": count})))

    def _on_pin(self, sock: socket.socket, message: m.Pin) -> None:
        self._answer(sock, message)

    def _on_prefetch(self, sock: socket.socket, message: m.Prefetch) -> None:
        self._answer(sock, message)

    def _answer(self, sock: socket.socket, message: m.Pin | m.Prefetch) -> None:
        outcomes = bytes(Outcome.OK if n in self.values else Outcome.MISSING for n in _names(message.names))
        sock.sendall(encode(m.Done(op=message.op, outcomes=outcomes)))

    def _on_statrequest(self, sock: socket.socket, message: StatRequest) -> None:
        sock.sendall(encode(Stat(name=self.node_id, census={"values": len(self.values)}, counters={})))


def _names(names: bytes) -> list[bytes]:
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError("closed")
        data += part
    return bytes(data)
