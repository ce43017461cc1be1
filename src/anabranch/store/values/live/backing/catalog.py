"""What a node knows of the packs in a backing store, and how it learns and publishes more."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from anabranch.core.errors import IntegrityError, Unavailable
from anabranch.store.values.contracts import Record
from anabranch.store.values.live.backing.objects import Objects
from anabranch.store.values.log_format import Entry
from anabranch.store.values.packs import (
    GONE,
    INDEX,
    Gone,
    Pack,
    PackIndex,
    decode_gone,
    decode_head,
    encode_gone,
    encode_head,
    gone_object,
    index_object,
    object_number,
    pack_object,
)
from anabranch.transfer.live.tally import Tally

log = logging.getLogger(__name__)
RELISTS = 5
LEARNERS = 8
"""Index objects that a refresh fetches at once."""


class Catalog:
    """`lock` guards `index` and `unlisted`, the packs that this process is writing; never held during a request."""

    def __init__(self, objects: Objects, tally: Tally) -> None:
        self.objects = objects
        self.tally = tally
        self.lock = threading.Lock()
        self.index = PackIndex()
        self.unlisted: set[int] = set()
        self._refreshing = threading.Lock()
        self._ignored: set[int] = set()  # objects that are damaged or of another version

    # --- learning -----------------------------------------------------------------------------------------------

    def refresh(self) -> int:
        """Learn of objects that others wrote or deleted; how many packs were new. Raises Unavailable."""
        with self._refreshing:
            try:
                return self._refresh()
            except OSError as error:
                raise Unavailable(f"the backing tier cannot be reached: {error}") from error

    def _refresh(self) -> int:
        with self.lock:
            before = set(self.index.packs) - self.unlisted
            known = before | self.unlisted | self._ignored
        # Removals before packs: nobody is to see a value whose removal was there first.
        gone, removals = self._removals()
        there = {object_number(item.name): item.name for item in self.objects.list(INDEX)}
        heads = self._fetch({number: name for number, name in there.items() if number not in known})
        with self.lock:
            for number, content in removals:
                self._learn_removal(number, content)
            self.index.keep_removals(gone)
            for number in before - there.keys():
                self.index.forget_pack(number)
            return sum(self._learn_pack(number, content) for number, content in heads)

    def _removals(self) -> tuple[set[int], list[tuple[int, bytes]]]:
        """(All there are, those that are news). One that vanishes meanwhile was joined with others: look again."""
        for _ in range(RELISTS):
            with self.lock:
                known = self.index.removals.keys() | self._ignored
            listed = {object_number(item.name): item.name for item in self.objects.list(GONE)}
            wanted = {number: name for number, name in listed.items() if number not in known}
            found = self._fetch(wanted)
            if len(found) == len(wanted):
                # What was applied here since is not in the list.
                with self.lock:
                    since = self.index.removals.keys() - known
                return {number for number in listed if number is not None} | since, found
        raise OSError(errno.EBUSY, "removals change faster than they can be read")

    def _learn_removal(self, number: int, content: bytes) -> None:
        try:
            gone = decode_gone(content)
        except IntegrityError as error:
            log.warning("%s: %s", gone_object(number), error)
            self.tally.add("backing_ignored_objects")
            self._ignored.add(number)
            return
        self.index.removals[number] = gone
        self.index.apply(gone)

    def _learn_pack(self, number: int, content: bytes) -> bool:
        if number in self.index.packs:
            return False
        try:
            self.index.add(decode_head(number, content))
        except IntegrityError as error:
            log.warning("%s", error)
            self.tally.add("backing_ignored_objects")
            self._ignored.add(number)
            return False
        return True

    def _fetch(self, objects: Mapping[int | None, str]) -> list[tuple[int, bytes]]:
        """Contents of those that are still there."""
        wanted = [(number, name) for number, name in objects.items() if number is not None]
        if len(wanted) < 3:
            found = [self.get(name) for _, name in wanted]
        else:
            with ThreadPoolExecutor(min(LEARNERS, len(wanted)), thread_name_prefix="backing-learn") as pool:
                found = list(pool.map(self.get, [name for _, name in wanted]))
        return [(number, data) for (number, _), data in zip(wanted, found, strict=True) if data is not None]

    def get(self, name: str) -> bytes | None:
        try:
            return self.objects.get(name)
        except FileNotFoundError:
            return None

    # --- publishing ---------------------------------------------------------------------------------------------

    def write_pack(
        self, values: Sequence[tuple[Record, memoryview]], replaces: list[int], still: Callable[[], set[bytes]]
    ) -> None:
        """Data first; it counts once its index object is there. `still`, asked in between under the lock: which names
        may be seen. Raises OSError."""
        number = int.from_bytes(os.urandom(8), "big")
        entries: list[Entry] = []
        offset = 0
        for record, data in values:
            entries.append(Entry.of(record, offset, data.nbytes))
            offset += data.nbytes
        frame, _ = encode_head(number, entries, replaces)
        self.objects.put(pack_object(number), [*(data for _, data in values), memoryview(frame)])
        with self.lock:
            names = still()
            pack = Pack(number, {e.name: e for e in entries if e.name in names}, replaces, offset)
            # Known here before others can see it, so that a removal from now on names it.
            self.index.add(pack)
            self.unlisted.add(number)
            alive = list(pack.entries.values())
        self._publish(pack, alive)
        self.tally.add("backing_packs_written")
        self.tally.add("backing_written_bytes", offset)

    def _publish(self, pack: Pack, alive: list[Entry]) -> None:
        number, published = pack.number, False
        try:
            if alive:
                head = encode_head(number, alive, pack.replaces)[1]
                self.objects.put(index_object(number), [memoryview(head)])
                published = True
            else:
                self.objects.delete([pack_object(number)])
        finally:
            with self.lock:
                self.unlisted.discard(number)
                if not published:
                    self.index.forget_pack(number)

    def write_removal(self, gone: Gone) -> None:
        """Make a removal that was applied here last. Raises Unavailable."""
        if not gone.names and not gone.scopes:
            return
        number = int.from_bytes(os.urandom(8), "big")
        with self._refreshing:  # a list that is older than the object must not make its removal forgotten
            try:
                self.objects.put(gone_object(number), [memoryview(encode_gone(gone))])
            except OSError as error:
                raise Unavailable(f"the backing tier could not confirm a removal: {error}") from error
            with self.lock:
                self.index.removals[number] = gone
