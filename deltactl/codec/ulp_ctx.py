"""``ulp_ctx``: gaps and steps within classes of the base's exponent.

One part, ``.ulp_ctx``, U8: a directory of two little-endian u32 a block (changes, bytes), then the
blocks' bytes in order. A block with n > 0 changes begins with a byte: 0 if a block of ``.ulp``
follows; else it is by classes. Then come (numbers in LEB128, sets and streams as below)

- where the byte is 2, the number of silent segments, and their set among the block's segments of
  1024 elements; elements of silent segments are in no class, and none of them changes;
- the number of borders and the borders: exponents at which a class begins;
- for each class but the last its elements and its changes; the last one has the rest;
- n bits, 1 for down, class after class, packed from the lowest bit of a byte on;
- for each class the number of steps longer than one unit, their set among the class's changes, and
  the stream of their lengths less two;
- for each class the set of its changes among its elements, in order of position.

A set of k of n things: the gaps between them, or where ``2 k > n`` between the others, as a stream
of Golomb codes. Integer types have blocks of ``.ulp`` alone, and so has what is smaller that way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from deltactl.codec import golomb
from deltactl.codec.base import EncodedBlock, Part, StoredPart, Target
from deltactl.codec.bits import Bits, Positions, SplitSteps, split_steps
from deltactl.codec.blocks import StoredBlocks, blocks_part
from deltactl.codec.classes import MOST_CLASSES, SEGMENT, Classes, Ranks
from deltactl.codec.golomb import leb128, read_leb128
from deltactl.codec.grouping import choose_borders, silent_segments
from deltactl.codec.integers import Reader, Undecodable, packed_bits
from deltactl.codec.ulp import SteppedBits, decode_ulp, encode_ulp, gaps_of
from deltactl.core.dtypes import FLOATS, element_bytes
from deltactl.files.atomic import Spool

_AS_ULP, _BY_CLASSES, _WITHOUT_SILENT = 0, 1, 2


class UlpCtx:
    """Gaps and steps within classes."""

    name = "ulp_ctx"
    suffixes: tuple[str, ...] = (".ulp_ctx",)
    dense_if_smaller = True
    needs_base = True

    def encode(
        self, base: Bits, positions: Positions, before: Bits, after: Bits, dtype: str
    ) -> tuple[bytes, ...]:
        steps, longer = split_steps(before, after, dtype)
        plain = bytes([_AS_ULP]) + encode_ulp(positions, steps, longer)
        if dtype not in FLOATS:
            return (plain,)
        return (min(plain, _encode(base, positions, before, steps, dtype), key=len),)

    def parts(
        self, target: Target, blocks: Sequence[EncodedBlock], spool: Spool
    ) -> tuple[Part, ...]:
        return blocks_part(".ulp_ctx", target, blocks, spool)

    def decoder(self, target: Target, parts: Mapping[str, StoredPart]) -> UlpCtxDecoder:
        return UlpCtxDecoder(target, parts[".ulp_ctx"])


def _encode(base: Bits, positions: Positions, before: Bits, steps: SplitSteps, dtype: str) -> bytes:
    silent = silent_segments(positions, base.size)
    borders = choose_borders(base, before, steps, dtype)
    active = np.ones(-(-base.size // SEGMENT), np.uint8)
    active[silent] = 0
    classes = Classes(dtype, borders, active)
    ranks, order, counts, totals = classes.ranks(base, positions)
    down = np.unpackbits(steps.down, count=positions.size, bitorder="little").take(order)
    beyond = steps.beyond.take(order)
    ends = np.cumsum(counts)
    spans = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    out = [bytes([_WITHOUT_SILENT if silent.size else _BY_CLASSES])]
    if silent.size:
        out += [leb128(silent.size), _encode_set(silent, active.size)]
    out += [leb128(len(borders)), *map(leb128, borders)]
    for k in range(len(borders)):
        out += [leb128(int(totals[k])), leb128(int(counts[k]))]
    out.append(np.packbits(down, bitorder="little").tobytes())
    out += [_encode_lengths(beyond[span]) for span in spans]
    for span, total in zip(spans, totals, strict=True):
        out.append(_encode_set(ranks[span].astype(np.int64), int(total)))
    return b"".join(out)


def _encode_lengths(beyond: Bits) -> bytes:
    if not beyond.size:
        return b""
    longer = np.flatnonzero(beyond)
    lengths = beyond.take(longer)
    lengths -= lengths.dtype.type(1)
    return leb128(longer.size) + _encode_set(longer, beyond.size) + golomb.encode(lengths)


def _encode_set(members: Positions, total: int) -> bytes:
    """Rising positions below ``total``; how many they are is not in it."""
    if 2 * members.size > total:
        members = _others(members, total)
    return golomb.encode(gaps_of(members))


def _others(members: Positions, total: int) -> Positions:
    is_other = np.ones(total, np.bool_)
    is_other[members] = False
    return np.flatnonzero(is_other)


def _decode_set(reader: Reader, count: int, total: int) -> Positions:
    """``count`` strictly rising positions below ``total``. Raises Undecodable."""
    if count > total:
        raise Undecodable(f"a set of {count} among {total}")
    flip = 2 * count > total
    gaps = golomb.decode(reader, total - count if flip else count, total + 1)
    positions = np.cumsum(gaps.view(np.int64) + 1) - 1
    if positions.size and int(positions[-1]) >= total:
        raise Undecodable(f"position {int(positions[-1])} is past {total} of a set")
    return _others(positions, total) if flip else positions


class UlpCtxDecoder(StoredBlocks):
    """Decodes a block's bytes by the base's exponents."""

    needs_base = True

    def steps(self, number: int, length: int) -> SplitSteps:
        """The steps of a block of ``length`` elements, in no order that says where they are:
        without the base that is not known. Raises Malformed."""
        dtype = self.target.dtype
        with self.open(number, length) as (reader, count):
            form = reader.take(1)[0] if count else _AS_ULP
            if form == _AS_ULP:
                return decode_ulp(reader, count, length, dtype).steps
            layout = _read_layout(reader, form, count, length, dtype)
            steps = _read_steps(reader, layout, element_bytes(dtype))
            _read_sets(reader, layout)
            return steps

    def block(self, number: int, base: Bits) -> SteppedBits:
        dtype = self.target.dtype
        with self.open(number, base.size) as (reader, count):
            form = reader.take(1)[0] if count else _AS_ULP
            if form == _AS_ULP:
                return decode_ulp(reader, count, base.size, dtype)
            layout = _read_layout(reader, form, count, base.size, dtype)
            steps = _read_steps(reader, layout, element_bytes(dtype))
            positions, order = _read_positions(reader, layout, base)
        down = np.unpackbits(steps.down, count=count, bitorder="little").take(order)
        in_order = SplitSteps(np.packbits(down, bitorder="little"), steps.beyond.take(order))
        return SteppedBits(positions, in_order, dtype)


@dataclass(frozen=True, slots=True)
class _Layout:
    """A block's classes, and of each how many elements it has and how many of them change."""

    classes: Classes
    totals: list[int]
    counts: list[int]


