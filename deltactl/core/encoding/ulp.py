"""``ulp``: gaps between changed elements, and steps in units in the last place against the base.

Given the base a changed weight is nearly always one step up or down, so the step costs a bit or two
where the value costs its whole width. Both streams are entropy-coded by pcodec, a block at a time.

One part, ``.ulp``, U8: a directory of three little-endian u32 a block (changes, bytes of gaps, bytes of
steps), then each block's two streams in order. Gaps are u32 within the block; steps are signed
integers of the element's width. A block without changes has three zeros and no streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

from deltactl.core.bits import Bits, Positions, element_bytes, steps_between, take_steps
from deltactl.core.encoding.base import (
    BLOCK,
    EncodedBlock,
    Part,
    StoredPart,
    Target,
    block_count,
)
from deltactl.core.errors import Malformed
from deltactl.core.files import Spool

# Gaps and steps are near to independent draws: no differences, no modes to look for. Level 8 costs as
# much time as 4 here, and levels above it save nothing.
_CONFIG = ChunkConfig(
    compression_level=8,
    delta_spec=DeltaSpec.no_op(),
    mode_spec=ModeSpec.classic(),
    enable_8_bit=True,
)


class Ulp:
    """Gaps and steps, each by pcodec."""

    name = "ulp"
    suffixes: tuple[str, ...] = (".ulp",)

    def encode(self, positions: Positions, old: Bits, new: Bits, dtype: str) -> tuple[bytes, ...]:
        at = positions.astype(np.int32)
        gaps = np.empty(at.size, np.int32)
        gaps[0] = at[0]
        np.subtract(at[1:], at[:-1] + 1, out=gaps[1:])
        steps = steps_between(old, new, dtype)
        return (
            standalone.simple_compress(gaps.view(np.uint32), _CONFIG),
            standalone.simple_compress(steps, _CONFIG),
        )

    def parts(
        self, target: Target, blocks: Sequence[EncodedBlock], spool: Spool
    ) -> tuple[Part, ...]:
        directory = np.zeros((block_count(target.elements), 3), "<u4")
        for block in blocks:
            directory[block.number] = (block.count, *(stream.size for stream in block.streams))
        size = directory.nbytes + int(directory[:, 1:].sum(dtype=np.int64))
        return (Part(".ulp", "U8", (size,), self._pieces(directory, blocks, spool)),)

    @staticmethod
    def _pieces(
        directory: npt.NDArray[np.uint32], blocks: Sequence[EncodedBlock], spool: Spool
    ) -> Iterator[bytes]:
        yield directory.tobytes()
        for block in blocks:
            for stream in block.streams:
                yield spool.read(stream)

    def decoder(self, target: Target, parts: Mapping[str, StoredPart]) -> UlpDecoder:
        return UlpDecoder(target, parts[".ulp"])


class UlpDecoder:
    """Reads the directory, checks that it fills the part, and decodes a block's streams on demand."""

    def __init__(self, target: Target, part: StoredPart) -> None:
        self._target, self._data = target, part.data
        blocks = block_count(target.elements)
        head = 12 * blocks
        if part.dtype != "U8" or part.data.size < head:
            raise self._malformed("the directory of blocks is cut short", head, part.data.size)
        self._directory = part.data[:head].view("<u4").reshape(blocks, 3).astype(np.int64)
        sizes = self._directory[:, 1:].ravel()
        self._ends = head + np.cumsum(sizes)
        end = int(self._ends[-1]) if blocks else head
        if end != part.data.size:
            raise self._malformed("the blocks do not fill the tensor's part", end, part.data.size)
        self.count = int(self._directory[:, 0].sum())

    def _malformed(self, what: str, expected: object = None, found: object = None) -> Malformed:
        target = self._target
        return Malformed(
            what, file=target.file, tensor=target.name, expected=expected, found=found
        )

    def _stream(self, number: int, which: int, dtype: str) -> npt.NDArray[Any]:
        count = int(self._directory[number, 0])
        end = int(self._ends[2 * number + which])
        start = end - int(self._directory[number, 1 + which])
        values = np.empty(count, dtype)
        try:
            progress = standalone.simple_decompress_into(self._data[start:end].tobytes(), values)
        except (RuntimeError, TypeError, ValueError) as error:
            raise self._malformed(f"block {number} cannot be decoded ({error})") from None
        except BaseException as error:  # a panic in the codec's own code is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise self._malformed(f"block {number} cannot be decoded ({error})") from None
        if progress.n_processed != count or not progress.finished:
            what = f"block {number} holds another number of changes than its directory says"
            raise self._malformed(what, count, progress.n_processed)
        return values

    def positions(self, number: int, length: int) -> Positions:
        count = int(self._directory[number, 0])
        if count > length:
            raise self._malformed(f"block {number} has more changes than elements", length, count)
        if not count:
            if self._directory[number].any():
                raise self._malformed(f"block {number} has streams but no changes")
            return np.empty(0, np.int64)
        # No sum can wrap: at most 2^22 gaps of less than 2^32.
        found = np.cumsum(self._stream(number, 0, "<u4").astype(np.int64) + 1) - 1
        if int(found[-1]) >= length:
            what = f"a position in block {number} is out of range"
            raise self._malformed(what, f"< {length}", int(found[-1]))
        return found

    def block(self, number: int, base: Bits) -> tuple[Positions, Bits]:
        positions = self.positions(number, base.size)
        if not positions.size:
            return positions, np.empty(0, base.dtype)
        steps = self._stream(number, 1, f"<i{element_bytes(self._target.dtype)}")
        return positions, take_steps(base[positions], steps, self._target.dtype)


assert BLOCK < 1 << 31  # positions within a block fit an int32
