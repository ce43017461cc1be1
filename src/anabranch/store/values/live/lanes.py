"""The lanes to one node: opened when they are needed, kept for the next call, and a memory of a node that failed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec

from anabranch.core.errors import AnabranchError, DeadlineExceeded, Retryable, Unavailable, WireError
from anabranch.store.values.live.attempts import Ended
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.lane import Lane
from anabranch.store.values.live.session import Session, same_process
from anabranch.store.values.messages import Welcome
from anabranch.transfer.live.rails import Rail, RailSet

MAX_IDLE = 8
CONNECT_S = 1.0
FIRST_REST_S = 0.25
LONGEST_REST_S = 4.0


class LanePool:
    """Thread-safe. A lane belongs to one call at a time; how many there are is how many calls run at once. On a host
    with several NICs lanes are spread over the rails that lead to the node: one that fails is left for the others, and
    tried again later in the background (`submit`)."""

    def __init__(
        self,
        address: str,
        session: Session,
        on_welcome: Callable[[LanePool, Welcome], None],
        submit: Callable[[Callable[[], None]], bool] | None = None,
    ) -> None:
        self.address = address
        self.welcome: Welcome | None = None
        self._session = session
        self._on_welcome = on_welcome
        self._lock = threading.Lock()
        self._idle: list[Lane] = []
        self._used: set[Lane] = set()
        self._closed = False
        self._rails: RailSet | None = None
        self._submit = submit
        self._probing = False
        self._near_address = ""
        self._rest_s = 0.0
        self._rests_until = 0.0
        self.opened = 0
        """Lanes opened so far."""

    @property
    def resting(self) -> bool:
        """It failed a short while ago: ask others first."""
        return self._rests_until > time.monotonic()

    @property
    def suspect(self) -> bool:
        """Nothing has gone well since it failed last."""
        return self._rest_s > 0

    def another_way(self, lane: Lane) -> bool:
        """The lane's rail has failed, and there is another that has not."""
        return lane.lost and lane.rail is not None and self._rails is not None and bool(self._rails.in_use())

    def failed(self, lane: Lane | None = None) -> None:
        """A call failed here. Rests grow while it stays away; lanes that lie idle are no better. With the lane that is
        to blame (dropped before), the node rests only if no rail to it is left."""
        if lane is not None and self.another_way(lane):
            return
        with self._lock:
            self._rest_s = min(max(2 * self._rest_s, FIRST_REST_S), LONGEST_REST_S)
            self._rests_until = time.monotonic() + self._rest_s
            idle, self._idle = self._idle, []
        for one in idle:
            self._end(one)

    @contextmanager
    def lane(self, call: Call) -> Iterator[Lane]:
        """A lane for one exchange. If the exchange fails the lane is closed, and unless the node itself refused, the
        node rests for a while. Raises what `Session.open` raises."""
        lane = self.take(call)
        try:
            yield lane
        except (Retryable, WireError):
            self.drop(lane, call)
            if not call.cancelled:
                self.failed(lane)
            raise
        except BaseException:
            self.drop(lane, call)
            raise
        self.give(lane, call)

    def take(self, call: Call) -> Lane:
        """The caller ends with `give` or `drop`."""
        while True:
            with self._lock:
                if self._closed:
                    raise Unavailable("the client is closed")
                lane = self._idle.pop(self._lightest()) if self._idle else None
                if lane is not None:
                    self._used.add(lane)
            if lane is None:
                lane = self._open(call.left_s, call.patience_s)
            if lane.quiet:
                try:
                    call.hold(lane)
                except BaseException:
                    self.drop(lane, call)
                    raise
                self._probe_rail()
                return lane
            self.drop(lane, call)

    def give(self, lane: Lane, call: Call) -> None:
        """Back from a whole exchange."""
        call.release(lane)
        self._keep(lane)

    def drop(self, lane: Lane, call: Call) -> None:
        call.release(lane)
        with self._lock:
            self._used.discard(lane)
        self._end(lane)

    def broken(self, lane: Lane, error: AnabranchError, call: Call) -> Ended:
        """Work on the lane ended with this error: the lane goes, the node rests if it is to blame. FOR_GOOD: another
        lane would not help."""
        self.drop(lane, call)
        if isinstance(error, Retryable | WireError) and not call.cancelled:
            self.failed(lane)
        # Silence is not cured by asking again, unless it can be asked on another rail.
        silent = isinstance(error, DeadlineExceeded) and not self.another_way(lane)
        return Ended.FOR_GOOD if silent or call.over else Ended.BROKEN

    def probe(self) -> bool:
        """Whether it lets us in again; its next rest is longer if not. Blocks up to CONNECT_S."""
        try:
            self._keep(self._open(CONNECT_S, CONNECT_S))
        except AnabranchError:
            self.failed()
            return False
        return True

    def _keep(self, lane: Lane) -> None:
        with self._lock:
            self._used.discard(lane)
            self._rest_s = self._rests_until = 0.0
            if not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(lane)
                return
        self._end(lane)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            used = list(self._used)
        for lane in idle:
            lane.close()
        for lane in used:
            lane.shut()

    @property
    def lanes(self) -> int:
        with self._lock:
            return len(self._idle) + len(self._used)

    @property
    def several_rails(self) -> bool:
        rails = self._rails
        return rails is not None and len(rails.rails) > 1 and not self._near_address

    @property
    def rails(self) -> dict[str, int]:
        """Lanes over each rail in use."""
        rails = self._rails
        return {str(rail): rails.lanes(rail) for rail in rails.in_use()} if rails is not None else {}

    def _open(self, left_s: float, patience_s: float, only: Rail | None = None) -> Lane:
        timeout_s = max(0.05, min(CONNECT_S, left_s, patience_s))
        try:
            if self._near_address and only is None:
                lane, welcome = self._session.open(self._near_address, timeout_s)
                lane.rail = None
            else:
                rails = self._way()
                lane, welcome = self._session.open(self.address, timeout_s, over=rails, only=only)
        except (Retryable, WireError):
            self._near_address = ""
            if only is None:
                self.failed()
            raise
        self.opened += 1
        try:
            self._on_welcome(self, welcome)
        except AnabranchError:
            self._end(lane)
            raise
        if self.welcome is None or self.welcome != msgspec.structs.replace(welcome, proof=self.welcome.proof):
            self.welcome = welcome
            lane = self._nearer(lane, welcome, timeout_s)
        with self._lock:
            if not self._closed:
                self._used.add(lane)
                return lane
        self._end(lane)
        raise Unavailable("the client is closed")

    def _lightest(self) -> int:
        """Under the lock: which idle lane goes over the rail with the fewest lanes at work; the one used last, if there
        is but one rail."""
        if not self.several_rails:
            return -1
        busy = Counter(lane.rail for lane in self._used)
        return min(range(len(self._idle)), key=lambda i: busy[self._idle[i].rail])

    def _way(self) -> RailSet:
        """Raises Unavailable if no NIC reaches the node."""
        with self._lock:
            if self._rails is None:
                self._rails = self._session.links.rails(self.address)
            return self._rails

    def _end(self, lane: Lane) -> None:
        lane.close()
        if self._rails is None or lane.rail is None:
            return
        if not lane.lost:
            self._rails.closed(lane.rail)
            return
        self._rails.failed(lane.rail)
        with self._lock:
            idle = [one for one in self._idle if one.rail == lane.rail]
            self._idle = [one for one in self._idle if one.rail != lane.rail]
        for one in idle:
            one.close()
            self._rails.closed(lane.rail)

    def _probe_rail(self) -> None:
        """A rail without a lane, e.g. one that failed a while ago, gets one in the background."""
        if self._rails is None or self._submit is None or self._near_address:
            return
        rail = self._rails.missing()
        if rail is None:
            return
        with self._lock:
            if self._probing:
                return
            self._probing = True
        if not self._submit(partial(self._try_rail, rail)):
            self._probing = False

    def _try_rail(self, rail: Rail) -> None:
        try:
            self._keep(self._open(CONNECT_S, CONNECT_S, only=rail))
        except AnabranchError:
            pass  # it rests longer
        finally:
            self._probing = False

    def _nearer(self, lane: Lane, welcome: Welcome, timeout_s: float) -> Lane:
        """A UNIX socket instead of TCP where the node is on this host."""
        if lane.address.startswith("unix:") or not (welcome.local_address and self._session.same_host(welcome)):
            return lane
        try:
            near, again = self._session.open(welcome.local_address, timeout_s)
        except AnabranchError:
            return lane  # e.g. another mount namespace: the path is not there
        if not same_process(welcome, again):
            near.close()
            return lane  # the path leads to another node's socket here
        self._near_address = welcome.local_address
        near.rail = None
        self._end(lane)
        return near
