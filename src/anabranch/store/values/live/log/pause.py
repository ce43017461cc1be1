"""Whether writes are tried, and why not."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)


class Pause:
    """After a failed write: nothing is tried for `retry_s`, then once."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._until = 0.0
        self.reason = ""

    @property
    def active(self) -> bool:
        return bool(self.reason) and time.monotonic() < self._until

    def begin(self, reason: str) -> None:
        if not self.reason:
            log.warning("writes to the SSD tier pause: %s", reason)
        self.reason = reason
        self._until = time.monotonic() + self._retry_s

    def end(self) -> None:
        if self.reason:
            log.info("writes to the SSD tier go on")
            self.reason = ""
