"""How `tcp` transports talk: a greeting, then one request after another on each connection.

→ GREETING                                  the secret of the description; the class of what will be asked for
→ REQUEST + region name [+ bytes]           write: the bytes of one slice
← ANSWER [+ bytes]                          read: the bytes of one slice
"""

from __future__ import annotations

import socket
import struct

from anabranch.core.errors import Unavailable

MAGIC = b"ANBSLC1\n"
SECRET_BYTES = 32
SLICE_BYTES = 512 << 10
GREETING = struct.Struct(f">8s{SECRET_BYTES}sB")
REQUEST = struct.Struct(">BBQQQ")  # op, length of the region's name, offset, size, xxh3_64 of a write's bytes
ANSWER = struct.Struct(">BQ")  # Moved, xxh3_64 of a read's bytes
READ, WRITE = 1, 2
MAX_NAME = 255


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    """Fill the view. Raises Unavailable if the peer closes, OSError (also TimeoutError) as the socket does."""
    at = 0
    while at < view.nbytes:
        got = sock.recv_into(view[at:])
        if not got:
            raise Unavailable("the peer closed the connection")
        at += got


def send_parts(sock: socket.socket, head: bytes, data: memoryview | None) -> None:
    """Header and bytes, in one call where the kernel takes it."""
    if data is None or not data.nbytes:
        sock.sendall(head)
        return
    sent = sock.sendmsg([head, data])
    if sent < len(head):
        sock.sendall(head[sent:])
        sent = len(head)
    if sent - len(head) < data.nbytes:
        sock.sendall(data[sent - len(head) :])
