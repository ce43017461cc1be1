"""The limit: two processes, one TCP connection, no store. What is put is thrown away, what is got was never put.

`python bare_peer.py` is the other process; it prints its port and serves one connection at a time.
"""

from __future__ import annotations

import ctypes
import socket
import sys
from typing import Any

GET = 1 << 63


class Bare:
    """`options`: master (host:port). A batch is one message of as many bytes."""

    keeps = False

    def __init__(self, options: Any) -> None:
        host, _, port = options.master.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def open(self, segment_bytes: int, local_buffer_bytes: int) -> None:
        pass

    def version(self) -> str:
        return f"sockets of Python {sys.version.split()[0]}"

    def register(self, address: int, size: int) -> int:
        return 0

    def put_from(self, key: str, address: int, size: int) -> int:
        self._put(address, size)
        return 0

    def get_into(self, key: str, address: int, size: int) -> int:
        self._get(address, size)
        return size

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self._put(addresses[0], sum(sizes))
        return [0] * len(keys)

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self._get(addresses[0], sum(sizes))
        return sizes

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [1] * len(keys)

    def remove_all(self) -> None:
        pass

    def close(self) -> None:
        self._socket.close()

    def _put(self, address: int, size: int) -> None:
        self._socket.sendall(size.to_bytes(8, "little"))
        self._socket.sendall(memoryview((ctypes.c_char * size).from_address(address)))
        self._socket.recv(1)

    def _get(self, address: int, size: int) -> None:
        view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        self._socket.sendall((size | GET).to_bytes(8, "little"))
        receive(self._socket, view)


def receive(sock: socket.socket, view: memoryview) -> None:
    got = 0
    while got < len(view):
        got += sock.recv_into(view[got:])


def serve(limit: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    memory = memoryview(bytearray(b"\1" * limit))
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(header := sock.recv(8, socket.MSG_WAITALL)) == 8:
            size = int.from_bytes(header, "little")
            if size & GET:
                sock.sendall(memory[: size & ~GET])
            else:
                receive(sock, memory[:size])
                sock.sendall(b"k")
        sock.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
