"""What the chain asks of a bucket. The implementations are in ``deltactl.bucket``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from deltactl.core.errors import NotFound, UsageError
from deltactl.files.temporary import Outcome, Unfinished

_SECRET = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/@]*:.*@", re.DOTALL)
_PORT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/@:]*:\d*/[^@]*@\d+")


def refuse_secret(word: str) -> None:
    """Raise UsageError, which does not repeat it, for a URL that has a password in it.

    Whoever lists this machine's processes, and every log, would see it. A port, and a step after
    the last ``@``, are none.
    """
    if _SECRET.search(word) and not _PORT.fullmatch(word):
        raise UsageError(
            "an address with a password in it is not taken",
            expected="scheme://bucket, without credentials",
            hint="give credentials in the environment or in the store's own configuration",
        )


@dataclass(frozen=True, slots=True)
class Object:
    """An object of a bucket: its name relative to the prefix, with "/" between parts; size in
    bytes. ``modified``: when it was written, in seconds since 1970 by the store's clock; None where
    that is not known."""

    name: str
    size: int
    modified: float | None = field(default=None, compare=False)


class Bucket(Protocol):
    """A prefix that holds one chain. All methods may be called from many threads at once.

    Guarantees every implementation gives: an object is visible whole or not at all; what ``put``
    returned True for is durable and is listed and read by everybody from then on; no object is
    overwritten on purpose (see ``atomic_create``). Errors are those of core.errors: NotFound (no
    such bucket or object), NotAllowed (credentials, permission), Transient (worth another try),
    Malformed (the store said something that cannot be); a full disk is an OSError. No secret is
    ever part of an error or of ``url``.
    """

    @property
    def url(self) -> str:
        """The one spelling of the bucket's address, without secrets."""
        ...

    @property
    def atomic_create(self) -> bool:
        """Whether of two that put one name at once exactly one gets True.

        Where not, ``put`` looks, writes and looks again: two at once may both be told True, and
        one of them is overwritten. Such a store is safe with a single publisher alone.
        """
        ...

    @property
    def jobs(self) -> int:
        """How many requests to make at once."""
        ...

    @property
    def part_bytes(self) -> int | None:
        """The size of the ranges in which a large object is best ``read``, several at once; None
        where ``fetch`` alone is the way (the store's client splits for itself)."""
        ...

    def list(self) -> Iterable[Object]:
        """All objects, in no order. Raises NotFound where there is no such bucket."""
        ...

    def read(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """The bytes from ``start`` up to ``stop``, fewer where the object ends before; as a view
        where the store's client holds them, which spares a copy of every byte."""
        ...

    def fetch(self, name: str, target: Path) -> None:
        """Copy an object to a file that does not exist yet; none is left where that fails. The
        caller checks its digest."""
        ...

    def path(self, name: str) -> Path | None:
        """Where the object's bytes can be mapped on this machine; None where they cannot."""
        ...

    def put(self, name: str, source: Path) -> bool:
        """Create an object from a file; False, and nothing done, if the name is taken."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; no error where there is none."""
        ...

    def unfinished(self) -> Iterable[Unfinished]:
        """What writers have in hand or left behind, in no order. Raises Unsupported where the store
        cannot tell."""
        ...

    def discard(self, item: Unfinished, before: float) -> Outcome:
        """Remove one, unless somebody holds it or touched it at ``before`` or later, which is
        looked up anew."""
        ...


_PIECE = 1 << 22


def holds_bytes(bucket: Bucket, name: str, source: Path) -> bool:
    """Whether an object has exactly the bytes of a file; False where there is no such object."""
    with open(source, "rb") as file:
        at = 0
        while True:
            piece = file.read(_PIECE)
            try:
                found = bucket.read(name, at, at + max(len(piece), 1))
            except NotFound:
                return False
            if bytes(found) != piece:
                return False
            if not piece:
                return True
            at += len(piece)
