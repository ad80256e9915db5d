"""``ulp``: gaps between changed elements, and steps in units in the last place against the base.

Given the base a changed weight is nearly always one step up or down, so the step costs a bit or two
where the value costs its whole width.

One part, ``.ulp``, U8: a directory of two little-endian u32 a block (changes, bytes), then the
blocks' bytes in order. A block with n > 0 changes is: the stream of n gaps; the signs of the steps,
n bits, 1 for down; a u32, how many steps are longer than one unit; the stream of the gaps between
those; the stream of their lengths less two. Streams: codec.integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltactl.codec import integers
from deltactl.codec.base import EncodedBlock, Part, StoredPart, Target, span
from deltactl.codec.bits import Bits, Positions, SplitSteps, split_steps, take_split_steps
from deltactl.codec.blocks import StoredBlocks, blocks_part
from deltactl.core import native
from deltactl.core.dtypes import element_bytes
from deltactl.files.atomic import Spool

_PIECE = 1 << 20  # positions that are made together
_FEW = 1 << 21  # longer steps whose positions and lengths are held; more are slower, and take less


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

    def block(self, number: int, base: Bits) -> SteppedBits:
        with self.open(number, base.size) as (reader, count):
            return decode_ulp(reader, count, base.size, self.target.dtype)


@dataclass(frozen=True, slots=True)
class SteppedBits:
    """Changes that say how far the bits go from where they are, in units in the last place."""

    positions: Positions
    steps: SplitSteps
    dtype: str

    def new_bits(self, before: Bits) -> Bits:
        """See BlockChanges."""
        after = before.copy()
        at = np.arange(after.size)
        take_split_steps(after, 0, at, self.steps, (0, after.size), self.dtype)
        return after

    def put(self, elements: Bits, start: int) -> None:
        """See BlockChanges."""
        within = span(self.positions, start, elements.size)
        take_split_steps(elements, start, self.positions, self.steps, within, self.dtype)


def encode_ulp(positions: Positions, steps: SplitSteps, longer: Positions) -> bytes:
    """A block with changes; ``longer``: which of the steps are longer than one unit."""
    return integers.encode(gaps_of(positions)) + _encode_steps(steps, longer)


def decode_ulp(reader: integers.Reader, count: int, length: int, dtype: str) -> SteppedBits:
    """A block of ``length`` elements, ``count`` of which change. Raises Undecodable.

    The positions, eight bytes each, are made last, from gaps of half that size: so all at once it
    takes little more than what it gives.
    """
    if count > length:
        raise integers.Undecodable(f"{count} positions do not fit {length} elements")
    positions = np.empty(count, np.int64)
    _read_gaps(reader, positions.view(np.uint32)[:count], length)
    steps = _decode_steps(reader, count, element_bytes(dtype))
    _from_gaps(positions)
    return SteppedBits(positions, steps, dtype)


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


def _decode_steps(reader: integers.Reader, count: int, width: int) -> SplitSteps:
    beyond = np.zeros(count, f"<u{width}")
    if not count:
        return SplitSteps(np.empty(0, np.uint8), beyond)
    down = integers.packed_bits(reader, count)
    number = reader.number()
    limit = (1 << (8 * width - 1)) - 1  # a step goes half way round at most; stored less 2
    if number <= _FEW:
        longer = _read_positions(reader, number, count)
        beyond[longer] = integers.decode(reader, number, limit) + np.uint64(1)
    else:
        marks = _read_marks(reader, number, count)
        integers.decode_into(reader, beyond, limit, marks)
        np.add(beyond, marks, out=beyond, casting="unsafe")
    return SplitSteps(down, beyond)


def _read_positions(reader: integers.Reader, count: int, length: int) -> Positions:
    """``count`` strictly rising positions below ``length``, shape (count,). Raises Undecodable."""
    if count > length:  # before memory is taken for them
        raise integers.Undecodable(f"{count} positions do not fit {length} elements")
    positions = np.empty(count, np.int64)
    _read_gaps(reader, positions.view(np.uint32)[:count], length)
    _from_gaps(positions)
    return positions


def _read_gaps(reader: integers.Reader, gaps: npt.NDArray[np.uint32], length: int) -> None:
    """The gaps between strictly rising positions below ``length``. Raises Undecodable."""
    integers.decode_into(reader, gaps, max(length, 1))
    last = int(gaps.sum(dtype=np.uint64)) + gaps.size - 1
    if gaps.size and last >= length:
        raise integers.Undecodable(f"position {last} is past {length} elements")


def _read_marks(reader: integers.Reader, count: int, length: int) -> npt.NDArray[np.bool_]:
    """Which of ``length`` things the next ``count`` positions mark. Raises Undecodable."""
    if count > length:  # before memory is taken for them
        raise integers.Undecodable(f"{count} positions do not fit {length} elements")
    gaps = np.empty(count, np.uint32)
    _read_gaps(reader, gaps, length)
    marks = np.zeros(length, np.bool_)
    before = -1
    for start in range(0, count, _PIECE):
        at = np.cumsum(gaps[start : start + _PIECE].astype(np.int64) + 1) + before
        marks[at] = True
        before = int(at[-1])
    return marks


def _from_gaps(positions: Positions) -> None:
    """Make positions of the gaps, u32, that lie in the first half of the same memory.

    From the last on, as each comes to lie where only gaps are that were looked at before it.
    """
    gaps = positions.view(np.uint32)[: positions.size]
    if positions.size <= _PIECE:
        positions[:] = np.cumsum(gaps.astype(np.int64) + 1) - 1
        return
    starts = range(0, positions.size, _PIECE)
    sums = [int((part := gaps[at : at + _PIECE]).sum(dtype=np.int64)) + part.size for at in starts]
    before = sum(sums) - 1
    for at, total in zip(reversed(starts), reversed(sums), strict=True):
        before -= total
        found = np.cumsum(gaps[at : at + _PIECE].astype(np.int64) + 1)
        found += before
        positions[at : at + _PIECE] = found
