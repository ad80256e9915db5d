"""Elements of a block in classes of their exponent, and ranks within a class.

How likely an element changes follows from its exponent: an update of a given size crosses a
rounding border the more often the finer the grid there is. Within a class all are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltactl.codec.bits import Bits, Places, Positions
from deltactl.core import native
from deltactl.core.dtypes import FLOATS
from deltactl.core.native import ClassScan

Counts = npt.NDArray[Any]

SEGMENT_BITS = 10
SEGMENT = 1 << SEGMENT_BITS
"""Elements of a segment: where none of them changes the whole of it may be left out."""

MOST_CLASSES = 256

_PIECE = 1 << 18  # elements looked at together, whole segments of them


def exponents(bits: Bits, dtype: str) -> npt.NDArray[np.int64]:
    """The exponent fields of elements, shape (n,)."""
    layout, kind = FLOATS[dtype], bits.dtype.type
    shifted = bits >> kind(layout.mantissa)
    found: npt.NDArray[np.int64] = (shifted & kind(layout.highest)).astype(np.int64)
    return found


@dataclass(frozen=True, slots=True)
class Classes:
    """Which class each element of a block is in.

    ``borders``: exponents, strictly rising and above 0, at each of which a class begins.
    ``active``: u8 a segment, 0 where its elements are in no class.
    """

    dtype: str
    borders: tuple[int, ...]
    active: npt.NDArray[np.uint8]

    @property
    def count(self) -> int:
        return len(self.borders) + 1

    def _table(self) -> npt.NDArray[np.uint8]:
        """The class of each exponent."""
        every = np.arange(FLOATS[self.dtype].highest + 1)
        return np.searchsorted(self.borders, every, side="right").astype(np.uint8)

    def _scan(self, bits: Bits) -> ClassScan:
        layout, table = FLOATS[self.dtype], self._table()
        return ClassScan(bits, layout.mantissa, layout.highest, table, self.active, SEGMENT_BITS)

    def _members(self, bits: Bits, start: int, stop: int) -> list[Positions]:
        """The positions of each class's elements from ``start``, which a segment begins at, to
        before ``stop``: what the kernel does without."""
        piece = bits[start:stop]
        of_each = self._table().take(exponents(piece, self.dtype))
        active = np.repeat(self.active[start // SEGMENT : -(-stop // SEGMENT)], SEGMENT) != 0
        active = active[: piece.size]
        return [np.flatnonzero((of_each == k) & active) + start for k in range(self.count)]

    def ranks(self, bits: Bits, positions: Positions) -> tuple[Places, Positions, Counts, Counts]:
        """Where changed elements stand in their classes.

        ``positions``: rising, in active segments, shape (n,). Returns, both of shape (n,) and class
        after class, each one's rank in its class and its place among ``positions``; then, a number
        a class, how many there are and how many elements the class has.
        """
        if native.KERNEL is None:
            return self._ranks_by_numpy(bits, positions)
        ranks, of_each, totals = native.KERNEL.class_ranks(self._scan(bits), positions)
        order = np.argsort(of_each, kind="stable")
        counts = np.bincount(of_each, minlength=self.count)
        return ranks.take(order), order, counts, totals[: self.count]

    def _ranks_by_numpy(
        self, bits: Bits, positions: Positions
    ) -> tuple[Places, Positions, Counts, Counts]:
        place = np.full(bits.size, -1, np.int64)
        place[positions] = np.arange(positions.size)
        members = self._members(bits, 0, bits.size)
        ranks = [np.flatnonzero(place.take(of_class) >= 0) for of_class in members]
        order = [place[m[r]] for m, r in zip(members, ranks, strict=True)]
        counts, totals = np.array([r.size for r in ranks]), np.array([m.size for m in members])
        return np.concatenate(ranks).astype(np.uint32), np.concatenate(order), counts, totals

    def select(self, bits: Bits, ranks: Places, counts: Counts, order: Places | None = None) -> int:
        """The inverse: make ranks the positions of the elements that have them, in place.

        ``ranks``: class after class, strictly rising in each, shape (n,); ``counts``: how many each
        class has; ``order``: if given, of the same shape, gets their places by rising position.
        Returns how many elements were found: n, but where a rank is not below its class's number of
        elements, and then what is in both means nothing.
        """
        starts = np.full(MOST_CLASSES + 1, ranks.size, np.int64)
        starts[: self.count] = np.cumsum(counts) - counts
        if native.KERNEL is not None:
            return native.KERNEL.class_select(self._scan(bits), ranks, starts, order)
        found = self._select_by_numpy(bits, ranks, starts)
        if order is not None:
            order[:] = np.argsort(ranks)
        return found

    def _select_by_numpy(self, bits: Bits, ranks: Places, starts: Counts) -> int:
        seen, done = [0] * self.count, starts[: self.count].tolist()
        for start in range(0, bits.size, _PIECE):
            for k, members in enumerate(self._members(bits, start, start + _PIECE)):
                left = ranks[done[k] : starts[k + 1]]
                here = int(np.searchsorted(left, ranks.dtype.type(seen[k] + members.size)))
                left[:here] = members[left[:here] - np.uint32(seen[k])]
                seen[k], done[k] = seen[k] + members.size, done[k] + here
        return int(sum(done) - starts[: self.count].sum())
