"""``ulp``: gaps between changed elements, and steps in units in the last place against the base.

Given the base a changed weight is nearly always one step up or down, so the step costs a bit or two
where the value costs its whole width.

One part, ``.ulp``, U8: a directory of two little-endian u32 a block (changes, bytes), then the
blocks' bytes in order. A block with n > 0 changes is: the stream of n gaps; the signs of the steps,
n bits, 1 for down; a u32, how many steps are longer than one unit; the stream of the gaps between
those; the stream of their lengths less two. Streams: core.encoding.integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltactl.core import native
from deltactl.core.bits import (
    Bits,
    Positions,
    SplitSteps,
    element_bytes,
    split_steps,
    take_split_steps,
)
from deltactl.core.encoding import integers
from deltactl.core.encoding.base import (
    EncodedBlock,
    Part,
    StoredPart,
    Target,
    block_count,
    span,
)
from deltactl.core.errors import Malformed
from deltactl.core.files import Spool


class Ulp:
    """Gaps and steps."""

    name = "ulp"
    suffixes: tuple[str, ...] = (".ulp",)
    dense_if_smaller = True

    def encode(
        self, base: Bits, positions: Positions, before: Bits, after: Bits, dtype: str
    ) -> tuple[bytes, ...]:
        gaps = integers.encode(gaps_of(positions))
        return (gaps + _encode_steps(*split_steps(before, after, dtype)),)

    def parts(
        self, target: Target, blocks: Sequence[EncodedBlock], spool: Spool
    ) -> tuple[Part, ...]:
        directory = np.zeros((block_count(target.elements), 2), "<u4")
        for block in blocks:
            directory[block.number] = (block.count, block.streams[0].size)
        size = directory.nbytes + int(directory[:, 1].sum(dtype=np.int64))
        return (Part(".ulp", "U8", (size,), self._pieces(directory, blocks, spool)),)

    @staticmethod
    def _pieces(
        directory: npt.NDArray[np.uint32], blocks: Sequence[EncodedBlock], spool: Spool
    ) -> Iterator[bytes]:
        yield directory.tobytes()
        for block in blocks:
            yield spool.read(block.streams[0])

    def decoder(self, target: Target, parts: Mapping[str, StoredPart]) -> UlpDecoder:
        return UlpDecoder(target, parts[".ulp"])


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


def _encode_steps(steps: SplitSteps, count: int) -> bytes:
    longer = np.flatnonzero(steps.beyond)
    lengths = steps.beyond.take(longer)
    return b"".join(
        [
            steps.down.tobytes(),
            count.to_bytes(4, "little"),
            integers.encode(gaps_of(longer)),
            integers.encode(lengths - lengths.dtype.type(1)),
        ]
    )


def _decode_steps(reader: integers.Reader, count: int, width: int) -> SplitSteps:
    down = np.frombuffer(reader.take(-(-count // 8)), np.uint8)
    beyond = np.zeros(count, f"<u{width}")
    longer = _decode_positions(reader, reader.number(), count)
    lengths = integers.decode(reader, longer.size)
    if lengths.size and int(lengths.max()) >= (1 << (8 * width - 1)) - 1:
        raise integers.Undecodable(f"a step is longer than elements of {width} bytes allow")
    beyond[longer] = lengths + np.uint64(1)
    return SplitSteps(down, beyond)


def _decode_positions(reader: integers.Reader, count: int, length: int) -> Positions:
    """``count`` strictly rising positions below ``length``, shape (count,). Raises Undecodable."""
    if count > length:
        raise integers.Undecodable(f"{count} positions do not fit {length} elements")
    gaps = integers.decode(reader, count)
    if count and int(gaps.max()) >= length:  # before a sum of such could wrap around
        raise integers.Undecodable(f"a gap of {int(gaps.max())} leaves {length} elements")
    positions = np.cumsum(gaps.view(np.int64) + 1) - 1
    if count and int(positions[-1]) >= length:
        raise integers.Undecodable(f"position {int(positions[-1])} is past {length} elements")
    return positions


class UlpDecoder:
    """Reads the directory, checks that it fills the part, and decodes a block's bytes on demand."""

    needs_base = False

    def __init__(self, target: Target, part: StoredPart) -> None:
        self._target, self._data = target, part.data
        blocks = block_count(target.elements)
        head = 8 * blocks
        if part.dtype != "U8" or part.data.size < head:
            raise self._malformed("the directory of blocks is cut short", head, part.data.size)
        self._directory = part.data[:head].view("<u4").reshape(blocks, 2).astype(np.int64)
        self._ends = head + np.cumsum(self._directory[:, 1])
        end = int(self._ends[-1]) if blocks else head
        if end != part.data.size:
            raise self._malformed("the blocks do not fill the tensor's part", end, part.data.size)
        self.count = int(self._directory[:, 0].sum())

    def _malformed(self, what: str, expected: object = None, found: object = None) -> Malformed:
        target = self._target
        return Malformed(what, file=target.file, tensor=target.name, expected=expected, found=found)

    def _open(self, number: int, length: int) -> tuple[integers.Reader, Positions]:
        """A block's reader, after its positions have been read."""
        count, size = self._directory[number].tolist()
        end = int(self._ends[number])
        reader = integers.Reader(self._data[end - size : end].data)
        try:
            if size and not count:
                raise integers.Undecodable("there are bytes but no changes")
            return reader, _decode_positions(reader, count, length)
        except integers.Undecodable as error:
            raise self._undecodable(number, error) from None

    def _undecodable(self, number: int, error: integers.Undecodable) -> Malformed:
        return self._malformed(f"block {number} cannot be decoded: {error}")

    def numbers(self) -> Sequence[int]:
        return np.flatnonzero(self._directory[:, 0]).tolist()

    def block(self, number: int, base: Bits) -> SteppedBits:
        reader, positions = self._open(number, base.size)
        dtype = self._target.dtype
        width = element_bytes(dtype)
        if not positions.size:
            none = SplitSteps(np.empty(0, np.uint8), np.empty(0, f"<u{width}"))
            return SteppedBits(positions, none, dtype)
        try:
            steps = _decode_steps(reader, positions.size, width)
            if reader.at != len(reader.data):
                raise integers.Undecodable("bytes are left over")
        except integers.Undecodable as error:
            raise self._undecodable(number, error) from None
        return SteppedBits(positions, steps, dtype)


@dataclass(frozen=True, slots=True)
class SteppedBits:
    """Changes that say how far the bits go from where they are, in units in the last place."""

    positions: Positions
    steps: SplitSteps
    dtype: str

    def put(self, elements: Bits, start: int) -> None:
        """See BlockChanges."""
        within = span(self.positions, start, elements.size)
        take_split_steps(elements, start, self.positions, self.steps, within, self.dtype)
