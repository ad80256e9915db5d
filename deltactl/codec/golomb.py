"""Golomb codes: what gaps between independent events cost least in.

Where each element changes with the same probability p, gaps are geometric, and of all codes with a
whole number of bits a value Golomb's is the best (Golomb 1966, "Run-length encodings"; Gallager and
Van Voorhis 1975, "Optimal source codes for geometrically distributed integer alphabets"): with one
parameter and no table, within 0.05 bits of the entropy a gap where their mean is 2 or more, and
0.11 where it is 1 or more, which in a set it always is.

A stream of n > 0 values: the parameter m > 0 and the sum of the quotients, both as LEB128; the
quotients ``value // m`` in unary, as many 0 bits and a 1; the remainders in truncated binary, in
two parts, with b the bit length of m - 1 and ``cut = 2^b - m``: b - 1 bits each, then one more bit
of those for which the first part is ``cut`` or more. Each of the three is packed from the lowest
bit of a byte on, and padded with 0 to a byte. The quotients' sum is at most 2 n, which holds for
the best m. Of no values the stream is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from deltactl.codec.integers import Reader, Undecodable, packed_bits

U64 = npt.NDArray[np.uint64]

_LONGEST = 9  # bytes of a LEB128 that a reader takes: 63 bits
_FIELDS = 1 << 13  # fields packed together, whole bytes of them: a byte a bit is not little
_PIECE = 1 << 15  # bits of quotients looked at together, whole bytes of them


def leb128(number: int) -> bytes:
    """A number that is not negative, seven bits a byte from the lowest on; 128 says "goes on"."""
    out = bytearray()
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_leb128(reader: Reader) -> int:
    """The next number, below 2^63. Raises Undecodable."""
    number = 0
    for shift in range(0, 7 * _LONGEST, 7):
        byte = reader.take(1)[0]
        number |= (byte & 127) << shift
        if byte < 128:
            return number
    raise Undecodable(f"a number has more than {_LONGEST} bytes")


def encode(values: npt.NDArray[Any]) -> bytes:
    """A stream of unsigned integers, shape (n,), each below 2^63; n itself is not in it."""
    if not values.size:
        return b""
    m = _parameter(values)
    quotients, remainders = np.divmod(values.astype(np.uint64), np.uint64(m))
    bits = (m - 1).bit_length()
    ends = np.cumsum(quotients.view(np.int64) + 1)
    unary = np.zeros(int(ends[-1]), np.uint8)
    unary[ends - 1] = 1
    cut = np.uint64((1 << bits) - m)
    long = remainders >= cut
    first = np.where(long, (remainders + cut) >> np.uint64(1), remainders)
    extra = ((remainders[long] + cut) & np.uint64(1)).astype(np.uint8)
    streams = [leb128(m), leb128(int(ends[-1]) - values.size), _packed(unary)]
    if bits:
        streams += [*_packed_fields(first, bits - 1), _packed(extra)]
    return b"".join(streams)


def _parameter(values: npt.NDArray[Any]) -> int:
    """The best m for geometric values of this mean (Gallager and Van Voorhis, equation 3).

    The logarithm of their ratio is taken from the mean itself: past 2^53 the ratio would be 1.
    """
    mean = float(values.mean(dtype=np.float64))
    if mean == 0:
        return 1
    return math.ceil(math.log1p(mean / (1 + mean)) / math.log1p(1 / mean))


def _packed_fields(values: U64, width: int) -> Iterator[bytes]:
    """The ``width`` low bits of each value, one after the other."""
    for at in range(0, values.size, _FIELDS):
        piece = values[at : at + _FIELDS]
        bits = np.empty((piece.size, width), np.uint8)
        for i in range(width):
            bits[:, i] = (piece >> np.uint64(i)) & np.uint64(1)
        yield _packed(bits.reshape(-1))


def _packed(bits: npt.NDArray[np.uint8]) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()


def decode(reader: Reader, values: npt.NDArray[Any], limit: int) -> None:
    """Put the next stream's values, each below ``limit``, into ``values``, shape (n,), of an
    unsigned dtype that holds them. Raises Undecodable."""
    at = 0
    for found in pieces(reader, values.size, limit):
        values[at : at + found.size] = found
        at += found.size


def pieces(reader: Reader, count: int, limit: int) -> Iterator[U64]:
    """The next stream of ``count`` values, each below ``limit``, some at a time.

    What it takes from ``reader`` is only known at its end, to which it has to be read. Raises
    Undecodable.
    """
    if not count:
        return
    m, total = read_leb128(reader), read_leb128(reader)
    if not 0 < m <= 2 * limit or total > 2 * count:
        raise Undecodable(f"a parameter of {m} or quotients of {total} for {count} values")
    unary = packed_bits(reader, count + total)
    remainders = _Remainders(reader, count, m)
    for quotients in _quotients(unary, count, total):
        if int(quotients.max()) * m >= limit:
            raise Undecodable(f"a quotient of {int(quotients.max())} leaves {limit}")
        values = quotients.view(np.uint64) * np.uint64(m)
        remainders.add_to(values)
        if int(values.max()) >= limit:
            raise Undecodable(f"a value of {int(values.max())} is not below {limit}")
        yield values
    remainders.end()


def _quotients(
    unary: npt.NDArray[np.uint8], count: int, total: int
) -> Iterator[npt.NDArray[np.int64]]:
    """``count`` quotients, some at a time, that ``count + total`` bits give."""
    done = zeros = 0  # those of a quotient that goes on in the next piece
    for start in range(0, count + total, _PIECE):
        flags = _bits(unary, start, min(_PIECE, count + total - start))
        ends = np.flatnonzero(flags.view(np.bool_))
        if not ends.size:
            zeros += flags.size
            continue
        found = np.diff(ends, prepend=-1 - zeros) - 1
        zeros = flags.size - 1 - int(ends[-1])
        done += ends.size
        if done > count:
            break
        yield found
    if done != count or zeros:
        raise Undecodable(f"{done} quotients where there are {count} values")


class _Remainders:
    """The remainders of ``count`` values by ``m``, in order."""

    def __init__(self, reader: Reader, count: int, m: int) -> None:
        self._reader = reader
        self._width = (m - 1).bit_length() - 1  # -1: there are none
        self._cut = np.uint64((1 << self._width + 1) - m)
        self._first = packed_bits(reader, count * max(self._width, 0))
        self._extra = np.frombuffer(reader.data, np.uint8)[reader.at :]
        self._seen = self._longer = 0

    def add_to(self, values: U64) -> None:
        """Add the next ones to values, shape (n,). Raises Undecodable."""
        if self._width < 0:
            return
        width, at = self._width, self._seen * self._width
        fields = _bits(self._first, at, values.size * width).reshape(values.size, width)
        found = np.zeros(values.size, np.uint64)
        for i in range(width):
            found |= fields[:, i].astype(np.uint64) << np.uint64(i)
        longer = np.flatnonzero(found >= self._cut)
        extra = _bits(self._extra, self._longer, longer.size).astype(np.uint64)
        found[longer] += found[longer] + extra - self._cut
        values += found
        self._seen += values.size
        self._longer += longer.size

    def end(self) -> None:
        """Take the last bits, whose number is known now. Raises Undecodable."""
        packed_bits(self._reader, self._longer)


def _bits(packed: npt.NDArray[np.uint8], start: int, count: int) -> npt.NDArray[np.uint8]:
    """Bits from the ``start``-th on. Raises Undecodable where there are fewer than ``count``."""
    end = start + count
    if end > 8 * packed.size:
        raise Undecodable(f"{-(-end // 8)} bytes are wanted and {packed.size} are left")
    piece = np.unpackbits(packed[start // 8 : -(-end // 8)], bitorder="little")
    return piece[start % 8 : start % 8 + count]
