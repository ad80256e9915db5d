"""A thread that does jobs in order, each again until it succeeds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from deltactl.core.errors import Conflict, Transient

Job = Callable[[], None]

FIRST_WAIT = 1.0
"""Seconds before a job is tried a second time; doubled from try to try."""

LONGEST_WAIT = 60.0

LONGEST_OUTAGE_WAIT = 5.0
"""The same while the bucket is away, which may be back at any time: by itself."""


class Worker:
    """Does jobs on a daemon thread.

    A job that raises is tried again, after a wait, for as long as it takes: no later job overtakes
    it. Conflict ends all, since to try again would not help; and once the worker is being closed
    there is one more try. ``failed`` is called with each error, on the thread, and whether it was
    the last.
    """

    def __init__(self, name: str, limit: int, failed: Callable[[Exception, bool], None]) -> None:
        self._limit, self._failed = limit, failed
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = self._over = self._hopeless = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether nothing is done any more."""
        return self._over

    @property
    def has_room(self) -> bool:
        """Whether fewer jobs are waiting or under way than the limit."""
        with self._changed:
            return len(self._jobs) < self._limit

    @property
    def hopeless(self) -> bool:
        """Whether to wait for room does not help: all is over, or the last error was one that only
        somebody's hand puts right."""
        return self._over or self._hopeless

    def wait_for_room(self, until: float) -> bool:
        """Wait until there is room, and whether there is: at once where that does not help, and no
        longer than until the clock is at ``until``."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._jobs) < self._limit or self.hopeless,
                max(0.0, until - time.monotonic()),
            )
            return len(self._jobs) < self._limit and not self._over

    def put(self, job: Job) -> None:
        """Add a job, also above the limit."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def close(self, until: float | None = None) -> None:
        """Do what is waiting, and end the thread; give up at the first error, and leave the thread
        to itself where the clock is at ``until``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(None if until is None else max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while self._wait_for_job():
            self._until_done(self._jobs[0])
            with self._changed:
                if self._over:
                    self._jobs.clear()
                else:
                    self._jobs.popleft()
                self._changed.notify_all()

    def _wait_for_job(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs) or self._closing or self._over)
            return bool(self._jobs) and not self._over

    def _until_done(self, job: Job) -> None:
        wait = FIRST_WAIT
        while True:
            last_try = self._closing
            try:
                job()
            except Exception as error:
                last = last_try or isinstance(error, Conflict)
                self._failed(error, last)
                with self._changed:
                    self._over = last
                    self._hopeless = not isinstance(error, Transient)
                    self._changed.notify_all()
                    if last:
                        return
                    self._changed.wait_for(lambda: self._closing, wait)
                    longest = LONGEST_WAIT if self._hopeless else LONGEST_OUTAGE_WAIT
                wait = min(2 * wait, longest)
            else:
                self._hopeless = False
                return
