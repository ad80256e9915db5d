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
_PIECE = 1 << 13  # fields packed together, whole bytes of them: a byte a bit is not little


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
    for at in range(0, values.size, _PIECE):
        piece = values[at : at + _PIECE]
        bits = np.empty((piece.size, width), np.uint8)
        for i in range(width):
            bits[:, i] = (piece >> np.uint64(i)) & np.uint64(1)
        yield _packed(bits.reshape(-1))


def _packed(bits: npt.NDArray[np.uint8]) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()


def decode(reader: Reader, count: int, limit: int) -> U64:
    """The next stream of ``count`` values, each below ``limit``, shape (count,).

    Raises Undecodable.
    """
    if not count:
        return np.empty(0, np.uint64)
    m, total = read_leb128(reader), read_leb128(reader)
    if not 0 < m <= 2 * limit or total > 2 * count:
        raise Undecodable(f"a parameter of {m} or quotients of {total} for {count} values")
    quotients = _quotients(reader, count, total)
    bits = (m - 1).bit_length()
    values = np.zeros(count, np.uint64) if not bits else _remainders(reader, count, m, bits)
    if int(quotients.max()) * m >= limit:
        raise Undecodable(f"a quotient of {int(quotients.max())} leaves {limit}")
    values += quotients.view(np.uint64) * np.uint64(m)
    if int(values.max()) >= limit:
        raise Undecodable(f"a value of {int(values.max())} is not below {limit}")
    return values


def _unpacked(reader: Reader, count: int) -> npt.NDArray[np.uint8]:
    return np.unpackbits(packed_bits(reader, count), count=count, bitorder="little")


def _quotients(reader: Reader, count: int, total: int) -> npt.NDArray[np.int64]:
    ends = np.flatnonzero(_unpacked(reader, count + total).view(np.bool_))
    if ends.size != count or int(ends[-1]) != count + total - 1:
        raise Undecodable(f"{ends.size} quotients where there are {count} values")
    quotients = np.diff(ends, prepend=-1)
    quotients -= 1
    return quotients


def _remainders(reader: Reader, count: int, m: int, bits: int) -> U64:
    first = np.zeros(count, np.uint64)
    for at in range(0, count, _PIECE):
        piece = first[at : at + _PIECE]
        fields = _unpacked(reader, piece.size * (bits - 1)).reshape(piece.size, bits - 1)
        for i in range(bits - 1):
            piece |= fields[:, i].astype(np.uint64) << np.uint64(i)
    cut = np.uint64((1 << bits) - m)
    long = np.flatnonzero(first >= cut)
    extra = _unpacked(reader, long.size).astype(np.uint64)
    first[long] += first[long] + extra - cut
    return first
