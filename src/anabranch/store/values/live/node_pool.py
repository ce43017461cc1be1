"""A few threads for calls that may block for ever: disks, backing stores, other nodes.

Whoever waits has a deadline; a call that never returns costs its thread, no more. When all threads have been stuck for
long, new work is refused at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from anabranch.core.errors import AnabranchError


class Work:
    """One call under way. `wait` → it has ended; `error`: how it failed."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._done = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._call()
        except (AnabranchError, OSError) as error:
            self.error = error
        finally:
            self._done.set()

    def wait(self, timeout_s: float) -> bool:
        return self._done.wait(max(0.0, timeout_s))


class WorkPool:
    """`stuck_s`: how long all threads may be busy before `submit` refuses."""

    def __init__(self, name: str, threads: int, *, stuck_s: float = 10.0) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: deque[Work] = deque()
        self._busy_since: dict[int, float] = {}
        self._stuck_s = stuck_s
        self._closing = False
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def stuck(self) -> bool:
        with self._lock:
            return self._is_stuck()

    def submit(self, call: Callable[[], None]) -> Work | None:
        """None: refused."""
        work = Work(call)
        with self._lock:
            if self._closing or self._is_stuck():
                return None
            self._queue.append(work)
            self._wake.notify()
        return work

    def close(self, timeout_s: float = 2.0) -> bool:
        """Threads end when their call does; False if some did not within the time."""
        with self._lock:
            self._closing = True
            self._wake.notify_all()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _is_stuck(self) -> bool:
        if len(self._busy_since) < len(self._threads):
            return False
        return time.monotonic() - max(self._busy_since.values()) > self._stuck_s

    def _run(self) -> None:
        me = threading.get_ident()
        while True:
            with self._lock:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._queue:
                    return
                work = self._queue.popleft()
                self._busy_since[me] = time.monotonic()
            work.run()
            with self._lock:
                del self._busy_since[me]
