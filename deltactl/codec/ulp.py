"""``ulp``: gaps between changed elements, and steps in units in the last place against the base.

Given the base a changed weight is nearly always one step up or down, so the step costs a bit or two
where the value costs its whole width.

One part, ``.ulp``, U8: a directory of two little-endian u32 a block (changes, bytes), then the
blocks' bytes in order. A block with n > 0 changes is: the stream of n gaps; the signs of the steps,
n bits, 1 for down; a u32, how many steps are longer than one unit; the stream of the gaps between
those; the stream of their lengths less two. Streams: codec.integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltactl.codec import integers
from deltactl.codec.base import EncodedBlock, Part, StoredPart, Target
from deltactl.codec.bits import (
    Bits,
    Places,
    Positions,
    Runs,
    SplitSteps,
    split_steps,
    take_split_steps,
)
from deltactl.codec.blocks import StoredBlocks, blocks_part
from deltactl.core import native
from deltactl.core.dtypes import element_bytes
from deltactl.files.atomic import Spool

_PIECE = 1 << 16  # positions or steps that are made together


class Ulp:
    """Gaps and steps."""

    name = "ulp"
    suffixes: tuple[str, ...] = (".ulp",)
    dense_if_smaller = True
    needs_base = False

    def encode(
        self, base: Bits, positions: Positions, before: Bits, after: Bits, dtype: str
    ) -> tuple[bytes, ...]:
        return (encode_ulp(positions, *split_steps(before, after, dtype)),)

    def parts(
        self, target: Target, blocks: Sequence[EncodedBlock], spool: Spool
    ) -> tuple[Part, ...]:
        return blocks_part(".ulp", target, blocks, spool)

    def decoder(self, target: Target, parts: Mapping[str, StoredPart]) -> UlpDecoder:
        return UlpDecoder(target, parts[".ulp"])


class UlpDecoder(StoredBlocks):
    """Decodes a block's bytes; the base is only needed to take the steps."""

    needs_base = False

    def steps(self, number: int, length: int) -> SplitSteps:
        """The steps of a block of ``length`` elements, whose positions are checked and not kept.
        Raises Malformed."""
        with self.open(number, length) as (reader, count):
            return steps_of_ulp(reader, count, length, self.target.dtype)

    def places(self, number: int, length: int) -> Places:
        """Where a block of ``length`` elements changes, rising; its steps are not looked at.
        Raises Malformed."""
        with self.open(number, length) as (reader, count):
            places = _read_places(reader, count, length)
            reader.take(reader.left)
            return places

    def block(self, number: int, base: Bits) -> SteppedBits:
        with self.open(number, base.size) as (reader, count):
            return decode_ulp(reader, count, base.size, self.target.dtype)


@dataclass(frozen=True, slots=True)
class SteppedBits:
    """Changes that say how far the bits go from where they are, in units in the last place."""

    runs: Runs
    steps: SplitSteps
    dtype: str

    @property
    def positions(self) -> Positions:
        """See BlockChanges."""
        return self.runs.rising()

    def within(self, start: int, length: int) -> Positions:
        """See BlockChanges."""
        return self.runs.within(start, length)

    def new_bits(self, before: Bits) -> Bits:
        """See BlockChanges."""
        if self.runs.sizes.size == 1:
            after, at = before.copy(), np.arange(before.size, dtype=np.uint32)
            take_split_steps(after, 0, Runs.one(at), self.steps, self.dtype)
            return after
        positions = self.positions
        block = np.empty(int(positions[-1]) + 1, before.dtype)
        block[positions] = before
        self.put(block, 0)
        return block.take(positions)

    def put(self, elements: Bits, start: int) -> None:
        """See BlockChanges."""
        take_split_steps(elements, start, self.runs, self.steps, self.dtype)


def encode_ulp(positions: Positions, steps: SplitSteps, longer: Positions) -> bytes:
    """A block with changes; ``longer``: which of the steps are longer than one unit."""
    return integers.encode(gaps_of(positions)) + _encode_steps(steps, longer)


