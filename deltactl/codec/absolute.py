"""``raw`` and ``gap_delta``: TRL's encodings, positions and the new values as they are.

TRL's readers pass over every entry that is neither ``.idx`` nor ``.val`` without a word, so a
tensor that only changed its values is never carried whole here, however many they are.

Parts ``.idx`` and ``.val`` as in TRL's second dialect (huggingface/trl pull requests 5932 and
5937): raw indices are int32, int64 where the tensor has 2^31 elements or more; gaps are ``idx[k] -
idx[k-1] - 1`` with ``idx[-1] = -1``, U16, or for the whole tensor U32 or U64 where one gap needs
it. The first dialect's suffixes are read by format.trl, through the same decoder.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from deltactl.codec.base import (
    BLOCK,
    EncodedBlock,
    Part,
    StoredPart,
    Target,
    concatenated,
)
from deltactl.codec.bits import Bits, Positions, elements, span
from deltactl.core.dtypes import element_dtype
from deltactl.core.errors import Malformed
from deltactl.files.atomic import Spool

_NUMPY = {"I32": "<i4", "I64": "<i8", "U16": "<u2", "U32": "<u4", "U64": "<u8"}
_CHUNK = 1 << 20  # indices looked at together when a tensor's are checked


class _Absolute:
    """What both have in common: block streams are positions (u32) and new bits."""

    suffixes: tuple[str, ...] = (".idx", ".val")
    dense_if_smaller = False
    needs_base = False

    def encode(
        self, base: Bits, positions: Positions, before: Bits, after: Bits, dtype: str
    ) -> tuple[bytes, ...]:
        return positions.astype("<u4").tobytes(), after.tobytes()

    def _parts(
        self,
        target: Target,
        blocks: Sequence[EncodedBlock],
        spool: Spool,
        index_dtype: str,
        indices: Iterator[npt.NDArray[np.int64]],
    ) -> tuple[Part, ...]:
        count = sum(block.count for block in blocks)
        pieces = (index.astype(_NUMPY[index_dtype]).tobytes() for index in indices)
        return (
            Part(".idx", index_dtype, (count,), pieces),
            Part(".val", element_dtype(target.dtype), (count,), concatenated(spool, blocks, 1)),
        )


def _block_positions(spool: Spool, block: EncodedBlock) -> Positions:
    relative = np.frombuffer(spool.read(block.streams[0]), "<u4")
    return relative.astype(np.int64) + block.number * BLOCK


class Raw(_Absolute):
    """Indices as they are."""

    name = "raw"

    def parts(
        self, target: Target, blocks: Sequence[EncodedBlock], spool: Spool
    ) -> tuple[Part, ...]:
        dtype = index_dtype(target.elements)
        indices = (_block_positions(spool, block) for block in blocks)
        return self._parts(target, blocks, spool, dtype, indices)

    def decoder(self, target: Target, parts: Mapping[str, StoredPart]) -> AbsoluteDecoder:
        index = parts[".idx"]
        if index.dtype not in ("I32", "I64"):
            raise _bad_index_dtype(target, "I32 or I64", index.dtype)
        return AbsoluteDecoder(target, index, parts[".val"], gaps=False)


class GapDelta(_Absolute):
    """Indices as gaps to the one before."""

    name = "gap_delta"

    def parts(
        self, target: Target, blocks: Sequence[EncodedBlock], spool: Spool
    ) -> tuple[Part, ...]:
        widest = max((int(gaps.max()) for gaps in _gaps(spool, blocks)), default=0)
        dtype = gap_dtype(widest)
        return self._parts(target, blocks, spool, dtype, _gaps(spool, blocks))

    def decoder(self, target: Target, parts: Mapping[str, StoredPart]) -> AbsoluteDecoder:
        index = parts[".idx"]
        if index.dtype not in ("U16", "U32", "U64"):
            raise _bad_index_dtype(target, "U16, U32 or U64", index.dtype)
        return AbsoluteDecoder(target, index, parts[".val"], gaps=True)


def index_dtype(elements: int) -> str:
    """The dtype of raw indices into a tensor of ``elements`` elements."""
    return "I64" if elements >= 1 << 31 else "I32"


def gap_dtype(widest: int) -> str:
    """The dtype of gaps of which ``widest`` is the largest."""
    return "U16" if widest < 1 << 16 else "U32" if widest < 1 << 32 else "U64"


def _gaps(spool: Spool, blocks: Sequence[EncodedBlock]) -> Iterator[npt.NDArray[np.int64]]:
    before = -1
    for block in blocks:
        positions = _block_positions(spool, block)
        yield np.diff(positions, prepend=before) - 1
        before = int(positions[-1])


def _bad_index_dtype(target: Target, expected: str, found: str) -> Malformed:
    what = "the indices have a dtype that the encoding does not use"
    return Malformed(what, file=target.file, tensor=target.name, expected=expected, found=found)


class AbsoluteDecoder:
    """Checks once that indices rise and stay in the tensor, then finds each block's own."""

    needs_base = False

    def __init__(self, target: Target, index: StoredPart, value: StoredPart, *, gaps: bool) -> None:
        self._target, self._gaps = target, gaps
        self._index = index.data.view(_NUMPY[index.dtype])
        wanted = element_dtype(target.dtype)
        if value.dtype != wanted or value.shape != index.shape or len(value.shape) != 1:
            raise self._malformed(
                "the values do not fit the indices",
                f"{wanted} {list(index.shape)}",
                f"{value.dtype} {list(value.shape)}",
            )
        self._values = elements(value.data, target.dtype)
        self.count = self._index.size
        self._scan()

    def _malformed(self, what: str, expected: object, found: object) -> Malformed:
        target = self._target
        return Malformed(what, file=target.file, tensor=target.name, expected=expected, found=found)

    def _chunk(self, at: int, before: int) -> npt.NDArray[np.int64]:
        """Up to _CHUNK absolute indices from the ``at``-th on; ``before``: the index before it."""
        part = self._index[at : at + _CHUNK]
        if not self._gaps:
            if part.size and int(part.max()) >= self._target.elements:
                raise self._out_of_range(int(part.max()))
            return part.astype(np.int64)
        if part.size and int(part.max()) >= self._target.elements:
            raise self._out_of_range(int(part.max()))  # before a sum of such could wrap around
        indices = np.cumsum(part.astype(np.int64) + 1)
        indices += before
        return indices

    def _out_of_range(self, found: int) -> Malformed:
        return self._malformed("an index is out of range", f"< {self._target.elements}", found)

    def _scan(self) -> None:
        """Check all indices; note the index before each chunk, and where each block's own end.

        Only blocks that have any are kept: a table of all would be as large as a header claims.
        """
        self._before: list[int] = []
        counted: dict[int, int] = {}
        before = -1
        for at in range(0, self.count, _CHUNK):
            self._before.append(before)
            indices = self._chunk(at, before)
            if int(indices[-1]) >= self._target.elements:
                raise self._out_of_range(int(indices[-1]))
            if int(indices[0]) <= before or np.any(indices[1:] <= indices[:-1]):
                raise self._malformed("the indices do not rise", None, None)
            before = int(indices[-1])
            for number, count in zip(*np.unique(indices // BLOCK, return_counts=True), strict=True):
                counted[int(number)] = counted.get(int(number), 0) + int(count)
        self._numbers = list(counted)  # they rise, as the indices do
        self._ends = list(accumulate(counted.values(), initial=0))

    def _span(self, number: int) -> tuple[int, int]:
        """Where a block's changes begin and end among all."""
        at = bisect_left(self._numbers, number)
        found = at < len(self._numbers) and self._numbers[at] == number
        return self._ends[at], self._ends[at + found]

    def numbers(self) -> Sequence[int]:
        return self._numbers

    def count_in(self, number: int) -> int:
        start, stop = self._span(number)
        return stop - start

    def _positions(self, number: int) -> Positions:
        start, stop = self._span(number)
        if start == stop:
            return np.empty(0, np.int64)
        first, last = start // _CHUNK, (stop - 1) // _CHUNK
        chunks = [self._chunk(c * _CHUNK, self._before[c]) for c in range(first, last + 1)]
        found = np.concatenate(chunks)[start - first * _CHUNK : stop - first * _CHUNK]
        return found - number * BLOCK

    def block(self, number: int, base: Bits) -> NewBits:
        start, stop = self._span(number)
        return NewBits(self._positions(number), self._values[start:stop])


@dataclass(frozen=True, slots=True)
class NewBits:
    """Changes that say what the bits are afterwards."""

    positions: Positions
    bits: Bits

    def within(self, start: int, length: int) -> Positions:
        """See BlockChanges."""
        first, end = span(self.positions, start, length)
        return self.positions[first:end]

    def new_bits(self, before: Bits) -> Bits:
        """See BlockChanges."""
        return self.bits

    def put(self, elements: Bits, start: int) -> None:
        """See BlockChanges."""
        first, end = span(self.positions, start, elements.size)
        elements[self.positions[first:end] - start] = self.bits[first:end]
