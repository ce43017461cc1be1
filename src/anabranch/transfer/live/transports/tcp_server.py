"""The passive side of `tcp`: answers what peers ask about this process's regions, one thread a connection."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from collections.abc import Sequence

import xxhash

from anabranch.core.errors import AnabranchError, Unavailable, WireError
from anabranch.core.live.link import Listener
from anabranch.transfer.classes import TrafficClass
from anabranch.transfer.live.rails import Links, Permit
from anabranch.transfer.live.transports.memory import LocalRegions
from anabranch.transfer.live.transports.tcp_wire import (
    ANSWER,
    GREETING,
    MAGIC,
    READ,
    REQUEST,
    SLICE_BYTES,
    WRITE,
    receive_exactly,
    send_parts,
)
from anabranch.transfer.transport import Moved

GREETING_S = 5.0


class SliceServer:
    """Raises Unavailable if it cannot listen. A peer that is silent in the middle of a slice for `silence_s` is cut
    off; between slices it may be silent for ever."""

    def __init__(
        self, listen: Sequence[str], secret: bytes, regions: LocalRegions, links: Links, *, silence_s: float
    ) -> None:
        self._secret, self._regions, self._links, self._silence_s = secret, regions, links, silence_s
        self._lock = threading.Lock()
        self._closed = False
        self._open: dict[socket.socket, threading.Thread] = {}
        self._listeners: list[Listener] = []
        try:
            for address in listen:
                self._listeners.append(Listener(address, self._accept, name="slices"))
        except Unavailable:
            self.close()
            raise

    @property
    def address(self) -> str:
        return "+".join(listener.address for listener in self._listeners)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        with self._lock:
            self._closed = True
            connections = list(self._open.items())
        for sock, _ in connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for _, thread in connections:
            thread.join(self._silence_s + 1)

    def _accept(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(sock,), name="slices", daemon=True)
        with self._lock:
            if self._closed:
                sock.close()
                return
            self._open[sock] = thread
        thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            permit = self._links.accepted(sock, self._greeted(sock))
            while self._answer(sock, permit):
                pass
        except (AnabranchError, OSError):
            pass  # the peer notices that its connection is gone, and why does not matter here
        finally:
            with self._lock:
                self._open.pop(sock, None)
            sock.close()

    def _greeted(self, sock: socket.socket) -> TrafficClass:
        sock.settimeout(GREETING_S)
        head = memoryview(bytearray(GREETING.size))
        receive_exactly(sock, head)
        magic, secret, traffic = GREETING.unpack(head)
        if magic != MAGIC or not hmac.compare_digest(secret, self._secret) or traffic not in set(TrafficClass):
            raise WireError("not a peer that was given our description")
        return TrafficClass(traffic)

    def _answer(self, sock: socket.socket, permit: Permit | None) -> bool:
        sock.settimeout(None)
        head = memoryview(bytearray(REQUEST.size))
        if not sock.recv_into(head, 1):
            return False
        sock.settimeout(self._silence_s)
        receive_exactly(sock, head[1:])
        op, length, offset, size, expected = REQUEST.unpack(head)
        name = memoryview(bytearray(length))
        receive_exactly(sock, name)
        if op not in (READ, WRITE) or size > SLICE_BYTES:
            raise WireError(f"request {op} of {size} bytes")
        with self._regions.serve(bytes(name).decode(errors="replace")) as whole:
            fits = whole is not None and offset + size <= whole.nbytes
            with memoryview(bytearray(size)) if whole is None or not fits else whole[offset : offset + size] as data:
                if op == WRITE:
                    receive_exactly(sock, data)
                    fine = xxhash.xxh3_64_intdigest(data) == expected
                    verdict = Moved.REFUSED if not fits else Moved.OK if fine else Moved.DAMAGED
                    sock.sendall(ANSWER.pack(verdict, 0))
                elif not fits:
                    sock.sendall(ANSWER.pack(Moved.REFUSED, 0))
                else:
                    self._send(sock, permit, data)
        return True

    def _send(self, sock: socket.socket, permit: Permit | None, data: memoryview) -> None:
        if permit is not None:
            permit(data.nbytes, self._silence_s)
        send_parts(sock, ANSWER.pack(Moved.OK, xxhash.xxh3_64_intdigest(data)), data)
