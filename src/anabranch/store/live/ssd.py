"""Reading and writing the SSD tier: aligned, whole slots, one read for a run of neighbours, off the brain's thread.

**Covers** bytes and their verification. **Does not cover** what is where (`store.ssd_index`) or when to write
(`store.writeback`). Reads and writes go through aligned buffers, so a stuck read can never write into a slot that was
given to somebody else: the copy out of the buffer needs an open `Landing`.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable

from anabranch.blocks.checksum import block_sum, layer_sum
from anabranch.blocks.layout import KvLayout
from anabranch.core.errors import StaleLease
from anabranch.core.faults import Faults
from anabranch.store.actions import NodeEvent, SsdReleased, SsdWritten, WriteSsd
from anabranch.store.live.segment_files import SegmentFiles
from anabranch.store.slots import Named
from anabranch.store.ssd_format import PAGE, pack_header, unpack_header
from anabranch.transfer.layouts import layout_digest
from anabranch.transfer.live.arena import Arena
from anabranch.transfer.live.segments import SegmentTask
from anabranch.transfer.live.tally import Tally
from anabranch.transfer.live.workers import Workers

log = logging.getLogger(__name__)
READERS = 2
RUN_BYTES = 8 << 20
STUCK_S = 1.0


class SsdFiles:
    """The SSD tier's hands. `found`: the blocks that were on disk at the start."""

    def __init__(
        self,
        directory: str,
        layout: KvLayout,
        limit_bytes: int,
        arena: Arena,
        tally: Tally,
        faults: Faults,
        post: Callable[[NodeEvent], None],
    ) -> None:
        self._files = SegmentFiles(directory, layout, limit_bytes, faults)
        self._layout = layout
        self._digest = layout_digest(layout)
        self._arena = arena
        self._tally = tally
        self._faults = faults
        self._post = post
        self.slots = self._files.slots
        self.found = list(self._files.entries())
        self._sequence = max((entry.sequence for entry in self.found), default=0)
        self._running: dict[threading.Thread, float] = {}
        self._buffers: dict[threading.Thread, mmap.mmap] = {}
        self._readers = Workers("ssd-read", READERS)
        self._writer = Workers("ssd-write", 1)
        self._page = mmap.mmap(-1, self._files.stride)

    @property
    def healthy(self) -> bool:
        """Not every reader is stuck in a read."""
        now = time.monotonic()
        stuck = sum(now - since > STUCK_S for since in list(self._running.values()))
        return stuck < READERS

    @property
    def reading(self) -> int:
        """Reads queued or under way."""
        return self._readers.outstanding

    def read(self, ssd_slots: list[int], blocks: list[Named], task: SegmentTask) -> None:
        """Read and verify blocks into the task's arena slots; SsdReleased follows when the SSD slots are not needed
        any more."""
        self._readers.submit(lambda: self._read(ssd_slots, blocks, task))

    def write(self, order: WriteSsd) -> None:
        """Write a slot of the arena; SsdWritten follows."""
        self._writer.submit(lambda: self._write(order))

    def close(self) -> None:
        self._readers.close()
        self._writer.close()
        self._files.close()

    # --- reading ------------------------------------------------------------------------------------------------

    def _read(self, ssd_slots: list[int], blocks: list[Named], task: SegmentTask) -> None:
        reason = ""
        me = threading.current_thread()
        try:
            for first, count in _runs(ssd_slots, self._files.per_segment, max(RUN_BYTES // self._files.stride, 1)):
                if not task.landing.open:
                    break
                self._running[me] = time.monotonic()
                buffer = self._fetch(ssd_slots[first], count)
                del self._running[me]
                for i in range(count):
                    self._deliver(buffer, i, ssd_slots[first + i], first + i, blocks[first + i], task)
            if task.corrupt:
                reason = "blocks on disk are damaged"
            else:
                task.layers_ready(self._layout.layers)
        except StaleLease:
            reason = "stopped"
        except OSError as error:
            self._tally.add("ssd_read_errors")
            reason = f"reading the SSD tier failed: {error}"
        finally:
            self._running.pop(me, None)
            task.end(reason)
            self._post(SsdReleased(ssd_slots))

    def _fetch(self, slot: int, count: int) -> memoryview:
        """`count` neighbouring slots, headers included."""
        stride = self._files.stride
        effect = self._faults.at("ssd.read")
        if effect == "fail":
            raise OSError(errno.EIO, "input/output error")
        fd, offset = self._files.place(slot)
        view = memoryview(self._buffer(count * stride))[: count * stride]
        got = os.preadv(fd, [view], offset)
        self._tally.add("ssd_reads")
        self._tally.add("bytes_read", got)
        if effect == "short":
            got = max(got - stride // 2, 0)
        if effect == "flip":
            view[PAGE + 1] ^= 1
        if got < len(view):
            view[got:] = bytes(len(view) - got)
        return view

    def _deliver(self, buffer: memoryview, at: int, ssd_slot: int, index: int, block: Named, task: SegmentTask) -> None:
        layout, start = self._layout, at * self._files.stride
        entry = unpack_header(buffer[start : start + PAGE], self._digest, ssd_slot)
        data = buffer[start + PAGE : start + PAGE + layout.full_block_bytes]
        size = layout.layer_block_bytes
        total = block_sum([layer_sum(data[i * size : (i + 1) * size]) for i in range(layout.layers)])
        if entry is None or entry.block != block or total != block.block_sum:
            task.corrupt.append(index)
            return
        task.landing.copy(self._arena.block(task.slots[index]), data)
        task.sums[index] = total

    def _buffer(self, size: int) -> mmap.mmap:
        """This thread's aligned buffer."""
        me = threading.current_thread()
        buffer = self._buffers.get(me)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[me] = mmap.mmap(-1, max(size, RUN_BYTES))
        return buffer

    # --- writing ------------------------------------------------------------------------------------------------

    def _write(self, order: WriteSsd) -> None:
        outcome = ""
        try:
            self._files.grow_to(order.ssd_slot)
            self._put(order)
        except OSError as error:
            outcome = "full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
            log.warning("writing to the SSD tier failed: %s", error)
        self._post(SsdWritten(order.slot, order.ssd_slot, order.block, outcome, self._files.real_slots))

    def _put(self, order: WriteSsd) -> None:
        effect = self._faults.at("ssd.write")
        if effect == "fail":
            raise OSError(errno.EIO, "input/output error")
        self._sequence += 1
        header = pack_header(order.block, self._digest, self._sequence)
        view = memoryview(self._page)
        view[: len(header)] = header
        view[PAGE : PAGE + self._layout.full_block_bytes] = self._arena.block(order.slot)
        if effect == "flip":
            view[PAGE + 1] ^= 1
        fd, offset = self._files.place(order.ssd_slot)
        whole = len(view) if effect != "short" else PAGE
        written = os.pwrite(fd, view[:whole], offset)
        self._tally.add("bytes_written", written)
        if written < len(view):
            raise OSError(errno.EIO, f"only {written} of {len(view)} bytes were written")


def _runs(slots: list[int], per_segment: int, longest: int) -> list[tuple[int, int]]:
    """(index, count) of stretches of neighbouring slots in one segment file."""
    runs: list[tuple[int, int]] = []
    for i, slot in enumerate(slots):
        if runs:
            first, count = runs[-1]
            if slot == slots[first] + count and count < longest and slot % per_segment:
                runs[-1] = (first, count + 1)
                continue
        runs.append((i, 1))
    return runs
