"""Files mapped into memory, and whether they still are what was mapped.

A mapped file can be cut short while it is read: by a copy onto it, by a trainer that saves to the
same name. To touch what is gone would end the process (SIGBUS); where guard.c was compiled zeros
stand for it instead, and ``check_mapped`` tells, which is asked before anything becomes of what was
read: at the end of work on all cores, when a checkpoint is let go of, and before a file or a
directory takes its name. Work and files are not told apart, so it looks at every file that the
process has mapped through here. Of one that somebody holds (``hold``) it tells until that is let
go of. Others may only have been forgotten, by an error that somebody keeps: of those it tells where
what is gone was really touched, and once a thread, as who tries again shall not fail by that. Who
reads one names it (``sound_sources``), to be told in any case.

Without guard.c only files that are shorter than they were are told, to whoever has not touched what
is gone; who touches it dies, with the lines that a command prints then (cli.app).
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deltactl.core.errors import Malformed
from deltactl.core.native.guard import GUARD
from deltactl.files.untrusted import open_regular

Bytes = npt.NDArray[np.uint8]

_HINT = "repeat it once nobody writes to the file any more"


class Watched:
    """``size`` bytes of memory that a file is mapped to, until they are released.

    ``length``: the file's own; ``now``: gives what that is later, None where it cannot be said.
    """

    def __init__(
        self, path: Path, address: int, size: int, length: int, now: Callable[[], int | None]
    ) -> None:
        self.path, self._length, self._now = path, length, now
        self._number = -1 if GUARD is None else GUARD.watch(address, size)
        self.span = range(address, address + size)
        self.held = False
        self.released = False  # nobody reads it any more
        self._told: set[int] = set()  # threads
        with _lock:
            _live.add(self)

    def fault(self) -> Malformed | None:
        """What became of the file, if it cannot be read as it was mapped."""
        if self.released:
            return None
        found = self._now()
        if found is not None and found < self._length:
            return Malformed(
                "the file was truncated while it was read",
                file=self.path,
                expected=f"{self._length} bytes",
                found=f"{found} bytes",
                hint=_HINT,
            )
        if not self._hit():
            return None
        what = "the file could not be read: it was truncated and written anew, or its disk failed"
        return Malformed(what, file=self.path, hint=_HINT)

    def tell(self) -> Malformed | None:
        """The same, for whoever asks about all files."""
        told = threading.get_ident() in self._told
        return None if not self.held and (told or not self._hit()) else self.tell_reader()

    def tell_reader(self) -> Malformed | None:
        """The same, for who reads it."""
        if (fault := self.fault()) is not None:
            self._told.add(threading.get_ident())
        return fault

    def _hit(self) -> bool:
        return GUARD is not None and self._number >= 0 and GUARD.hit(self._number)

    def let_go(self) -> None:
        """Nobody reads the memory any more, though it may stay mapped for a while."""
        self.released = True

    def release(self) -> None:
        """The memory is about to be given back. Takes no lock: finalizers call it."""
        self.released = True
        number, self._number = self._number, -1
        if GUARD is not None and number >= 0:
            GUARD.release(number)


_live: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()


class _Mapping(mmap.mmap):
    """A mapping that is watched over until just before it is undone."""

    watched: Watched | None = None

    def __del__(self) -> None:
        if self.watched is not None:
            self.watched.release()


def map_bytes(path: Path) -> Bytes:
    """The whole file as a read-only mapped array of bytes; an empty file gives an empty array.

    The mapping lives as long as a view of it does. Raises NotFound, NotAllowed, Malformed.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            return np.empty(0, np.uint8)
        mapping = _Mapping(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(mapping, np.uint8)
    alive = weakref.ref(mapping)

    def size() -> int | None:
        found = alive()
        return None if found is None else found.size()

    mapping.watched = Watched(path, data.ctypes.data, data.size, data.size, size)
    return data


def watch_memory(path: Path, address: int, size: int) -> Watched:
    """The same for ``size`` bytes of memory that somebody else has mapped ``path`` to.

    To be released before they are given back. Raises OSError.
    """
    status = path.stat()

    def now() -> int | None:
        try:
            found = path.stat()
        except OSError:
            return None
        same = (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino)
        return found.st_size if same else None

    return Watched(path, address, size, status.st_size, now)


def release_after(watched: Watched, owners: Sequence[object]) -> None:
    """Release ``watched`` when the last of ``owners`` is gone."""
    left = [None] * len(owners)

    def gone() -> None:
        left.pop()
        if not left:
            watched.release()

    for owner in owners:
        weakref.finalize(owner, gone).atexit = False
    if not owners:
        watched.release()


def _of(data: Bytes) -> Watched | None:
    """The one that ``data`` lies in now: others may have been at the same address before."""
    at = data.ctypes.data
    return next((one for one in _watched() if not one.released and at in one.span), None)


def hold(data: Bytes) -> None:
    """Say what there is to say of the file that ``data`` is mapped from until it is let go of."""
    if (one := _of(data)) is not None:
        one.held = True


def let_go(data: Bytes) -> None:
    """Say no more of the file that ``data``, which is not empty, is mapped from."""
    if (one := _of(data)) is not None:
        one.let_go()


def _watched() -> list[Watched]:
    with _lock:
        return list(_live)


def mapped_fault(data: Bytes | None = None) -> Malformed | None:
    """What is wrong with a file that is mapped: of all, or the one that ``data`` is mapped from."""
    asked = _watched() if data is None else [_of(data)]
    faults = (one.fault() for one in asked if one is not None)
    return next((fault for fault in faults if fault is not None), None)


def check_mapped(*sources: Bytes) -> None:
    """Raise Malformed where a file that is mapped is not any more what it was.

    ``sources``: bytes of the files that were read. Of others it is told as is said above.
    """
    read = [one for one in map(_of, sources) if one is not None]
    told = chain((one.tell_reader() for one in read), (one.tell() for one in _watched()))
    for fault in told:
        if fault is not None:
            raise fault


@contextmanager
def sound_sources(*sources: Bytes) -> Iterator[None]:
    """The same once the block has ended, and in place of any error that it ends with: what is said
    of a torn file comes of that, a digest that differs or a write from where nothing is any more.
    """
    try:
        yield
    except Exception:
        check_mapped(*sources)
        raise
    check_mapped(*sources)
