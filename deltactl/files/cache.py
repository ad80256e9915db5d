"""What is kept on this machine so that it need not be fetched or made again.

The tip of a chain, materialized, so that the next push can diff against it; and what the processes
of a server share. Nothing here is trusted: whoever uses a tip compares its digest with the chain's,
and rebuilds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from deltactl.core.digest import digest_of
from deltactl.core.errors import NotAllowed
from deltactl.files.temporary import lock_now, remove


def cache_root() -> Path:
    """``$DELTACTL_CACHE``, else ``deltactl`` below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("DELTACTL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltactl"


def place_of(kind: str, key: str) -> Path:
    """The directory below the cache's root that belongs to a URL or path, among its kind."""
    return cache_root() / kind / digest_of(os.fsencode(key))[:32]


@contextlib.contextmanager
def held_place(kind: str, key: str) -> Iterator[Path]:
    """``place_of``, made if need be, and held by a lock while the block runs.

    The lock is waited for, and is the kernel's: it goes with the process that holds it. The file
    ``url`` says what the place belongs to. Raises NotAllowed where the cache cannot be written.
    """
    directory = place_of(kind, key)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "url").write_bytes(os.fsencode(key) + b"\n")
        lock = open(directory / "lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        what = f"the cache of {kind} cannot be written: {error.strerror or error}".lower()
        hint = "set DELTACTL_CACHE to a directory of yours"
        raise NotAllowed(what, file=directory, hint=hint) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory


def forget_others(place: Path, names: Sequence[str], keep: int) -> None:
    """Remove what has these names, in that order, from the places beside a held one.

    All but the ``keep`` that were held last and those that somebody holds.
    """
    times = {}
    for url in place.parent.glob("*/url"):
        with contextlib.suppress(OSError):
            times[url.parent] = url.stat().st_mtime_ns
    times.pop(place, None)
    for other in sorted(times, key=lambda path: -times[path])[keep:]:
        with contextlib.suppress(OSError), open(other / "lock", "w") as lock:
            if lock_now(lock.fileno(), other / "lock"):
                for name in names:
                    remove(other / name)


@contextlib.contextmanager
def tip_cache(url: str) -> Iterator[Path]:
    """The place of the cached tip of the chain at ``url``, held by a lock while the block runs.

    The directory at that place may be missing, stale or wrong.
    """
    with held_place("tips", url) as directory:
        yield directory / "tip"
