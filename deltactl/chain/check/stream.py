"""A link's objects checked while they come in: each is fed its bytes in order, once.

So a wrong byte is found as soon as the part that it makes wrong is there, and what has come in need
not be read again. What a link has to be is known beforehand, from its header.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

from deltactl.chain.chain import Link
from deltactl.chain.check.anchor import digest_fault, tensor_fault
from deltactl.core.digest import TensorState, hasher
from deltactl.core.errors import DeltactlError, Malformed
from deltactl.files.safetensors import Entry, header_length, parse_header
from deltactl.format.anchor import INDEX, AnchorFile, AnchorHeader
from deltactl.format.delta import part_fault, payload_fault
from deltactl.format.delta_header import DeltaHeader, PartFile
from deltactl.format.header import HEADER_DIGEST, check_seal


class Checker(Protocol):
    """``faults``: what is wrong with what has come so far."""

    faults: list[DeltactlError]

    def feed(self, data: bytes) -> None:
        """Take the next bytes; never more than the object's size in all."""
        ...

    def finish(self) -> None:
        """All bytes have come."""
        ...


def identity(link: Link) -> str | None:
    """A digest that no other link shares: its header's, which names those of all else. None: of a
    link of TRL's nothing is known beforehand."""
    return link.header.metadata.get(HEADER_DIGEST)


def checker_of(link: Link, name: str, size: int) -> Checker:
    """The checker of one of a link's objects."""
    if identity(link) is None:
        return Unchecked()
    if link.directory is not None and name == link.name:
        return _IndexChecker(link)
    if isinstance(link.header, DeltaHeader):
        return _DeltaChecker(link, link.header, name, size)
    if link.directory is None:
        return _TensorsChecker(link, None, size)
    file = next(file for file in link.header.files if link.directory + file.name == name)
    return _TensorsChecker(link, file, size) if file.is_shard else FileChecker(link, file)


class Unchecked:
    """Of an object without a digest."""

    def __init__(self) -> None:
        self.faults: list[DeltactlError] = []

    def feed(self, data: bytes) -> None:
        pass

    def finish(self) -> None:
        pass


class FileChecker:
    """Of a file that an anchor's index has the digest of."""

    def __init__(self, anchor: Link, file: AnchorFile) -> None:
        self.faults: list[DeltactlError] = []
        self._anchor, self._file, self._digest = anchor, file, hasher()

    def feed(self, data: bytes) -> None:
        self._digest.update(data)

    def finish(self) -> None:
        fault = digest_fault(self._anchor, self._file, self._digest.hexdigest())
        self.faults += [fault] if fault is not None else []


class _IndexChecker:
    """Of an index, all of which is a header. Small enough to be held."""

    def __init__(self, link: Link) -> None:
        self.faults: list[DeltactlError] = []
        self._link, self._raw = link, bytearray()

    def feed(self, data: bytes) -> None:
        self._raw += data

    def finish(self) -> None:
        try:
            check_seal(bytes(self._raw), self._link.header.metadata, self._link.name)
        except Malformed as error:
            error.step = self._link.step
            self.faults.append(error)


