"""Work in threads; which way depends on what it waits for.

- The processor, over tensors: ``files.parallel.map_largest_first``, on all cores.
- Others, as requests do that may hang: ``map_requests``, ``TaskQueue`` where a task brings others,
  ``start`` for one. Threads of a ThreadPoolExecutor are waited for when the interpreter ends, and
  so is a request that no server answers. These are not: who is interrupted leaves at once.
- Others, and it writes where nobody may write afterwards: ``map_settled``.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from functools import partial
from threading import Condition, Thread
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
Task = Callable[[], None]

_GRACE = 1.0  # seconds that work under way is given to end when the whole has failed


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start(work: Callable[[], R], name: str) -> Future[R]:
    """Begin ``work`` in a thread of this name that nobody waits for; what becomes of it is told."""
    told: Future[R] = Future()

    def run() -> None:
        try:
            told.set_result(work())
        except BaseException as error:
            told.set_exception(error)

    Thread(target=run, daemon=True, name=name).start()
    return told


class TaskQueue:
    """Threads that take tasks in order. A task may add others, which come before what waits."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._ready: deque[Task] = deque()
        self._changed = Condition()
        self._running = 0
        self._error: BaseException | None = None
        self._stopped = False

    def add(self, tasks: Iterable[Task]) -> None:
        with self._changed:
            self._ready.extendleft(reversed([*tasks]))
            self._changed.notify_all()

    def run(self) -> None:
        """Do all tasks, and those that they add.

        Raises the first error, or what interrupts the caller; then nothing new is begun, and what
        is under way after a moment is left to itself: it has to bear that its files are gone.
        """
        for _ in range(self._threads):
            Thread(target=self._work, daemon=True).start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None or self._done)
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._running, _GRACE)
        if self._error is not None:
            raise self._error

    @property
    def _done(self) -> bool:
        return not self._ready and not self._running

    def _next(self) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._stopped or not self._running)
            if self._stopped or not self._ready:
                return None
            self._running += 1
            return self._ready.popleft()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            error: BaseException | None = None
            try:
                task()
            except BaseException as raised:
                error = raised
            with self._changed:
                self._running -= 1
                if error is not None and not self._stopped:
                    self._error, self._stopped = error, True
                self._changed.notify_all()


def map_requests(work: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """``[work(item) for item in items]``, so many at once. Raises the first error."""
    found: dict[int, R] = {}

    def one(number: int) -> None:
        found[number] = work(items[number])

    queue = TaskQueue(min(threads, len(items)))
    queue.add(partial(one, number) for number in range(len(items)))
    queue.run()
    return [found[number] for number in range(len(items))]


def map_settled(pool: Executor, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """``[work(item) for item in items]``, by the threads of a pool that others use as well.

    Raises the first error. Then nothing new is begun, and what was begun has ended: what it works
    on, such as an open file, may be closed.
    """
    futures = [pool.submit(work, item) for item in items]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
