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

import numpy as np
import numpy.typing as npt

from deltactl.core.bits import Bits, Positions, Steps, element_bytes, steps_between, take_steps
from deltactl.core.encoding import integers
from deltactl.core.encoding.base import (
    EncodedBlock,
    Part,
    StoredPart,
    Target,
    block_count,
)
from deltactl.core.errors import Malformed
from deltactl.core.files import Spool


class Ulp:
    """Gaps and steps."""

    name = "ulp"
    suffixes: tuple[str, ...] = (".ulp",)
    dense_if_smaller = True

    def encode(self, positions: Positions, old: Bits, new: Bits, dtype: str) -> tuple[bytes, ...]:
        steps = steps_between(old, new, dtype)
        return (integers.encode(_gaps(positions)) + _encode_steps(steps),)

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


def _gaps(positions: Positions) -> npt.NDArray[np.uint32]:
    """Rising positions, shape (n,), below 2^31, as gaps to the one before; the first to -1."""
    at = positions.astype(np.int32)
    gaps = np.empty(at.size, np.int32)
    if at.size:
        gaps[0] = at[0]
        np.subtract(at[1:], at[:-1], out=gaps[1:])
        gaps[1:] -= 1
    return gaps.view(np.uint32)


def _encode_steps(steps: Steps) -> bytes:
    down = steps < 0
    beyond = np.abs(steps).view(f"<u{steps.itemsize}")  # as unsigned, right for the lowest step too
    beyond -= beyond.dtype.type(1)
    longer = np.flatnonzero(beyond != 0)
    return b"".join(
        [
            np.packbits(down, bitorder="little").tobytes(),
            longer.size.to_bytes(4, "little"),
            integers.encode(_gaps(longer)),
            integers.encode(beyond.take(longer) - beyond.dtype.type(1)),
        ]
    )


def _decode_steps(reader: integers.Reader, count: int, width: int) -> Steps:
    signs = np.frombuffer(reader.take(-(-count // 8)), np.uint8)
    down = np.unpackbits(signs, count=count, bitorder="little").view(np.bool_)
    beyond = np.zeros(count, f"<u{width}")
    longer = _decode_positions(reader, reader.number(), count)
    lengths = integers.decode(reader, longer.size)
    if lengths.size and int(lengths.max()) >= (1 << (8 * width - 1)) - 1:
        raise integers.Undecodable(f"a step is longer than elements of {width} bytes allow")
    beyond[longer] = lengths + np.uint64(1)
    steps = beyond.view(f"<i{width}")
    return np.where(down, ~steps, steps + steps.dtype.type(1))


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

    def positions(self, number: int, length: int) -> Positions:
        return self._open(number, length)[1]

    def steps(self, number: int, length: int) -> tuple[Positions, Steps]:
        """A block's positions and steps; ``length``: its elements. Raises Malformed."""
        reader, positions = self._open(number, length)
        width = element_bytes(self._target.dtype)
        if not positions.size:
            return positions, np.empty(0, f"<i{width}")
        try:
            steps = _decode_steps(reader, positions.size, width)
            if reader.at != len(reader.data):
                raise integers.Undecodable("bytes are left over")
        except integers.Undecodable as error:
            raise self._undecodable(number, error) from None
        return positions, steps

    def block(self, number: int, base: Bits) -> tuple[Positions, Bits]:
        positions, steps = self.steps(number, base.size)
        return positions, take_steps(base[positions], steps, self._target.dtype)
