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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from deltactl.codec import golomb
from deltactl.codec.base import EncodedBlock, Part, StoredPart, Target
from deltactl.codec.bits import Bits, Places, Positions, Runs, SplitSteps, split_steps
from deltactl.codec.blocks import StoredBlocks, blocks_part
from deltactl.codec.classes import MOST_CLASSES, SEGMENT, Classes
from deltactl.codec.golomb import leb128, read_leb128
from deltactl.codec.grouping import choose_borders, silent_segments
from deltactl.codec.integers import Flags, Reader, Undecodable, packed_bits
from deltactl.codec.ulp import (
    SteppedBits,
    decode_ulp,
    encode_ulp,
    gaps_of,
    longest,
    spread,
    steps_of_ulp,
)
from deltactl.core.dtypes import FLOATS, element_bytes
from deltactl.files.atomic import Spool

_AS_ULP, _BY_CLASSES, _WITHOUT_SILENT = 0, 1, 2
_PIECE = 1 << 16  # members of a set that are found together
_FEW = 1 << 21  # changes of which a second copy is little


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


def _stored(reader: Reader, count: int, total: int) -> Iterator[Positions]:
    """What is stored of a set of ``count`` of ``total``: strictly rising positions below ``total``,
    some at a time; those of the others where these are fewer. Raises Undecodable."""
    if count > total:
        raise Undecodable(f"a set of {count} among {total}")
    return _rising(golomb.pieces(reader, min(count, total - count), total + 1), total)


def _rising(gaps: Iterator[golomb.U64], total: int) -> Iterator[Positions]:
    before = -1
    for piece in gaps:
        at = np.cumsum(piece.view(np.int64) + 1)
        at += before
        before = int(at[-1])
        if before >= total:
            raise Undecodable(f"position {before} is past {total} of a set")
        yield at


def _read_marks(reader: Reader, count: int, total: int) -> Flags:
    """A set, as a mark on each of its members, shape (total,). Raises Undecodable."""
    stored, others = _stored(reader, count, total), 2 * count > total
    marks = np.full(total, others)
    for at in stored:
        marks[at] = not others
    return marks


def _read_members(reader: Reader, total: int, members: Places) -> None:
    """Put the members of a set, rising, in place: shape (count,). Raises Undecodable."""
    end = 0
    for at in _members(reader, members.size, total):
        start, end = end, end + at.size
        members[start:end] = at


def _members(reader: Reader, count: int, total: int) -> Iterator[Positions]:
    if 2 * count <= total:
        yield from _stored(reader, count, total)
        return
    marks = _read_marks(reader, count, total)
    for start in range(0, total, _PIECE):
        yield np.flatnonzero(marks[start : start + _PIECE]) + start


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
                return steps_of_ulp(reader, count, length, dtype)
            layout = _read_layout(reader, form, count, length, dtype)
            steps = _read_steps(reader, layout, element_bytes(dtype))
            for n, total in zip(layout.counts, layout.totals, strict=True):
                for _ in _stored(reader, n, total):
                    pass
            return steps

    def block(self, number: int, base: Bits) -> SteppedBits:
        dtype = self.target.dtype
        with self.open(number, base.size) as (reader, count):
            form = reader.take(1)[0] if count else _AS_ULP
            if form == _AS_ULP:
                return decode_ulp(reader, count, base.size, dtype)
            layout = _read_layout(reader, form, count, base.size, dtype)
            steps = _read_steps(reader, layout, element_bytes(dtype))
            return _stepped(_read_ranks(reader, layout), steps, layout, base)


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
        active[_read_marks(reader, read_leb128(reader), active.size)] = 0
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
    beyond = np.zeros(count, f"<u{width}")
    end = 0
    for n in layout.counts:
        start, end = end, end + n
        if n:
            number = read_leb128(reader)
            longer = _read_marks(reader, number, n)
            golomb.decode(reader, beyond[start : start + number], longest(width))
            spread(beyond[start:end], longer)
    return SplitSteps(down, beyond)


def _read_ranks(reader: Reader, layout: _Layout) -> Places:
    """Which elements of their classes change, class after class."""
    ranks = np.empty(sum(layout.counts), np.uint32)
    end = 0
    for n, total in zip(layout.counts, layout.totals, strict=True):
        start, end = end, end + n
        _read_members(reader, total, ranks[start:end])
    return ranks


def _stepped(ranks: Places, steps: SplitSteps, layout: _Layout, base: Bits) -> SteppedBits:
    """The changes, by position where they are not too many for a copy of them to be made: so they
    are quicker to use. ``ranks`` become the positions."""
    dtype, counts = layout.classes.dtype, np.array(layout.counts)
    order = np.empty(ranks.size, np.uint32) if ranks.size <= _FEW else None
    if layout.classes.select(base, ranks, counts, order) != ranks.size:
        raise Undecodable("the classes have other elements than were counted: another base")
    if order is None:
        return SteppedBits(Runs(ranks, counts), steps, dtype)
    down = np.unpackbits(steps.down, count=ranks.size, bitorder="little").take(order)
    in_order = SplitSteps(np.packbits(down, bitorder="little"), steps.beyond.take(order))
    return SteppedBits(Runs.one(ranks.take(order)), in_order, dtype)
