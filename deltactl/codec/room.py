"""How many changes may lie decoded at once, over all threads.

A change takes some ten bytes decoded, and in the file perhaps none: a few kilobytes can say that
every element of a block changes. So each core may not hold a block of such; who decodes waits until
there is room. Blocks as training makes them, of a change in a hundred elements, never wait.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deltactl.codec.base import BLOCK

_freed = threading.Condition()
_taken = 0


@contextmanager
def room_for(changes: int) -> Iterator[None]:
    """Wait until so many changes may be decoded beside those of others, or alone if they are more
    than may be at all. Not to be entered again by a thread that is in it."""
    global _taken
    with _freed:
        _freed.wait_for(lambda: not _taken or _taken + changes <= BLOCK)
        _taken += changes
    try:
        yield
    finally:
        with _freed:
            _taken -= changes
            _freed.notify_all()