def _read_layout(reader: Reader, form: int, count: int, length: int, dtype: str) -> _Layout:
    if form not in (_BY_CLASSES, _WITHOUT_SILENT) or dtype not in FLOATS:
        raise Undecodable(f"a block of form {form} in a tensor of {dtype}")
    active = np.ones(-(-length // SEGMENT), np.uint8)
    if form == _WITHOUT_SILENT:
        active[_decode_set(reader, read_leb128(reader), active.size)] = 0
    borders = [read_leb128(reader) for _ in range(_number_below(reader, MOST_CLASSES))]
    if not all(a < b for a, b in pairwise([0, *borders, FLOATS[dtype].highest + 1])):
        raise Undecodable(f"the classes' borders do not rise: {borders}"[:200])
    left = int(active.sum()) * SEGMENT
    if active.size and active[-1]:
        left -= -length % SEGMENT
    totals, counts = [], []
    for _ in borders:
        totals.append(read_leb128(reader))
        counts.append(read_leb128(reader))
    totals.append(left - sum(totals))
    counts.append(count - sum(counts))
    if not all(0 <= n <= total for n, total in zip(counts, totals, strict=True)):
        raise Undecodable("classes of fewer elements than changes")
    return _Layout(Classes(dtype, tuple(borders), active), totals, counts)


def _number_below(reader: Reader, limit: int) -> int:
    number = read_leb128(reader)
    if number >= limit:
        raise Undecodable(f"{number} classes, where {limit} are the most")
    return number


def _read_steps(reader: Reader, layout: _Layout, width: int) -> SplitSteps:
    """Class after class."""
    count = sum(layout.counts)
    down = packed_bits(reader, count)
    limit = (1 << (8 * width - 1)) - 1  # a step goes half way round at most
    beyond = np.zeros(count, f"<u{width}")
    end = 0
    for n in layout.counts:
        start, end = end, end + n
        if n:
            longer = _decode_set(reader, read_leb128(reader), n)
            lengths = golomb.decode(reader, longer.size, limit)
            beyond[start:end][longer] = lengths + np.uint64(1)
    return SplitSteps(down, beyond)


def _read_sets(reader: Reader, layout: _Layout) -> Ranks:
    """The ranks of the changed elements in their classes, class after class."""
    pairs = zip(layout.counts, layout.totals, strict=True)
    return np.concatenate([_decode_set(reader, n, total) for n, total in pairs]).astype(np.uint32)


def _read_positions(reader: Reader, layout: _Layout, base: Bits) -> tuple[Positions, Positions]:
    """Positions, rising, and each one's place class after class."""
    ranks = _read_sets(reader, layout)
    positions, order = layout.classes.select(base, ranks, np.array(layout.counts))
    if positions.size != ranks.size:
        raise Undecodable("the classes have other elements than were counted: another base")
    return positions, order
