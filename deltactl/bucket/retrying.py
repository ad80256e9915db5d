"""A bucket that tries again what may go well the next time."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from deltactl.chain.store import Bucket, Object, holds_bytes
from deltactl.core.errors import Transient
from deltactl.files.temporary import Outcome, Unfinished

log = logging.getLogger("deltactl.bucket")
"""A line at WARNING where a bucket is waited for, at INFO for a try that failed, at DEBUG for each
request."""

R = TypeVar("R")

_TRIES = 9
_PATIENCE = 60.0  # seconds, waits and tries together
_FIRST_WAIT = 1.0  # seconds at most; doubled from try to try
_LONGEST_WAIT = 20.0
_WORD_AFTER = 5.0  # seconds: a shorter wait is not worth a word

_EAGER_TRIES, _EAGER_WAIT = 40, 5.0  # it is patience that ends these


class RetryingBucket:
    """Implements chain.store.Bucket over another, and tries again what raises Transient.

    It waits a random part of a time that doubles, up to ``longest_wait`` seconds (full jitter, so
    that many who failed together do not come back together), and no less than the server asked for.
    It gives up after ``tries``, or where the next try would begin more than ``patience`` seconds
    after the first; then the error says how often it tried. Before that a line is logged: what is
    waited for, and for how long at most.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        tries: int = _TRIES,
        patience: float = _PATIENCE,
        longest_wait: float = _LONGEST_WAIT,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._bucket, self._tries, self._patience = bucket, tries, patience
        self._longest_wait = longest_wait
        self._clock, self._sleep, self._draw = clock, sleep, draw
        self._said = -math.inf  # when a line was logged last

    @property
    def url(self) -> str:
        return self._bucket.url

    @property
    def atomic_create(self) -> bool:
        return self._bucket.atomic_create

    @property
    def jobs(self) -> int:
        return self._bucket.jobs

    @property
    def part_bytes(self) -> int | None:
        return self._bucket.part_bytes

    def path(self, name: str) -> Path | None:
        return self._bucket.path(name)

    def list(self) -> Iterable[Object]:
        return self._again("list", lambda: [*self._bucket.list()])  # as a whole: a page may fail

    def read(self, name: str, start: int, stop: int) -> bytes | memoryview:
        return self._again(
            f"read {name} {start}-{stop}", lambda: self._bucket.read(name, start, stop)
        )

    def fetch(self, name: str, target: Path) -> None:
        self._again(f"fetch {name}", lambda: self._bucket.fetch(name, target))

    def delete(self, name: str) -> None:
        self._again(f"delete {name}", lambda: self._bucket.delete(name))

    def unfinished(self) -> Iterable[Unfinished]:
        return self._again("list uploads", lambda: [*self._bucket.unfinished()])

    def discard(self, item: Unfinished, before: float) -> Outcome:
        return self._again(f"discard {item.name}", lambda: self._bucket.discard(item, before))

    def put(self, name: str, source: Path) -> bool:
        """Create an object from a file; False, and nothing done, if the name is taken.

        A try that failed may have created the object all the same: the answer was lost. If the name
        is found taken after such a try, what is there is read and compared with the file, and the
        same bytes give True. They are ours, or somebody else put the very same; who of the two
        created them cannot be told, and nobody loses by it.
        """
        failed = False

        def once() -> bool:
            nonlocal failed
            try:
                return self._bucket.put(name, source)
            except Transient:
                failed = True
                raise

        return self._again(f"put {name}", once) or (failed and holds_bytes(self, name, source))

    def _again(self, what: str, work: Callable[[], R]) -> R:
        began = self._clock()
        deadline = began + self._patience
        for tried in range(1, self._tries + 1):
            try:
                found = work()
                log.debug("%s: %s, %.0f ms", self.url, what, 1000 * (self._clock() - began))
                return found
            except Transient as error:
                wait = self._wait(tried, error.retry_after)
                failed = "%s: %s failed, try %d of at most %d: %s"
                log.info(failed, self.url, what, tried, self._tries, error)
                if tried == self._tries or self._clock() + wait > deadline:
                    raise _given_up(error, tried) from error.__cause__
                self._tell(error, began, wait)
                self._sleep(wait)
        raise AssertionError("at least one try")

    def _tell(self, error: Transient, began: float, wait: float) -> None:
        """One line for a wait, though many calls may wait at once."""
        now = self._clock()
        if now + wait - began < _WORD_AFTER or now < self._said + self._patience:
            return
        self._said = now
        left = began + self._patience - now
        log.warning("waiting for the bucket, for up to %.0f s more: %s", left, error)

    def _wait(self, tried: int, asked: float | None) -> float:
        longest = min(self._longest_wait, _FIRST_WAIT * 2.0 ** (tried - 1))
        return max(self._draw() * longest, asked or 0.0)


def eager(bucket: Bucket) -> RetryingBucket:
    """One that is soon there when the bucket is back, for a run's only publisher: of many clients
    all would be a burden."""
    return RetryingBucket(bucket, tries=_EAGER_TRIES, longest_wait=_EAGER_WAIT)


def _given_up(error: Transient, tried: int) -> Transient:
    """The error, with how often it was met."""
    times = "once" if tried == 1 else f"{tried} times"
    error.what = f"{error.what} (tried {times})"
    if error.retry_after is not None and error.hint is None:
        error.hint = f"the server asks for {error.retry_after:.0f} seconds of quiet"
    return error
