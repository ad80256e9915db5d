"""The headers of a chain's links, by range, with few requests and few bytes."""

from __future__ import annotations

from collections import defaultdict
from threading import Lock

from deltactl.chain.store import Bucket
from deltactl.core.errors import Malformed
from deltactl.files.safetensors import MAX_HEADER, Header, header_length, parse_header

_FIRST_GUESS = 1 << 13  # bytes
_LARGEST_GUESS = 1 << 23
_ROUND = 1 << 12


class HeaderReader:
    """Reads headers from a bucket, and counts: ``bytes_read``, ``requests``. For many threads.

    How long a header is stands in its first bytes. So that one request is enough for most, more is
    asked for at once: as much as the longest header so far of the same kind of link, as links of
    one chain have headers of about the same size.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bytes_read = 0
        self.requests = 0
        self._bucket = bucket
        self._lock = Lock()
        self._guesses: defaultdict[str, int] = defaultdict(lambda: _FIRST_GUESS)

    def header(self, kind: str, name: str, size: int) -> Header:
        """The header of a safetensors file of ``size`` bytes: one request for most, or two.

        Raises Malformed, and what the bucket raises.
        """
        raw = self._read(name, 0, min(self._guesses[kind], size))
        length = min(header_length(raw, name), size)
        if len(raw) < length:
            raw += self._read(name, len(raw), length)
        header = parse_header(raw[:length], size, name)
        with self._lock:
            rounded = -(-length // _ROUND) * _ROUND
            self._guesses[kind] = min(max(self._guesses[kind], rounded), _LARGEST_GUESS)
        return header

    def whole(self, name: str, size: int) -> bytes:
        """All bytes of an object that is a header as a whole. Raises Malformed for a huge one."""
        if size > MAX_HEADER:
            raise Malformed("the index is too large", file=name, expected=MAX_HEADER, found=size)
        return self._read(name, 0, size)

    def _read(self, name: str, start: int, stop: int) -> bytes:
        data = bytes(self._bucket.read(name, start, stop))
        with self._lock:
            self.bytes_read += len(data)
            self.requests += 1
        return data
