"""Elements of a block in classes of their exponent, and ranks within a class.

How likely an element changes follows from its exponent: an update of a given size crosses a
rounding border the more often the finer the grid there is. Within a class all are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltactl.codec.bits import Bits, Positions
from deltactl.core import native
from deltactl.core.dtypes import FLOATS
from deltactl.core.native import ClassScan

Ranks = npt.NDArray[np.uint32]
Counts = npt.NDArray[Any]

SEGMENT_BITS = 10
SEGMENT = 1 << SEGMENT_BITS
"""Elements of a segment: where none of them changes the whole of it may be left out."""

MOST_CLASSES = 256


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

    def _members(self, bits: Bits) -> list[Positions]:
        """The positions of each class's elements: what the kernel does without."""
        of_each = self._table().take(exponents(bits, self.dtype))
        active = np.repeat(self.active, SEGMENT)[: bits.size] != 0
        return [np.flatnonzero((of_each == k) & active) for k in range(self.count)]

    def ranks(self, bits: Bits, positions: Positions) -> tuple[Ranks, Positions, Counts, Counts]:
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
    ) -> tuple[Ranks, Positions, Counts, Counts]:
        place = np.full(bits.size, -1, np.int64)
        place[positions] = np.arange(positions.size)
        members = self._members(bits)
        ranks = [np.flatnonzero(place.take(of_class) >= 0) for of_class in members]
        order = [place[m[r]] for m, r in zip(members, ranks, strict=True)]
        counts, totals = np.array([r.size for r in ranks]), np.array([m.size for m in members])
        return np.concatenate(ranks).astype(np.uint32), np.concatenate(order), counts, totals

    def select(self, bits: Bits, ranks: Ranks, counts: Counts) -> tuple[Positions, Positions]:
        """The inverse: positions, rising, and each one's place among ``ranks``.

        ``ranks``: class after class, strictly rising in each; ``counts``: how many each class has.
        Ranks that are not below a class's number of elements are not found.
        """
        starts = np.full(MOST_CLASSES + 1, ranks.size, np.int64)
        starts[: self.count] = np.cumsum(counts) - counts
        if native.KERNEL is not None:
            return native.KERNEL.class_select(self._scan(bits), ranks, starts)
        found, order = [], []
        for k, of_class in enumerate(self._members(bits)):
            of_ranks = np.arange(starts[k], starts[k + 1])
            of_ranks = of_ranks[ranks[of_ranks] < of_class.size]
            found.append(of_class[ranks[of_ranks]])
            order.append(of_ranks)
        positions, places = np.concatenate(found), np.concatenate(order)
        rising = np.argsort(positions)
        return positions.take(rising), places.take(rising)
