"""What a publisher that nobody closes leaves is brought to an end: in the background where the
publisher is gone, and within a limited time where the process ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from deltactl.trainer.report import log

PATIENCE = 60.0
"""Seconds that what ends without being closed in order, a process or a training that raised, waits
for what was captured to be in the bucket."""


class Putting(Protocol):
    """What puts links; see Account."""

    def close(self, until: float | None = None) -> None:
        """Put what is waiting, or give up at the first error; not longer than until the clock is at
        ``until``."""
        ...

    def tell_missing(self) -> None:
        """Log how many steps are not in the bucket, if any."""
        ...


class Ending:
    """What is left to do when no more is captured: to encode what is being encoded, to put what
    waits, and to let go of the scratch directory and all else that is in ``stack``.

    It knows nothing of the publisher, which may be gone.
    """

    def __init__(
        self, line: Putting, encoder: ThreadPoolExecutor, stack: contextlib.ExitStack
    ) -> None:
        self._line, self._encoder, self._stack = line, encoder, stack
        self._owner = os.getpid()
        self._thread: threading.Thread | None = None
        self._had_its_time = False
        _open.add(self)

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a child, forked from the one whose it is."""
        return self._owner != os.getpid()

    def finish(self) -> None:
        """Do it all, as long as it takes."""
        try:
            with self._stack:
                self._put(None)
        finally:
            _open.discard(self)
            self._line.tell_missing()

    def finish_later(self) -> None:
        """The same on a thread: whoever collects garbage is not to wait for a bucket."""
        if self not in _open or self.is_foreign:
            return
        log.warning("a publisher was never closed: what it has captured is put now")
        self._start()

    def finish_soon(self) -> None:
        """The same, for up to a minute; what takes longer goes on beside whatever comes next."""
        thread = self._start()
        thread.join(PATIENCE)
        if thread.is_alive():
            self._had_its_time = True
            self._line.tell_missing()

    def _start(self) -> threading.Thread:
        self._thread = threading.Thread(target=self.finish, name="deltactl-ending", daemon=True)
        self._thread.start()
        return self._thread

    def _put(self, until: float | None) -> None:
        self._encoder.shutdown()
        self._line.close(until)

    def at_exit(self, until: float) -> None:
        """Put what waits until the clock is at ``until``; the system lets go of the rest."""
        if self.is_foreign or self._had_its_time:
            return
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        else:
            log.warning(
                "the process ends, and a publisher was never closed: what it has captured is put "
                "now, for up to %.0f s", max(0.0, until - time.monotonic()),
            )  # fmt: skip
            self._put(until)
        if self in _open:
            _open.discard(self)
            self._line.tell_missing()


_open: set[Ending] = set()
"""Of publishers that are not closed."""


def _at_exit() -> None:
    until = time.monotonic() + PATIENCE
    for ending in list(_open):
        ending.at_exit(until)


# What is registered last is called first: this before pools of threads, whose module is imported
# above, are told to take no more work. What atexit calls comes later; it is for an interpreter that
# has no such place, and puts as much as can be put then.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
