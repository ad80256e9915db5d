"""The processors that work in a vLLM worker may use.

vLLM binds the threads that compute on a CPU to processors of their own, the main thread among them,
and a thread starts where the one that starts it is bound. What is done in a pause, while none of
them computes, would then share one processor.
"""

from __future__ import annotations

import os
from contextlib import suppress


def usable() -> frozenset[int]:
    """The processors that any thread of this process, or the process that started it, may use.

    Empty where the platform does not tell.
    """
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    found = set(os.sched_getaffinity(0))
    threads = [int(name) for name in _entries("/proc/self/task")]
    parent = os.getppid()
    for thread in threads + [parent] * (parent > 1):  # 1 takes in orphans, and is bound to nothing
        with suppress(OSError):  # it has ended
            found |= os.sched_getaffinity(thread)
    return frozenset(found)


def spread() -> None:
    """Let the calling thread, and those that it starts, run on every usable processor."""
    if found := usable():
        with suppress(OSError):  # it may not; then it stays where it is
            os.sched_setaffinity(0, found)


def _entries(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
