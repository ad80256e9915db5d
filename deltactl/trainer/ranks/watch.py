"""Waiting for what other ranks put into the bucket: their word is what is there."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from deltactl.chain.store import Bucket
from deltactl.core.errors import Conflict, Malformed, NotFound
from deltactl.files.safetensors import METADATA, Header, header_length, parse_header
from deltactl.files.untrusted import parse_header_json

_GUESS = 1 << 16  # bytes of a header that are asked for at first
_FIRST_WAIT = 0.02  # seconds until the next look; doubled from look to look
_LONGEST_WAIT = 1.0


class Watch:
    """Looks for objects until they are there, the step is taken back, or all is given up."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._changed = threading.Condition()
        self._taken_back: set[int] = set()
        self._over = False

    def take_back(self, step: int) -> None:
        """Nobody needs to wait for a step any more: a rank could not make its part."""
        with self._changed:
            self._taken_back.add(step)
            self._changed.notify_all()

    def give_up(self) -> None:
        """Look once more, and wait for nothing any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def headers(self, names: Iterable[str], step: int) -> dict[str, Header] | None:
        """The headers of other ranks' files, by name; None for a step that was taken back.

        Raises Conflict where it was given up, and what the bucket raises.
        """
        found: dict[str, Header] = {}
        missing, wait = list(names), _FIRST_WAIT
        while missing:
            over = self._over
            missing = [name for name in missing if not self._look(name, found)]
            with self._changed:
                if step in self._taken_back:
                    return None
                if missing and over:
                    what = "another rank has not put its part of the step"
                    raise Conflict(what, file=missing[0], step=step)
                if missing and not self._over:
                    self._changed.wait(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        return found

    def _look(self, name: str, found: dict[str, Header]) -> bool:
        try:
            found[name] = _header(self._bucket, name)
        except NotFound:
            return False
        return True


def _header(bucket: Bucket, name: str) -> Header:
    """The header of a safetensors file, whose size is not known but by what it says."""
    raw = bytes(bucket.read(name, 0, _GUESS))
    length = header_length(raw, name)
    if len(raw) < length:
        raw += bytes(bucket.read(name, len(raw), length))
    raw = raw[:length]
    header = parse_header(raw, _size(raw, name), name)
    if len(bucket.read(name, header.file_size - 1, header.file_size + 1)) != 1:
        raise Malformed("the object has another size than its header says", file=name)
    return header


def _size(raw: bytes, name: str) -> int:
    document = parse_header_json(memoryview(raw)[8:], name)
    entries = [entry for key, entry in document.items() if key != METADATA]
    try:
        return len(raw) + max((int(entry.stop) for entry in entries), default=0)
    except (AttributeError, TypeError, ValueError):
        raise Malformed("the header's entries are malformed", file=name) from None
