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
    directory = cache_root() / "tips" / hasher().update(url.encode()).hexdigest()[:32]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "url").write_text(url + "\n")
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory / "tip"
