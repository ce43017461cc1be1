"""A bounded number of daemon threads that run jobs in order; idle ones end by themselves."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

IDLE_S = 5.0


class Workers:
    """`limit` threads at most. A job must handle its own errors: what it raises ends up in threading.excepthook."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._outstanding = 0
        self._closed = False

    @property
    def outstanding(self) -> int:
        """Jobs queued or running."""
        return self._outstanding

    def submit(self, job: Callable[[], None]) -> bool:
        """False: closed, the job will not run."""
        with self._lock:
            if self._closed:
                return False
            self._outstanding += 1
            self._jobs.put(job)
            if len(self._threads) < min(self._limit, self._outstanding):
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.add(thread)
                thread.start()
            return True

    def close(self, timeout_s: float = 5.0) -> None:
        """No new jobs; wait for running ones. The caller has made sure that they end."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            for _ in threads:
                self._jobs.put(None)
        for thread in threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                job = None
            if job is None:
                with self._lock:
                    if self._closed or self._outstanding < len(self._threads):
                        self._threads.discard(threading.current_thread())
                        return
                continue
            try:
                job()
            finally:
                with self._lock:
                    self._outstanding -= 1
