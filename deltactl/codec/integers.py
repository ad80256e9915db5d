"""Streams of small integers: low bits as they are, what is above them through zstd.

Gaps between changed elements, and steps, are draws from distributions that fall off smoothly: their
low bits are noise, and all that can be saved lies in how large they are. So of each value ``k`` low
bits are stored in bit planes, and what is above them as a byte, which zstd's Huffman coder brings
close to its entropy. The byte 255 stands for "255 or more"; what such values have above it follows
as a stream of the same form. (pcodec is as small on such numbers, and slower.)
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from deltactl.core import native

Values = npt.NDArray[Any]
"""Unsigned integers, shape (n,)."""

Flags = npt.NDArray[np.bool_]

_ESCAPE = 255
_SAMPLE = 1 << 12  # values looked at to choose k
_DEPTH = 16  # streams within streams that a reader follows
_PIECE = 1 << 16  # values that are put together at once
_CAREFUL = 8  # from here on a writer takes k from the largest value, so that none is left over


class _Coder(threading.local):
    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=1).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_coder = _Coder()


class Undecodable(ValueError):
    """The bytes are no such stream; the text says why."""


@dataclass(slots=True)
class Reader:
    """Takes bytes from the front of a block; every length is checked against what is left."""

    data: memoryview
    at: int = 0

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return len(self.data) - self.at

    def take(self, count: int) -> memoryview:
        """The next ``count`` bytes. Raises Undecodable."""
        if count > self.left:
            raise Undecodable(f"{count} bytes are wanted and {self.left} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        """The next four bytes, a little-endian number."""
        return int.from_bytes(self.take(4), "little")


def packed_bits(reader: Reader, count: int) -> npt.NDArray[np.uint8]:
    """The next ``count`` bits, as they are packed into bytes of their own.

    Raises Undecodable, also where what is left of the last byte is not 0.
    """
    found = np.frombuffer(reader.take(-(-count // 8)), np.uint8)
    if count % 8 and found[-1] >> (count % 8):
        raise Undecodable("bits of padding are not 0")
    return found


def encode(values: Values, depth: int = 0) -> bytes:
    """A stream of any number of unsigned integers of any width; the number itself is not in it."""
    if not values.size:
        return b""
    k = _low_bits(values, depth)
    planes, high, escapes = _split(values, k)
    coded = _coder.compress(high.data)
    if len(coded) >= high.size:
        coded = high.tobytes()
    rest = b""
    if escapes:
        above = values.take(np.flatnonzero(high == _ESCAPE)) >> values.dtype.type(k)
        rest = encode(above - values.dtype.type(_ESCAPE), depth + 1)
    return b"".join([bytes([k]), planes, len(coded).to_bytes(4, "little"), coded, rest])


def _split(values: Values, k: int) -> tuple[bytes, npt.NDArray[np.uint8], int]:
    """The planes of the k low bits, the bytes above them, and how many of those are escapes."""
    if native.KERNEL is not None and values.dtype == np.uint32:
        planes, high, escapes = native.KERNEL.split(values, k)
        return planes.tobytes(), high, escapes
    high = np.minimum(values >> values.dtype.type(k), _ESCAPE).astype(np.uint8)
    return b"".join(_planes(values, k)), high, int(np.count_nonzero(high == _ESCAPE))


def _low_bits(values: Values, depth: int) -> int:
    """How many low bits are noise: all but the three highest of the median's."""
    if depth >= _CAREFUL:
        return max(0, int(values.max()).bit_length() - 7)
    sample = values[:: -(-values.size // _SAMPLE)]
    middle = sample.size // 2
    return max(0, int(np.partition(sample, middle)[middle]).bit_length() - 3)


def _planes(values: Values, k: int) -> list[bytes]:
    planes = []
    for bit in range(k):
        if bit % 8 == 0:
            low = (values >> values.dtype.type(bit)).astype(np.uint8)
        planes.append(np.packbits(low & np.uint8(1 << bit % 8), bitorder="little").tobytes())
    return planes


def decode(reader: Reader, values: Values, bound: int = 1 << 64) -> None:
    """Put the next stream's values, each below ``bound``, into ``values``, shape (n,).

    ``values``: of an unsigned dtype that holds ``bound`` less 1. Streams within the stream add to
    what the outer ones gave, so that however deep they lie it takes few bytes a value beside them:
    a small block can claim millions of values on each level. Raises Undecodable.
    """
    where: Flags | None = None
    count, shift = values.size, 0
    for depth in range(_DEPTH + 1):
        if not count:
            return
        if depth == _DEPTH:
            raise Undecodable(f"streams lie more than {_DEPTH} deep in each other")
        level = _Level.read(reader, count)
        if where is None:
            _set(level, values, bound)
            where = level.high == _ESCAPE
        else:
            _add(level, values, where, shift, bound)
        shift += level.k
        del level  # before the next takes as much
        count = int(np.count_nonzero(where))


@dataclass(slots=True)
class _Level:
    """A stream without what lies within: ``k`` planes of low bits, and the bytes above them."""

    k: int
    planes: npt.NDArray[np.uint8]
    high: npt.NDArray[np.uint8]

    @classmethod
    def read(cls, reader: Reader, count: int) -> _Level:
        k = reader.take(1)[0]
        if k > 63:
            raise Undecodable(f"a stream has {k} low bits")
        planes = np.frombuffer(reader.take(k * -(-count // 8)), np.uint8).reshape(k, -(-count // 8))
        if count % 8 and (planes[:, -1] >> (count % 8)).any():
            raise Undecodable("bits of padding are not 0")
        high = _high(reader, count)
        if k > 56 and int(high.max()) >> (64 - k):
            raise Undecodable("a value is not below 2^64")
        return cls(k, planes, high)

    def values(self, start: int, stop: int) -> npt.NDArray[np.uint64]:
        """Those from the ``start``-th to before the ``stop``-th, as if there were no escapes."""
        first = start - start % 8
        planes = self.planes[:, first // 8 : -(-stop // 8)]
        joined = _join(np.ascontiguousarray(planes).reshape(-1), self.high[first:stop], self.k)
        return joined[start - first :]


def _set(level: _Level, values: Values, bound: int) -> None:
    for start in range(0, values.size, _PIECE):
        part = values[start : start + _PIECE]
        found = level.values(start, start + part.size)
        if int(found.max()) >= bound:
            raise Undecodable(f"a value is not below {bound}")
        part[:] = found


def _add(level: _Level, values: Values, where: Flags, shift: int, bound: int) -> None:
    """Add a level's values, ``shift`` bits up, to those that ``where`` marks; afterwards it marks
    those that the next level adds to."""
    at = 0
    for start in range(0, values.size, _PIECE):
        part = values[start : start + _PIECE]
        hit = np.flatnonzero(where[start : start + _PIECE])
        if not hit.size:
            continue
        found = level.values(at, at + hit.size)
        before = part.take(hit).astype(np.uint64)
        room = (np.uint64(bound - 1) - before) >> np.uint64(min(shift, 63))
        if (found > (room if shift < 64 else 0)).any():
            raise Undecodable(f"a value is not below {bound}")
        part[hit] = (before + (found << np.uint64(min(shift, 63)))).astype(values.dtype)
        where[start + hit] = level.high[at : at + hit.size] == _ESCAPE
        at += hit.size


def _join(
    planes: npt.NDArray[np.uint8], high: npt.NDArray[np.uint8], k: int
) -> npt.NDArray[np.uint64]:
    if native.KERNEL is not None:
        return native.KERNEL.join(planes, high, k)
    values = high.astype(np.uint64) << np.uint64(k)
    for bit, plane in enumerate(planes.reshape(k, -(-high.size // 8))):
        bits = np.unpackbits(plane, count=high.size, bitorder="little")
        values |= bits.astype(np.uint64) << np.uint64(bit)
    return values


def _high(reader: Reader, count: int) -> npt.NDArray[np.uint8]:
    coded = reader.take(reader.number())
    if len(coded) == count:
        return np.frombuffer(coded, np.uint8)
    try:
        # Before anything of that size is allocated: the frame says what it holds.
        if zstandard.frame_content_size(coded) != count:
            raise Undecodable("a zstd frame holds another number of bytes than there are values")
        data = _coder.decompress(coded, max_output_size=count, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Undecodable(str(error)) from None
    if len(data) != count:
        raise Undecodable("a zstd frame holds another number of bytes than there are values")
    return np.frombuffer(data, np.uint8)
