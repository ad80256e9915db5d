"""The tip of a chain, kept materialized on this machine so that the next push can diff against it.

Nothing here is trusted: whoever uses a tip compares its digest with the chain's, and rebuilds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from deltactl.core.digest import hasher
from deltactl.core.errors import NotAllowed


def cache_root() -> Path:
    """``$DELTACTL_CACHE``, else ``deltactl`` below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("DELTACTL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltactl"


@contextlib.contextmanager
def tip_cache(url: str) -> Iterator[Path]:
    """The place of the cached tip of the chain at ``url``, held by a lock while the block runs.

    The directory at that place may be missing, stale or wrong.
    """
    directory = cache_root() / "tips" / hasher().update(os.fsencode(url)).hexdigest()[:32]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "url").write_bytes(os.fsencode(url) + b"\n")
        lock = open(directory / "lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        what = f"the cache of tips cannot be written: {error.strerror or error}".lower()
        hint = "set DELTACTL_CACHE to a directory of yours"
        raise NotAllowed(what, file=directory, hint=hint) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory / "tip"
