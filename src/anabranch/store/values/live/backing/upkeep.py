"""Keeps a node's view of the backing store fresh, and the store tidy, in the background."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from anabranch.core.errors import Unavailable

log = logging.getLogger(__name__)
COMPACT_EVERY = 60
"""Refreshes between two compactions."""


class Upkeep:
    """Calls `refresh` every `every_s` seconds and `compact` now and then, until `close`. Intervals vary, so that nodes
    that started together do not tidy at the same moment."""

    def __init__(self, refresh: Callable[[], None], compact: Callable[[], int], every_s: float) -> None:
        self._refresh = refresh
        self._compact = compact
        self._every_s = every_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backing-upkeep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """A request under way may take longer than this waits; it then ends by itself."""
        self._closing.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        rounds, reachable = 0, True
        while not self._closing.wait(self._every_s * random.uniform(0.5, 1.5)):
            rounds += 1
            try:
                if rounds % COMPACT_EVERY:
                    self._refresh()
                else:
                    self._compact()
                reachable = True
            except Unavailable as error:
                if reachable and not self._closing.is_set():
                    log.warning("%s", error)
                reachable = False
