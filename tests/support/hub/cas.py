"""The content-addressed store: xorbs (runs of chunks), and files made of pieces of them.

Chunks have to come uncompressed: the tests set HF_XET_XORB_COMPRESSION_POLICY to "none".
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

EMPTY = "0" * 64
"""The hash of a file without bytes, which no shard describes."""

_CHUNK_HEADER = 8  # version, compressed length (3), scheme, length (3)
_RECORD = 48  # all records of a shard have this size
_END = b"\xff" * 32
_SHARD_MAGIC = b"HFRepoMetaData\0"
_HAS_VERIFICATION, _HAS_METADATA = 1 << 31, 1 << 30


class Refused(Exception):
    """What a client sent cannot be taken."""


def hash_text(raw: bytes) -> str:
    """A hash as the protocol spells it: four little-endian words in hexadecimal."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


@dataclass(frozen=True)
class Xorb:
    """``offsets``: where each chunk begins, its header counted, and where the last one ends."""

    data: bytes
    offsets: tuple[int, ...]

    def chunk(self, index: int) -> bytes:
        return self.data[self.offsets[index] + _CHUNK_HEADER : self.offsets[index + 1]]

    def length(self, first: int, last: int) -> int:
        """Bytes of content in the chunks from ``first`` up to ``last``."""
        return self.offsets[last] - self.offsets[first] - _CHUNK_HEADER * (last - first)


@dataclass(frozen=True)
class Term:
    """Chunks of a xorb that stand side by side in a file."""

    xorb: str
    first: int
    last: int


def parse_xorb(data: bytes) -> Xorb:
    offsets = [0]
    while offsets[-1] < len(data) and data[offsets[-1] :][:7] != b"XETBLOB":  # a footer
        at = offsets[-1]
        if data[at + 4] != 0:
            raise Refused("this stand-in takes uncompressed chunks alone")
        offsets.append(at + _CHUNK_HEADER + int.from_bytes(data[at + 1 : at + 4], "little"))
    if len(offsets) == 1 or offsets[-1] > len(data):
        raise Refused("a torn xorb")
    return Xorb(data, tuple(offsets))


def parse_shard(data: bytes) -> Iterator[tuple[str, list[Term]]]:
    """The files that a shard describes, each with its terms."""
    if not data.startswith(_SHARD_MAGIC):
        raise Refused("no shard")
    at = _RECORD
    while data[at : at + 32] != _END:
        name, (flags, count) = data[at : at + 32], struct.unpack_from("<II", data, at + 32)
        at += _RECORD
        terms = []
        for _ in range(count):
            first, last = struct.unpack_from("<II", data, at + 40)
            terms.append(Term(hash_text(data[at : at + 32]), first, last))
            at += _RECORD
        at += _RECORD * (count * bool(flags & _HAS_VERIFICATION) + bool(flags & _HAS_METADATA))
        yield hash_text(name), terms


class Cas:
    """Xorbs and files by their hashes, which are taken at the client's word."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.xorbs: dict[str, Xorb] = {}
        self._files: dict[str, list[Term]] = {}

    def add_xorb(self, name: str, data: bytes) -> None:
        xorb = parse_xorb(data)
        with self._lock:
            self.xorbs[name] = xorb

    def add_shard(self, data: bytes) -> None:
        files = dict(parse_shard(data))
        for terms in files.values():
            if any(t.xorb not in self.xorbs for t in terms):
                raise Refused("the shard names a xorb that is not here")
        with self._lock:
            self._files |= files

    def has(self, name: str) -> bool:
        return name == EMPTY or name in self._files

    def size(self, name: str) -> int:
        return sum(self.xorbs[t.xorb].length(t.first, t.last) for t in self._terms(name))

    def content(self, name: str) -> bytes:
        return b"".join(
            self.xorbs[t.xorb].chunk(n) for t in self._terms(name) for n in range(t.first, t.last)
        )

    def _terms(self, name: str) -> list[Term]:
        return [] if name == EMPTY else self._files[name]

    def terms_of(self, name: str, start: int, stop: int) -> tuple[int, list[tuple[Term, int]]]:
        """The terms that cover a range of a file, whole chunks each with their length, and the
        bytes to leave out of the first."""
        found: list[tuple[Term, int]] = []
        skip = at = 0
        for term in self._terms(name):
            xorb = self.xorbs[term.xorb]
            chunks = []
            for n in range(term.first, term.last):
                length = xorb.length(n, n + 1)
                if at < stop and at + length > start:
                    if not found and not chunks:
                        skip = max(start - at, 0)
                    chunks.append(n)
                at += length
            if chunks:
                part = Term(term.xorb, chunks[0], chunks[-1] + 1)
                found.append((part, xorb.length(part.first, part.last)))
        return skip, found
