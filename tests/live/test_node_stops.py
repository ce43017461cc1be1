"""A node that stops, or breaks, lets go of its engines' pages before they hear that it is gone.

Once an engine was told that a transfer ended it writes to the pages itself (a hand-off's last page is where its next
token goes), so a byte that lands after that is a wrong answer.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from anabranch.core.errors import DeadlineExceeded
from anabranch.engine import kv_port as port
from anabranch.store.messages import StatRequest
from anabranch.testing.faults import PlannedFaults
from anabranch.testing.store import LAYOUT, StoreLab, chain, wait_for


@pytest.mark.parametrize("end", ["stops", "breaks"])
def test_no_byte_lands_after_the_engine_heard_that_the_node_is_gone(tmp_path: Path, end: str) -> None:
    sending, fetching = PlannedFaults(), PlannedFaults()
    with StoreLab(tmp_path) as lab:
        lab.node("p", faults=sending, peer_timeout_s=20.0)
        lab.node("d", faults=fetching, peer_timeout_s=20.0)
        prefill, decode = lab.probe("p"), lab.probe("d")
        keys = chain("h", 2)
        mine, theirs = prefill.reserve(2), decode.reserve(2)
        prefill.fill(mine, keys)
        decode.port.open_inbound("h1", theirs, first=0, deadline_s=30)
        ticket = decode.take(port.InboundOpened).ticket
        sending.arm("push.payload", "hang")
        prefill.port.open_outbound("h1", ticket)
        for layer in range(LAYOUT.layers):
            prefill.port.push_layer("h1", layer, [(slot, i) for i, slot in enumerate(mine)])
        prefill.port.finish_outbound("h1")
        wait_for(lambda: sending.hanging == 1, "the push to hang before its bytes")
        # A fetch that hangs makes stopping take its time.
        others = chain("f", 2)
        prefill.put(others)
        lab.announced(2)
        fetching.arm("peer.fetch.request", "hang")
        decode.port.acquire(900, others, tenant="t", load=True, deadline_s=30)
        wait_for(lambda: fetching.hanging == 1, "the fetch to hang")

        ending = threading.Thread(target=_end, args=(lab, end))
        ending.start()
        decode.take(port.InboundEnded)
        own = chain("own", 2)
        decode.fill(theirs, own)
        sending.release()
        ended = prefill.take(port.OutboundEnded)
        assert all(decode.right(slot, key) for slot, key in zip(theirs, own, strict=True))
        assert ended.reason
        fetching.release()
        ending.join()


def _end(lab: StoreLab, how: str) -> None:
    if how == "stops":
        lab.nodes.pop("d").stop()
        return
    node = lab.nodes["d"]
    node._inbox.put(object())  # no event that a brain knows
    wait_for(lambda: node.failure is not None, "the node to break")
    del lab.nodes["d"]
    with pytest.raises(KeyError):
        node.stop()


class _Stopper:
    """A link whose `send` holds the node's brain up."""

    def __init__(self) -> None:
        self.reached, self.release = threading.Event(), threading.Event()

    def send(self, message: object) -> bool:
        self.reached.set()
        return self.release.wait(20.0)


def test_a_broken_link_to_a_slow_node_is_no_licence_to_write(tmp_path: Path) -> None:
    """The node lives and has not noticed yet: until it has let go, its transfers have not ended."""
    sending, stopper = PlannedFaults(), _Stopper()
    with StoreLab(tmp_path) as lab:
        lab.node("p", faults=sending, peer_timeout_s=20.0)
        node = lab.node("d", peer_timeout_s=20.0)
        prefill, decode = lab.probe("p"), lab.probe("d")
        mine, theirs = prefill.reserve(2), decode.reserve(2)
        prefill.fill(mine, chain("h", 2))
        decode.port.open_inbound("h1", theirs, first=0, deadline_s=30)
        sending.arm("push.payload", "hang")
        prefill.port.open_outbound("h1", decode.take(port.InboundOpened).ticket)
        for layer in range(LAYOUT.layers):
            prefill.port.push_layer("h1", layer, [(slot, i) for i, slot in enumerate(mine)])
        wait_for(lambda: sending.hanging == 1, "the push to hang before its bytes")
        node._inbox.put((stopper, StatRequest()))
        stopper.reached.wait(20.0)

        link = decode.port._link
        assert link is not None
        link.close("cut")
        own = chain("own", 2)
        try:
            decode.take(port.InboundEnded, timeout_s=0.3)
            told = True
            decode.fill(theirs, own)
        except DeadlineExceeded:
            told = False
        sending.release()
        wait_for(lambda: node.counters["bytes_received"] >= 2 * LAYOUT.full_block_bytes, "the bytes to land")
        stopper.release.set()
        if not told:
            assert decode.take(port.InboundEnded).reason
            decode.fill(theirs, own)
        decode.take(port.PortLost)
        assert decode.take(port.PortBack).lost == []
        prefill.port.finish_outbound("h1")
        prefill.take(port.OutboundEnded)
        assert all(decode.right(slot, key) for slot, key in zip(theirs, own, strict=True))
        decode.port.free(theirs)
        wait_for(lambda: node.census()["free_slots"] == 64, "the pages")
