"""The traffic class of a connection, written on its packets for NIC and switch queues.

Numbers: `SO_PRIORITY` as Linux's queueing disciplines read it. Their default bands (pfifo_fast, prio: 0 before 1 before
2) are, for priorities 0 to 7, 1 2 2 2 1 2 0 0, so 5 would come *last* and 7 needs a privilege; hence 6 · 4 · 0 and
3 · 2 · 1 below them all. DSCP from RFC 4594 (CS5, AF4x … AF1x) and RFC 8622 (LE, "less than best effort"): a network
that knows nothing about them treats all alike, one that follows the RFCs has the right order.
"""

from __future__ import annotations

import socket

import msgspec

from anabranch.transfer.classes import TrafficClass


class Mark(msgspec.Struct, frozen=True):
    priority: int
    dscp: int


MARKS = {
    TrafficClass.MODEL: Mark(6, 40),  # CS5
    TrafficClass.HANDOFF: Mark(4, 34),  # AF41
    TrafficClass.LOAD: Mark(0, 26),  # AF31
    TrafficClass.PREFETCH: Mark(3, 18),  # AF21
    TrafficClass.WRITEBACK: Mark(2, 10),  # AF11
    TrafficClass.MIGRATE: Mark(1, 1),  # LE
}


def mark(sock: socket.socket, traffic: TrafficClass) -> bool:
    """Mark all further packets of an IP connection. Marks are advice: False if there is nothing to mark (a UNIX socket)
    or the system refuses (a sandbox); what is sent is the same either way."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    chosen = MARKS[traffic]
    try:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, chosen.dscp << 2)
        else:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, chosen.dscp << 2)
        # After the TOS: Linux derives a priority of its own from that.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, chosen.priority)
    except OSError:
        return False
    return True
