"""Threads that do the same work as the caller, beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from anabranch.transfer.live.workers import Workers


class Party:
    """Within: up to `size` other threads run `work`, as far as there are any free. Leaving waits for those that began;
    an error of theirs is raised there, unless the caller has one of its own."""

    def __init__(self, workers: Workers, size: int, work: Callable[[], None]) -> None:
        self._workers, self._size, self._work = workers, size, work
        self._condition = threading.Condition()
        self._active = 0
        self._over = False
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        for _ in range(self._size):
            self._workers.submit(self._run)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._condition:
            self._over = True
            while self._active:
                self._condition.wait()
        del self._work
        if error is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        with self._condition:
            if self._over:
                return
            self._active += 1
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  # raised where the party ends
            self._error = error
        finally:
            with self._condition:
                self._active -= 1
                self._condition.notify_all()
