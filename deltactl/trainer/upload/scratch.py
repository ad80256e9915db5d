"""Where a publisher keeps what it needs on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from deltactl.core.digest import digest_of
from deltactl.core.errors import Conflict, NotAllowed
from deltactl.files.cache import cache_root

_held: set[IO[str]] = set()
"""The locks that this process has."""


def _forked() -> None:
    """In a forked child, such as a DataLoader's worker: a lock is its parent's, who may let go of
    it, or die, long before the child ends."""
    for lock in _held:
        lock.close()
    _held.clear()


os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def scratch_directory(
    given: str | os.PathLike[str] | None, url: str, below: str = ""
) -> Iterator[Path]:
    """The publisher's directory, or one of its own ``below`` that, held by a lock.

    Raises NotAllowed, Conflict.
    """
    name = digest_of(os.fsencode(url))[:32]
    place = cache_root() / "trainers" / name if given is None else Path(given)
    place /= below
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = open(place / "lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        what = f"the publisher's directory cannot be written: {error.strerror or error}".lower()
        hint = "name one of yours: scratch=, or set DELTACTL_CACHE"
        raise NotAllowed(what, file=place, hint=hint) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = "another publisher of this machine has the directory"
            raise Conflict(
                what, file=place, hint="one publisher a chain: close the other"
            ) from None
        _held.add(lock)
        try:
            yield place
        finally:
            if lock in _held:  # else this is a forked child, and the lock is not its own
                _held.remove(lock)
                fcntl.flock(lock, fcntl.LOCK_UN)  # also where a child has a descriptor of it


def emptied(place: Path) -> Path:
    """The directory, empty: what an earlier run had not got confirmed is found anew."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    return place
