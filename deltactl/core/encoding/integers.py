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

_ESCAPE = 255
_SAMPLE = 1 << 12  # values looked at to choose k
_DEPTH = 16  # streams within streams that a reader follows
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

    def take(self, count: int) -> memoryview:
        """The next ``count`` bytes. Raises Undecodable."""
        left = len(self.data) - self.at
        if count > left:
            raise Undecodable(f"{count} bytes are wanted and {left} are left")
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


def decode(reader: Reader, count: int, depth: int = 0) -> npt.NDArray[np.uint64]:
    """The next stream, which holds ``count`` values, shape (count,). Raises Undecodable."""
    if not count:
        return np.empty(0, np.uint64)
    k = reader.take(1)[0]
    if k > 63 or depth >= _DEPTH:
        raise Undecodable(f"a stream has {k} low bits at depth {depth}")
    planes = np.frombuffer(reader.take(k * -(-count // 8)), np.uint8)
    if k and count % 8 and (planes.reshape(k, -1)[:, -1] >> (count % 8)).any():
        raise Undecodable("bits of padding are not 0")
    high = _high(reader, count)
    values = _join(planes, high, k)
    escaped = np.flatnonzero(high == _ESCAPE)
    if escaped.size:
        values[escaped] += decode(reader, escaped.size, depth + 1) << np.uint64(k)
    return values


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
