"""How the library tells its caller how far it is, without printing."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)``, both in bytes, from any thread, never twice at once.
"""


def silent(what: str, done: int, total: int) -> None:
    """A Progress that says nothing."""


class Meter:
    """Adds up bytes from many threads and passes them on to a Progress, one call at a time."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._progress, self._what, self._total = progress, what, total
        self._done = 0
        self._lock = threading.Lock()
        progress(what, 0, total)

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._progress(self._what, self._done, self._total)