def decode_ulp(reader: integers.Reader, count: int, length: int, dtype: str) -> SteppedBits:
    """A block of ``length`` elements, ``count`` of which change. Raises Undecodable."""
    places = _read_places(reader, count, length)
    return SteppedBits(Runs.one(places), _decode_steps(reader, count, dtype), dtype)


def steps_of_ulp(reader: integers.Reader, count: int, length: int, dtype: str) -> SplitSteps:
    """The same without the places, which are checked. Raises Undecodable."""
    _read_gaps(reader, count, length)
    return _decode_steps(reader, count, dtype)


def gaps_of(positions: Positions) -> npt.NDArray[np.uint32]:
    """Rising positions, shape (n,), below 2^31, as gaps to the one before; the first to -1."""
    if native.KERNEL is not None:
        return native.KERNEL.gaps(positions)
    at = positions.astype(np.int32)
    gaps = np.empty(at.size, np.int32)
    if at.size:
        gaps[0] = at[0]
        np.subtract(at[1:], at[:-1], out=gaps[1:])
        gaps[1:] -= 1
    return gaps.view(np.uint32)


def _encode_steps(steps: SplitSteps, longer: Positions) -> bytes:
    lengths = steps.beyond.take(longer)
    return b"".join(
        [
            steps.down.tobytes(),
            longer.size.to_bytes(4, "little"),
            integers.encode(gaps_of(longer)),
            integers.encode(lengths - lengths.dtype.type(1)),
        ]
    )


def _decode_steps(reader: integers.Reader, count: int, dtype: str) -> SplitSteps:
    width = element_bytes(dtype)
    if not count:
        return SplitSteps(np.empty(0, np.uint8), np.empty(0, f"<u{width}"))
    down = integers.packed_bits(reader, count)
    number = reader.number()
    longer = np.zeros(count, np.bool_)
    for _, at in _positions(_read_gaps(reader, number, count)):
        longer[at] = True
    beyond = np.zeros(count, f"<u{width}")
    integers.decode(reader, beyond[:number], longest(width))
    spread(beyond, longer)
    return SplitSteps(down, beyond)


def longest(width: int) -> int:
    """Above all lengths of steps less two, in elements of ``width`` bytes: a step goes half way
    round at most."""
    return (1 << (8 * width - 1)) - 1


def spread(beyond: Bits, longer: npt.NDArray[np.bool_]) -> None:
    """Make of the lengths less two, which lie at the front, the lengths less one where ``longer``,
    of the same shape (n,), marks them, and 0 elsewhere.

    In place, from the last on, as none lies before where it was.
    """
    left = int(np.count_nonzero(longer))
    for start in reversed(range(0, longer.size, _PIECE)):
        at = np.flatnonzero(longer[start : start + _PIECE])
        lengths = beyond[left - at.size : left].copy()
        left -= at.size
        part = beyond[start : start + _PIECE]
        part[:] = 0
        part[at] = lengths + lengths.dtype.type(1)


def _read_places(reader: integers.Reader, count: int, length: int) -> Places:
    places = _read_gaps(reader, count, length)
    for start, at in _positions(places):
        places[start : start + at.size] = at
    return places


def _read_gaps(reader: integers.Reader, count: int, length: int) -> npt.NDArray[np.uint32]:
    """The gaps between ``count`` strictly rising positions below ``length``, shape (count,).

    Raises Undecodable.
    """
    if count > length:  # before memory is taken for them
        raise integers.Undecodable(f"{count} positions do not fit {length} elements")
    gaps = np.empty(count, np.uint32)
    integers.decode(reader, gaps, max(length, 1))
    last = int(gaps.sum(dtype=np.uint64)) + count - 1
    if count and last >= length:
        raise integers.Undecodable(f"position {last} is past {length} elements")
    return gaps


def _positions(gaps: npt.NDArray[np.uint32]) -> Iterator[tuple[int, Positions]]:
    """The positions that gaps lead to, some at a time, and the place of their first one."""
    before = -1
    for start in range(0, gaps.size, _PIECE):
        at = np.cumsum(gaps[start : start + _PIECE].astype(np.int64) + 1)
        at += before
        before = int(at[-1])
        yield start, at
