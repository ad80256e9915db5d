"""Many servers side by side: none waits for another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

from deltactl.core.errors import DeltactlError, UsageError
from deltactl.core.progress import Progress
from deltactl.core.threads import start
from deltactl.server.http.wire import server_url

T = TypeVar("T")


class HasError(Protocol):
    """A report on one server; ``error``: what went wrong, if anything."""

    error: DeltactlError | None


def urls_of(words: Sequence[str]) -> list[str]:
    """The servers' addresses. Raises UsageError for none, for what is no address, and for one that
    is named twice."""
    urls = [server_url(word) for word in words]
    if not urls:
        raise UsageError("no server is named", expected="--server URL")
    for url in urls:
        if urls.count(url) > 1:
            raise UsageError("a server is named twice", file=url)
    return urls


def side_by_side(
    work: Callable[[str], T],
    urls: Sequence[str],
    stop: threading.Event,
    on_interrupt: Callable[[], None],
) -> tuple[list[T], bool]:
    """``work`` for each server in a thread of its own, and whether the user has interrupted it.

    ``work`` raises nothing, and ends soon once ``stop`` is set, which an interrupt does. A second
    interrupt is raised at once; the threads are left to themselves.
    """
    found = [start(partial(work, url), "deltactl-server") for url in urls]
    interrupted = False
    try:
        wait(found)
    except KeyboardInterrupt:
        interrupted = True
        stop.set()
        on_interrupt()
        wait(found)
    return [report.result() for report in found], interrupted


class Met:
    """The servers that work was begun with: each once, by however many names it is reached."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._urls: dict[str, str] = {}

    def meet(self, server: str | None, url: str) -> None:
        """Raise UsageError for one that was met under another address."""
        if server is None:
            return
        with self._lock:
            known = self._urls.setdefault(server, url)
        if known != url:
            hint = f"leave out --server {url}"
            raise UsageError("this is the same server", file=url, found=f"{known} too", hint=hint)


class Together:
    """One progress of all servers: bytes done and to do, added up."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress, self._what = progress, what
        self._lock = threading.Lock()
        self._known: dict[str, tuple[int, int]] = {}

    def of(self, url: str) -> Callable[[int, int], None]:
        """What one server's part is told to."""

        def tell(done: int, total: int) -> None:
            with self._lock:
                self._known[url] = (min(done, total), total)
                sums = [sum(column) for column in zip(*self._known.values(), strict=True)]
                self._progress(self._what, *sums)

        return tell


@contextmanager
def noting(report: HasError) -> Iterator[None]:
    """Whatever the block raises is the report's error, and goes no further."""
    try:
        yield
    except Exception as error:
        report.error = as_error(error)


def as_error(error: Exception) -> DeltactlError:
    """What came of one server's work, as an error of ours; a fault in the program stays one."""
    if isinstance(error, DeltactlError):
        return error
    return DeltactlError(f"internal error: {type(error).__name__}: {error}", hint="report this")
