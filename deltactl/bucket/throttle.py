"""A limit on the bytes a second of all transfers of a bucket together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Throttle:
    """Hands out bytes at a steady rate, to any number of threads."""

    def __init__(
        self,
        rate: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, count: int) -> None:
        """Wait until ``count`` more bytes may be sent or received."""
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at)
            self._free_at = start + count / self._rate
        if start > now:
            self._sleep(start - now)
