"""A tensor's blocks in one part: a directory of two little-endian u32 a block, changes and bytes,
then the blocks' bytes in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from deltactl.codec.base import EncodedBlock, Part, StoredPart, Target, block_count
from deltactl.codec.integers import Reader, Undecodable
from deltactl.core.errors import Malformed
from deltactl.files.atomic import Spool


def blocks_part(
    suffix: str, target: Target, blocks: Sequence[EncodedBlock], spool: Spool
) -> tuple[Part, ...]:
    """The one part, from blocks of one stream each."""
    directory = np.zeros((block_count(target.elements), 2), "<u4")
    for block in blocks:
        directory[block.number] = (block.count, block.streams[0].size)
    size = directory.nbytes + int(directory[:, 1].sum(dtype=np.int64))
    return (Part(suffix, "U8", (size,), _pieces(directory, blocks, spool)),)


def _pieces(
    directory: npt.NDArray[np.uint32], blocks: Sequence[EncodedBlock], spool: Spool
) -> Iterator[bytes]:
    yield directory.tobytes()
    for block in blocks:
        yield spool.read(block.streams[0])


class StoredBlocks:
    """Reads the directory, checks that it fills the part, and gives a block's bytes on demand.

    ``count``: changes of all blocks. Raises Malformed.
    """

    def __init__(self, target: Target, part: StoredPart) -> None:
        self.target, self._data = target, part.data
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
        target = self.target
        return Malformed(what, file=target.file, tensor=target.name, expected=expected, found=found)

    def numbers(self) -> Sequence[int]:
        """The numbers of the blocks that have changes, rising."""
        return np.flatnonzero(self._directory[:, 0]).tolist()

    def count_in(self, number: int) -> int:
        """Changed elements of one block, as the directory says."""
        return int(self._directory[number, 0])

    @contextlib.contextmanager
    def open(self, number: int, length: int) -> Iterator[tuple[Reader, int]]:
        """A block's bytes, all of which are to be read while this is open, and its changes.

        ``length``: the block's elements. Raises Malformed for what is Undecodable meanwhile.
        """
        count, size = self._directory[number].tolist()
        end = int(self._ends[number])
        reader = Reader(self._data[end - size : end].data)
        try:
            if count > length:
                raise Undecodable(f"{count} changes do not fit {length} elements")
            yield reader, count
            if reader.at != size:
                raise Undecodable(f"{size - reader.at} bytes are left over")
        except Undecodable as error:
            raise self._malformed(f"block {number} cannot be decoded: {error}") from None
