"""The directory as nodes and clients see it: one object, however many shards it has and whoever leads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from anabranch.core.errors import Unavailable
from anabranch.core.live.handshake import OPEN_DIALER, Dialer
from anabranch.core.messages import Message
from anabranch.store.live.directory_feed import AnnouncingNode, Feed
from anabranch.store.live.directory_lanes import Lanes
from anabranch.store.live.directory_refusal import Refused
from anabranch.store.live.election import Electorate
from anabranch.store.live.etcd import SCHEME
from anabranch.store.messages import ListNodes, NodeList, NodeRow, Places, Where
from anabranch.store.shards import Whereabouts, join, shard_addresses, split
from anabranch.store.values.key_table import HOLDERS
from anabranch.store.values.scope import NAME_BYTES

ASK_NAMES = 65_536
NODES_FRESH_S = 0.5
LEADERLESS = "nobody leads the directory at the moment; a new leader takes over within seconds"
NOTHING: Mapping[str, bytes] = {}
NO_WISHES: Mapping[int, bytes] = {}


class DirectoryLink:
    """`addresses`: host:port of each shard in order, comma-separated, or `etcd://host:port,…`. Thread-safe; questions
    run on the caller's thread. A shard that does not answer delays a caller until its deadline once; after that its
    names are unknown at once until it answers again. With `node`, everything that node holds is announced, and again
    whenever a shard has lost it. `dial`: how to prove who we are.

    Raises ConfigError for addresses that are none.
    """

    def __init__(self, addresses: str, node: AnnouncingNode | None = None, dial: Dialer = OPEN_DIALER) -> None:
        self._lanes = Lanes(dial)
        self._shards: Callable[[], list[str]] = list
        self._nodes: tuple[float, list[NodeRow]] = (-1e9, [])
        self._feeding = threading.Lock()
        self._node = node
        self._dial = dial
        self._feeds: list[Feed] = []
        self._electorate: Electorate | None = None
        if addresses.startswith(SCHEME):
            self._electorate = Electorate(addresses, self._led, None if node is None else node.join)
            self._shards = self._electorate.addresses
            self._led()
        else:
            fixed = shard_addresses(addresses)
            self._shards = lambda: fixed
            self._feed()

    @property
    def addresses(self) -> list[str]:
        """Where each shard is asked, "" for one that nobody leads at the moment."""
        return list(self._leaders(time.monotonic() + 1.0))

    @property
    def joined(self) -> bool:
        """Every shard has been told what the node holds."""
        return bool(self._feeds) and all(feed.joined for feed in self._feeds)

    def announce(
        self,
        added: Mapping[str, bytes] = NOTHING,
        removed: Mapping[str, bytes] = NOTHING,
        wanted: Mapping[int, bytes] = NO_WISHES,
    ) -> None:
        """Tier → names that this node now holds, or no longer holds; replica count → those of the added names that want
        another number of replicas than `Join.replicas`. What is removed counts before what is added. Never blocks; a
        shard that is away hears it when it is back."""
        for feed in self._feeds:
            feed.changed(added, removed, wanted)

    def where(self, names: bytes, run: bool = False, timeout_s: float = 1.0) -> Whereabouts:
        """Who holds these values (32 bytes each)? `run`: only up to the first that nobody is known to hold. Names of a
        shard that does not answer are unknown; raises Unavailable if none of the shards asked does."""
        deadline = time.monotonic() + timeout_s
        if len(names) <= ASK_NAMES * NAME_BYTES:
            return self._where(names, run, deadline)
        step, parts, rows = ASK_NAMES * NAME_BYTES, [], []
        for at in range(0, len(names), step):
            part = self._where(names[at : at + step], run, deadline)
            rows.append(range(at // NAME_BYTES, at // NAME_BYTES + len(part)))
            parts.append(part)
            if run and len(part) < len(names[at : at + step]) // NAME_BYTES:
                break
        return join(rows[-1].stop, [(part, list(own)) for part, own in zip(parts, rows, strict=True)])

    def nodes(self, timeout_s: float = 1.0) -> list[NodeRow]:
        """Every node that some shard listens to, as of at most NODES_FRESH_S ago. Raises Unavailable if no shard
        answers."""
        asked, rows = self._nodes
        now = time.monotonic()
        if now - asked > NODES_FRESH_S:
            shards = self._leaders(now + timeout_s)
            answers = self._ask({address: ListNodes(op=0) for address in shards if address}, now + timeout_s)
            found = {
                row.node_id: row for answer in answers.values() if isinstance(answer, NodeList) for row in answer.nodes
            }
            rows = [found[node_id] for node_id in sorted(found)]
            self._nodes = (time.monotonic(), rows)
        return rows

    @property
    def _leaderless(self) -> str:
        return (self._electorate.problem if self._electorate is not None else "") or LEADERLESS

    def close(self) -> None:
        if self._electorate is not None:
            self._electorate.close()
        for feed in self._feeds:
            feed.close()
        self._lanes.close()

    def _led(self) -> None:
        """The shards, or their leaders, are others now."""
        with self._feeding:
            if not self._feeds:
                self._feed()
        for feed in self._feeds:
            feed.nudge()

    def _feed(self) -> None:
        if self._node is not None:
            count, up = len(self._shards()), self._lanes.up
            self._feeds = [
                Feed(self._node, shard, count, partial(self._address, shard), up, self._dial) for shard in range(count)
            ]

    def _address(self, shard: int) -> str:
        return self._shards()[shard]

    def _leaders(self, deadline: float) -> list[str]:
        return self._shards() if self._electorate is None else self._electorate.first_known(deadline)

    def _where(self, names: bytes, run: bool, deadline: float) -> Whereabouts:
        addresses = self._leaders(deadline)
        if not any(addresses):
            raise Unavailable(self._leaderless)
        shares = split(names, len(addresses))
        questions: dict[str, Message] = {
            address: Where(op=0, names=own, run=run)
            for address, (own, _) in zip(addresses, shares, strict=True)
            if own and address
        }
        if not names:
            return Whereabouts(b"")
        answers = self._ask(questions, deadline)
        parts = []
        for address, (_, rows) in zip(addresses, shares, strict=True):
            answer = answers.get(address)
            if isinstance(answer, Places):
                parts.append((Whereabouts(answer.places, answer.members, answer.unknown), rows))
            elif rows is None or rows:
                parts.append((Whereabouts(b"", unknown=True), rows))
        found = join(len(names) // NAME_BYTES, parts)
        if run and len(addresses) > 1:
            return Whereabouts(found.places[: found.run * HOLDERS * 2], found.members, found.unknown)
        return found

    def _ask(self, questions: dict[str, Message], deadline: float) -> dict[str, Message | Unavailable]:
        """Raises Unavailable if nobody answers."""
        if not questions:
            raise Unavailable(self._leaderless)
        answers = self._lanes.ask(questions, deadline)
        failures = [answer for answer in answers.values() if isinstance(answer, Unavailable)]
        if failures and len(failures) == len(answers):
            raise next((one for one in failures if isinstance(one, Refused)), failures[0])
        return answers