class _HeaderFirst(ABC):
    """Holds the header of a safetensors file back until it is whole; the rest goes on at once."""

    def __init__(self, link: Link, name: str, size: int, length: int | None = None) -> None:
        self.faults: list[DeltactlError] = []
        self._link, self._name, self._size = link, name, size
        self._raw: bytearray | None = bytearray()
        self._length = length
        self._lost = False  # nothing can be said of what comes after a wrong header

    def feed(self, data: bytes) -> None:
        if self._lost:
            return
        try:
            rest = data if self._raw is None else self._take(self._raw, data)
            if self._raw is None:
                self._payload(rest)
        except DeltactlError as error:
            error.step = self._link.step
            self.faults.append(error)
            self._lost = True

    def _take(self, raw: bytearray, data: bytes) -> bytes:
        """Take what belongs to the header, and return the rest."""
        missing = max(0, 8 - len(raw))
        raw += data[:missing]
        if len(raw) < 8:
            return b""
        length = header_length(bytes(raw[:8]), self._name)
        if length > self._size or length != (self._length or length):
            what = "the object is another than the one whose header was read"
            expected = f"a header of {self._length or f'<= {self._size}'} bytes"
            raise Malformed(what, file=self._name, expected=expected, found=f"{length} bytes")
        end = missing + length - len(raw)
        raw += data[missing:end]
        if len(raw) == length:
            self._raw = None
            self._header(bytes(raw))
        return data[end:]

    def finish(self) -> None:
        if self._raw is not None and not self._lost:
            what = "too short for a safetensors file"
            self.faults.append(Malformed(what, file=self._name, step=self._link.step))
            self._lost = True

    @abstractmethod
    def _header(self, raw: bytes) -> None:
        """The whole header, once."""

    @abstractmethod
    def _payload(self, data: bytes) -> None:
        """The bytes after the header, in order, in pieces."""


class _DeltaChecker(_HeaderFirst):
    """The header, by its seal or as the index names it, then one digest over the payload."""

    def __init__(self, link: Link, header: DeltaHeader, name: str, size: int) -> None:
        parts = {f"{link.directory}{part.name}": part for part in header.files}
        self._part: PartFile | None = parts.get(name)
        super().__init__(link, name, size, None if self._part else header.header_bytes)
        expected = self._part.payload_digest if self._part else header.payload_digest
        self._expected = str(expected)
        self._digest = hasher()

    def _header(self, raw: bytes) -> None:
        if self._part is None:
            check_seal(raw, self._link.header.metadata, self._name)
            return
        found = hasher().update(raw).hexdigest()
        if found != self._part.header_digest:
            raise part_fault(self._name, self._part.header_digest, found)

    def _payload(self, data: bytes) -> None:
        self._digest.update(data)

    def finish(self) -> None:
        super().finish()
        if not self._lost and self._digest.hexdigest() != self._expected:
            found = payload_fault(self._name, self._expected, self._digest.hexdigest())
            found.step = self._link.step
            self.faults.append(found)


class _TensorsChecker(_HeaderFirst):
    """The header, then each tensor as soon as its last byte is there."""

    def __init__(self, anchor: Link, shard: AnchorFile | None, size: int) -> None:
        name = anchor.name if shard is None else anchor.name.removesuffix(INDEX) + shard.name
        super().__init__(anchor, name, size)
        assert isinstance(anchor.header, AnchorHeader)
        self._shard = shard
        self._expected = {tensor.name: tensor for tensor in anchor.header.tensors}
        self._entries: Iterator[Entry] = iter(())
        self._entry: Entry | None = None
        self._at = 0
        self._digest: Any = None

    def _header(self, raw: bytes) -> None:
        if self._shard is None:
            check_seal(raw, self._link.header.metadata, self._name)
        else:
            fault = digest_fault(self._link, self._shard, hasher().update(raw).hexdigest())
            if fault is not None:
                raise fault
        self._entries = iter(parse_header(raw, self._size, self._name).entries.values())
        self._at = len(raw)
        self._advance()

    def _advance(self) -> None:
        self._entry, self._digest = next(self._entries, None), hasher()

    def _payload(self, data: bytes) -> None:
        view = memoryview(data)
        while self._entry is not None:
            taken = min(len(view), self._entry.stop - self._at)
            self._digest.update(view[:taken])
            self._at += taken
            view = view[taken:]
            if self._at < self._entry.stop:
                return
            self._compare(self._entry, self._digest.hexdigest())
            self._advance()  # the last one ends with the file: parse_header has made sure

    def _compare(self, entry: Entry, digest: str) -> None:
        expected = self._expected.get(entry.name)
        found = TensorState(entry.name, entry.dtype, entry.shape, digest)
        if found != expected:
            self.faults.append(tensor_fault(self._link, self._name, entry.name, expected, found))
