"""The signal handler of guard.c, where this installation has it.

``GUARD`` is None where it was installed without a C compiler: then a mapped file that shrinks ends
the process that touches what is gone. files.mapped is its only caller.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

LIBRARY = "guard.shared"
"""The file beside this one that .ci/build_hook.py compiles from guard.c; not a name to import."""

_VERSION = 1  # as deltactl_guard_version in guard.c


class Guard:
    """guard.c, for many threads.

    The handler is installed with the first range and not before, so that a process that maps
    nothing through us is left alone; and once, whoever else takes the signal later comes before us.
    A library in a trainer or a server is in the same danger as a command, and a fault that is not
    in our ranges goes on to who handled the signal before: so it is installed for all.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        if self._library.deltactl_guard_version() != _VERSION:
            raise OSError(f"{path} is of another version")
        self._library.deltactl_guard_watch.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        self._lock = threading.Lock()
        self._installed: bool | None = None

    def watch(self, address: int, size: int) -> int:
        """The number of a new range, -1 where it cannot be watched over."""
        with self._lock:
            if self._installed is None:
                self._installed = self._library.deltactl_guard_install() == 0
            if not self._installed:
                return -1
            found: int = self._library.deltactl_guard_watch(address, size)
            return found

    def hit(self, number: int) -> bool:
        """Whether a part of the range could not be read, and zeros stand for it."""
        return bool(self._library.deltactl_guard_hit(number))

    def release(self, number: int) -> None:
        """Take no more notice of the range. Takes no lock: it may be called by a finalizer."""
        self._library.deltactl_guard_release(number)


def _load() -> Guard | None:
    path = Path(__file__).with_name(LIBRARY)
    if not path.exists():
        return None
    try:
        return Guard(path)
    except (OSError, AttributeError):  # of another processor, or another version
        return None


GUARD = _load()
