"""How an object is created from a large file, where one request for all of it would not do."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol

from deltactl.bucket.throttle import Throttle
from deltactl.core.errors import Malformed
from deltactl.files.temporary import Outcome, Unfinished

TOKEN = "deltactlput"
"""The metadata field that holds the token of the ``put`` that created an object."""


class Source:
    """A file that is read in pieces, by several threads at once, and limited in speed."""

    def __init__(self, descriptor: int, throttle: Throttle | None) -> None:
        self._descriptor, self._throttle = descriptor, throttle
        self.size = os.fstat(descriptor).st_size

    def piece(self, start: int, stop: int) -> bytes:
        """The bytes from ``start`` to ``stop``, to be sent at once. Raises Malformed where the file
        is shorter by now."""
        if self._throttle is not None:
            self._throttle.take(stop - start)
        data = os.pread(self._descriptor, stop - start, start)
        if len(data) != stop - start:
            raise Malformed("the file became shorter while it was sent")
        return data


class Creation(Protocol):
    """Creates an object if its name is free, with ``token`` in its metadata; in one step, seen from
    outside."""

    def create(self, name: str, source: Source, token: str) -> bool:
        """False, and nothing left, where the name is taken. Raises core.errors."""
        ...

    def unfinished(self) -> Iterable[Unfinished]:
        """What came to no end, or is under way. Raises core.errors."""
        ...

    def discard(self, item: Unfinished, before: float) -> Outcome:
        """As ``chain.store.Bucket.discard``."""
        ...
