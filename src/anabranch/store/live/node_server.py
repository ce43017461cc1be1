"""A node process: acts on what `store.node` decides.

One thread runs the brain: it takes events from an inbox, writes changed slot records to the arena, then carries out
the actions, none of which blocks. Links, SSD, peers and checksums have threads of their own and post events.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from anabranch.blocks.layout import KvLayout
from anabranch.core.errors import AnabranchError, InvalidInput, Unavailable
from anabranch.core.faults import NO_FAULTS, Faults
from anabranch.core.live.link import Link, Listener
from anabranch.paging.pool import SlotPool
from anabranch.policy.eviction.choice import eviction_policy
from anabranch.store import actions as a
from anabranch.store.config import NodeConfig
from anabranch.store.live.directory_client import DirectoryClient
from anabranch.store.live.process import is_gone, process_start
from anabranch.store.live.recovery import recovered
from anabranch.store.live.sealer import Sealer
from anabranch.store.live.ssd import SsdFiles
from anabranch.store.messages import Attach, Attached, Detach, PortToNode, Refused, Stat, StatRequest
from anabranch.store.node import ArenaName, Node
from anabranch.store.slots import SlotBook
from anabranch.store.ssd_index import SsdIndex
from anabranch.transfer.api import Address
from anabranch.transfer.live.arena import Arena
from anabranch.transfer.live.fetches import PeerFetcher
from anabranch.transfer.live.peer_server import PeerServer
from anabranch.transfer.live.pushes import Pusher
from anabranch.transfer.live.segments import SegmentTask
from anabranch.transfer.live.tally import Tally
from anabranch.transfer.messages import FetchRequest
from anabranch.transfer.records import AttachedSession

log = logging.getLogger(__name__)
TICK_S = 0.02
GONE_CHECK_S = 0.1
ANSWER_S = 10.0
SECRET_BYTES = 16


class NodeServer:
    """Runs a node. `start` returns when engines and peers can connect; `stop` leaves the arena for a successor unless
    told otherwise. `unix_address`: `unix:/path` for engines; `config.listen`: host:port for peers;
    `directory_address` "": no directory, hence no peers.

    Raises ConfigError for impossible sizes or an SSD directory in use, Unavailable for an address in use.
    """

    def __init__(
        self,
        node_id: str,
        layout: KvLayout,
        config: NodeConfig,
        *,
        unix_address: str,
        arena_path: str,
        directory_address: str = "",
        faults: Faults = NO_FAULTS,
    ) -> None:
        self.node_id = node_id
        self.layout = layout
        self.config = config
        self.unix_address = unix_address
        self._arena_path = arena_path
        self._directory_address = directory_address
        self._faults = faults
        self._decided: Counter[str] = Counter()
        self._tally = Tally()
        self.failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._links: dict[bytes, Link] = {}
        self._connections: set[Link] = set()
        self._orphans: dict[bytes, AttachedSession] = {}
        self._segments: dict[tuple[int, int], SegmentTask] = {}
        self._stopping = threading.Event()
        self._checked_gone = 0.0
        self._listener: Listener | None = None
        self._acts: dict[type, Callable[[Any], None]] = {
            a.Tell: self._tell,
            a.SaveSessions: lambda x: self.arena.write_sessions(x.sessions),
            a.SendDirectory: self._send_directory,
            a.ReadSsd: self._read_ssd,
            a.FetchPeer: self._fetch_peer,
            a.StopSegment: self._stop_segment,
            a.Seal: lambda x: self._sealer.put(x),
            a.WriteSsd: self._write_ssd,
            a.ServeFetch: lambda x: self._peers.serve(x.fetch, x.slots, x.generations, x.block_sums, x.reason),
            a.OpenSink: lambda x: self._peers.open_sink(x.handoff, x.secret, x.slots, x.first),
            a.CloseSink: lambda x: self._peers.close_sink(x.handoff, x.reason),
            a.StartPush: lambda x: self._pusher.start(x.handoff, x.ticket),
            a.Push: lambda x: self._pusher.push(x.handoff, x.layer, x.blocks),
            a.EndPush: lambda x: self._pusher.end(x.handoff, x.reason),
        }

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> NodeServer:
        config, post = self.config, self._inbox.put
        self.arena, kept = Arena.create(self._arena_path, self.layout, config.dram_bytes)
        self.ssd = self._open_ssd()
        index = self._index()
        book = SlotBook(self._pool(self.arena.slots), self.arena.slots, self._decided)
        self._peers = PeerServer(config.listen, self.arena, config.peer_timeout_s, self._tally, self._faults, self)
        self._fetcher = PeerFetcher(self.arena, config.peer_timeout_s, self._tally, self._faults)
        self._pusher = Pusher(
            self.arena, config.peer_timeout_s, self._tally, self._faults,
            lambda handoff, reason: post(a.OutboundDone(handoff, reason)),
        )  # fmt: skip
        self._sealer = Sealer(self.arena, post)
        name = ArenaName(self.arena.path, self.arena.inode, self.arena.epoch)
        self.address: Address = self._peers.address
        self.node = Node(
            self.node_id, self.layout, config, name, self.address, book, index, self._decided,
            lambda: secrets.token_bytes(SECRET_BYTES),
        )  # fmt: skip
        self._step(recovered(self.arena, self._decided) if kept else a.Recovered({}, []))
        self._directory = (
            DirectoryClient(self._directory_address, self.node.announcer, self._faults, post)
            if self._directory_address
            else None
        )
        self._thread = threading.Thread(target=self._run, name=f"node-{self.node_id}", daemon=True)
        self._thread.start()
        self._listener = Listener(self.unix_address, self._on_socket, name=f"node-{self.node_id}")
        return self

    def stop(self, *, unlink_arena: bool = False) -> None:
        """End every thread and close every file. Raises what made the node fail, if it had failed."""
        self._stop_listening()
        self._stopping.set()
        self._inbox.put(None)
        self._thread.join(5.0)
        if self._directory is not None:
            self._directory.close()
        self._leave_engines("node stops")
        for link in list(self._connections):
            link.join()
        self._fetcher.close()
        self._pusher.close()
        self._peers.close()
        self._sealer.close()
        if self.ssd is not None:
            self.ssd.close()
        self.arena.close()
        if unlink_arena:
            os.unlink(self._arena_path)
        if self.failure is not None:
            raise self.failure

    @property
    def counters(self) -> Counter[str]:
        """What happened since the start: a copy."""
        return self._tally.snapshot() + Counter(self._decided.copy())

    def census(self) -> dict[str, int]:
        """What is held right now, by the brain and by the edge."""
        return {
            **self._ask(self.node.census),
            "links": len(self._connections),
            "segments": len(self._segments),
            **self._peers.census(),
            **self._pusher.census(),
        }

    def stat(self) -> Stat:
        state = {"directory": "none", "ssd": "none"}
        if self._directory is not None:
            state["directory"] = "up" if self.node.loads.directory_up else "down"
        if self.ssd is not None:
            state["ssd"] = "paused" if self.node.writeback.paused else "ok" if self.ssd.healthy else "stuck"
        counters = {name: float(value) for name, value in self.counters.items()}
        return Stat(name=self.node_id, census=self.census(), counters=counters, state=state)

    def _ask(self, question: Callable[[], dict[str, int]]) -> dict[str, int]:
        """The answer of the brain's thread, which alone may look at its state while it runs."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return question()
        answer: Future[dict[str, int]] = Future()
        self._inbox.put(lambda: answer.set_result(question()))
        try:
            return answer.result(ANSWER_S)
        except TimeoutError as error:
            raise Unavailable(f"node {self.node_id} does not answer") from error

    def _open_ssd(self) -> SsdFiles | None:
        if not self.config.ssd_dir or not self.config.ssd_bytes:
            return None
        return SsdFiles(
            self.config.ssd_dir, self.layout, self.config.ssd_bytes, self.arena, self._tally, self._faults,
            self._inbox.put,
        )  # fmt: skip

    def _pool(self, slots: int) -> SlotPool:
        context_blocks = self.config.recompute_context_tokens / self.layout.block_tokens
        return SlotPool(slots, eviction_policy(self.config.eviction, slots, context_blocks))

    def _index(self) -> SsdIndex | None:
        if self.ssd is None:
            return None
        index = SsdIndex(self._pool(self.ssd.slots), self._decided)
        index.recover(self.ssd.found)
        self._decided["recovered_ssd"] += len(index.blocks)
        return index

    # --- the brain's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        ticked = 0.0
        try:
            while not self._stopping.is_set():
                try:
                    item = self._inbox.get(timeout=TICK_S)
                except queue.Empty:
                    item = None
                if isinstance(item, tuple):
                    self._from_link(*item)
                elif callable(item):
                    item()
                elif item is not None:
                    self._step(item)
                now = time.monotonic()
                if now - ticked >= TICK_S:
                    ticked = now
                    self._tick(now)
        except Exception as error:
            log.exception("node %s failed", self.node_id)
            self.failure = error
            self._stopping.set()
            self._leave_engines("node failed")
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _leave_engines(self, reason: str) -> None:
        """No byte may land in an engine's slots once the engine hears that the node is gone: it uses them itself then.
        The brain has ended, so nothing new begins."""
        for task in list(self._segments.values()):
            task.end(reason)
        self._peers.close_sinks(reason)
        for link in list(self._connections):
            link.close(reason)

    def _step(self, event: a.NodeEvent) -> None:
        if isinstance(event, a.SegmentEnded):
            self._segments.pop((event.load, event.segment), None)
        actions = self.node.handle(event, time.monotonic())
        for slot, record in self.node.take_records().items():
            self.arena.write(slot, record)
        for action in actions:
            self._acts[type(action)](action)

    def _tick(self, now: float) -> None:
        self.node.loads.ssd_up = self.ssd is None or self.ssd.healthy
        self._step(a.Tick())
        if now - self._checked_gone < GONE_CHECK_S:
            return
        self._checked_gone = now
        for session in [*self._orphans.values(), *self.node.awaited.values()]:
            if is_gone(session.pid, session.started):
                self._orphans.pop(session.session, None)
                self._step(a.SessionGone(session.session))

    # --- links of engines ---------------------------------------------------------------------------------------

    def _on_socket(self, sock: socket.socket) -> None:
        link = Link(
            sock,
            PortToNode,
            lambda link, message: self._inbox.put((link, message)),
            lambda link, reason: self._inbox.put((link, None)),
            name=f"node-{self.node_id}-port",
        )
        self._connections.add(link)
        link.start()

    def _from_link(self, link: Link, message: Any) -> None:
        session = next((s for s, known in self._links.items() if known is link), None)
        if isinstance(message, StatRequest):
            link.send(self.stat())
        elif isinstance(message, Attach):
            self._attach(link, message)
        elif message is None:
            self._connections.discard(link)
            if session is not None:
                del self._links[session]
                self._orphans[session] = self.node.sessions[session]
                self._step(a.PortLeft(session))
        elif session is not None:
            if isinstance(message, Detach):
                del self._links[session]
            self._step(a.PortMessage(session, message))

    def _attach(self, link: Link, m: Attach) -> None:
        pid = link.peer_pid or 0
        if m.layout != self.layout or len(m.session) != SECRET_BYTES:
            reason = f"node {self.node_id} holds blocks of another layout: {self.layout}, the engine has {m.layout}"
            link.send(Refused(reason=reason))
            return
        self._links[m.session] = link
        self._orphans.pop(m.session, None)
        self._step(a.PortAttached(AttachedSession(pid, process_start(pid), m.session), m.held))

    def _tell(self, x: a.Tell) -> None:
        link = self._links.get(x.session)
        if link is not None and not link.send(x.message) and isinstance(x.message, Attached):
            log.warning("engine port left while it attached to node %s", self.node_id)

    # --- what the peer server says (`transfer.live.peer_server.Owner`) --------------------------------------------

    def fetch_asked(self, fetch: int, request: FetchRequest, wait_s: float) -> None:
        self._inbox.put(a.FetchAsked(fetch, request.keys, request.tenant, wait_s))

    def fetch_served(self, fetch: int, lost: int, damaged: list[int]) -> None:
        self._inbox.put(a.FetchServed(fetch, lost, damaged))

    def inbound_done(self, handoff: str, reason: str) -> None:
        self._inbox.put(a.InboundDone(handoff, reason))

    # --- loads, writes, directory -------------------------------------------------------------------------------

    def _task(self, load: int, segment: int, slots: list[int]) -> SegmentTask:
        post = self._inbox.put
        task = SegmentTask(
            self.arena,
            slots,
            lambda layers: post(a.SegmentLayers(load, segment, layers)),
            lambda sums, reason, corrupt: post(a.SegmentEnded(load, segment, sums, reason, corrupt)),
        )
        self._segments[load, segment] = task
        return task

    def _read_ssd(self, x: a.ReadSsd) -> None:
        if self.ssd is None:
            raise InvalidInput("this node has no SSD tier")
        self.ssd.read(x.ssd_slots, x.blocks, self._task(x.load, x.segment, x.slots))

    def _write_ssd(self, x: a.WriteSsd) -> None:
        if self.ssd is None:
            raise InvalidInput("this node has no SSD tier")
        self.ssd.write(x)

    def _fetch_peer(self, x: a.FetchPeer) -> None:
        task = self._task(x.load, x.segment, x.slots)
        self._fetcher.fetch(x.address, x.keys, x.tenant, x.deadline_s, task)

    def _stop_segment(self, x: a.StopSegment) -> None:
        task = self._segments.get((x.load, x.segment))
        if task is not None:
            task.end("stopped")

    def _send_directory(self, x: a.SendDirectory) -> None:
        if self._directory is not None:
            self._directory.send(x.message)


def run_node(
    node_id: str,
    layout: KvLayout,
    config: NodeConfig,
    *,
    unix_address: str,
    arena_path: str,
    directory_address: str = "",
    faults: Faults = NO_FAULTS,
    ready: Callable[[NodeServer], None] = lambda server: None,
) -> None:
    """A node process's main: serve until SIGTERM or SIGINT, keep the arena for a successor. Main thread only."""
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    server = NodeServer(
        node_id, layout, config,
        unix_address=unix_address, arena_path=arena_path, directory_address=directory_address, faults=faults,
    ).start()  # fmt: skip
    ready(server)
    while not done.wait(0.2):
        if server.failure is not None:
            break
    try:
        server.stop()
    except AnabranchError:
        log.error("node %s had failed", node_id)
        raise
