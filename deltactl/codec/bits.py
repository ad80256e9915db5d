"""Tensors as bit patterns: elements, changed positions, units in the last place, touch sums.

Elements are unsigned integers (core.dtypes). No float operation is used anywhere: NaN payloads,
-0.0 and denormals are bits like others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltactl.core import native
from deltactl.core.dtypes import FLOATS, element_bytes

Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[Any]
"""Elements: <u1, <u2, <u4 or <u8."""

Steps = npt.NDArray[Any]
"""Steps in units in the last place: <i1, <i2, <i4 or <i8."""

Positions = npt.NDArray[np.int64]

Places = npt.NDArray[np.uint32]
"""Positions in a block, as they are held where there may be millions."""

_UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
_SIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype("<i1"),
    2: np.dtype("<i2"),
    4: np.dtype("<i4"),
    8: np.dtype("<i8"),
}


def elements(data: Bytes, dtype: str) -> Bits:
    """The bytes of a tensor, shape (n,), as elements, shape (n / width,); a view."""
    return data.view(_UNSIGNED[element_bytes(dtype)])


def positions_of(mask: npt.NDArray[np.bool_]) -> Positions:
    """Positions, rising, at which a contiguous mask of shape (n,) is true.

    Quick where few are: most groups of eight hold none, and most groups of eight such groups few.
    """
    whole = mask.size // 64 * 64
    groups = mask[:whole].view(np.uint64)
    found = _expand(groups, _expand((groups != 0).view(np.uint64), None))
    if whole != mask.size:
        found = np.concatenate([found, np.flatnonzero(mask[whole:]) + whole])
    return found


def _expand(groups: npt.NDArray[np.uint64], hit: Positions | None) -> Positions:
    """Positions of the true bools in groups of eight; ``hit``: the groups that have any."""
    if hit is None:
        hit = np.flatnonzero(groups != 0)
    inner = np.flatnonzero(groups.take(hit).view(np.bool_))
    return (hit.take(inner >> 3) << 3) + (inner & 7)


def _ordered(bits: Bits, dtype: str) -> Bits:
    """Map bits to unsigned integers that rise with the value; its inverse is ``_unordered``.

    Negative floats are complemented, others get the top bit set: -0.0 and +0.0 are neighbours, and
    so are the largest finite number and infinity. Integers stay as they are.
    """
    if dtype not in FLOATS:
        return bits
    width = bits.dtype.itemsize
    negative: Bits = (bits.view(_SIGNED[width]) >> (8 * width - 1)).view(bits.dtype)
    ordered: Bits = bits ^ (negative | bits.dtype.type(1 << (8 * width - 1)))
    return ordered


def _unordered(order: Bits, dtype: str) -> Bits:
    if dtype not in FLOATS:
        return order
    width = order.dtype.itemsize
    positive: Bits = (order.view(_SIGNED[width]) >> (8 * width - 1)).view(order.dtype)
    bits: Bits = order ^ (~positive | order.dtype.type(1 << (8 * width - 1)))
    return bits


def steps_between(old: Bits, new: Bits, dtype: str) -> Steps:
    """Signed steps in units in the last place from ``old`` to ``new``, modulo 2^width.

    Shape and width as the inputs'. For integer types, the difference.
    """
    width = old.dtype.itemsize
    return (_ordered(new, dtype) - _ordered(old, dtype)).view(_SIGNED[width])


def take_steps(old: Bits, steps: Steps, dtype: str) -> Bits:
    """The bits that ``steps`` lead to from ``old``; the inverse of ``steps_between``."""
    return _unordered(_ordered(old, dtype) + steps.view(old.dtype), dtype)


@dataclass(frozen=True, slots=True)
class SplitSteps:
    """Steps that are not 0, shape (n,), as they are stored. ``down``: a bit each, 1 for down,
    packed from the lowest bit on; ``beyond``: the length less one, as wide as the elements."""

    down: Bytes
    beyond: Bits

    def joined(self, first: int, end: int) -> Steps:
        """The signed steps from the ``first``-th up to the ``end``-th."""
        steps = self.beyond[first:end].view(_SIGNED[self.beyond.itemsize])
        packed = self.down[first // 8 : -(-end // 8)]
        down = np.unpackbits(packed, bitorder="little")[first % 8 :][: steps.size]
        return np.where(down.view(np.bool_), ~steps, steps + steps.dtype.type(1))

    def pieces(self) -> Iterator[Steps]:
        """All of them, joined some at a time."""
        for first in range(0, self.beyond.size, _PIECE):
            yield self.joined(first, first + _PIECE)


def split_steps(before: Bits, after: Bits, dtype: str) -> tuple[SplitSteps, Positions]:
    """The steps between elements that differ, and which of them are longer than one unit."""
    if native.KERNEL is not None:
        down, beyond, longer = native.KERNEL.steps(before, after, dtype in FLOATS)
        return SplitSteps(down, beyond), longer
    steps = steps_between(before, after, dtype)
    beyond = np.abs(steps).view(before.dtype)  # as unsigned, right for the lowest step too
    beyond -= beyond.dtype.type(1)
    found = SplitSteps(np.packbits(steps < 0, bitorder="little"), beyond)
    return found, np.flatnonzero(beyond)


def span(positions: Positions | Places, start: int, length: int) -> tuple[int, int]:
    """Which of rising positions lie in ``length`` elements from ``start`` on: first and end."""
    borders = np.array((start, start + length), positions.dtype)  # of another they are copied
    first, end = np.searchsorted(positions, borders)
    return int(first), int(end)


@dataclass(frozen=True, slots=True)
class Runs:
    """Places of a block, shape (n,), in runs that each rise strictly; ``sizes``: how many places
    each run has, int64. No place is in two of them."""

    places: Places
    sizes: npt.NDArray[np.int64]

    @classmethod
    def one(cls, places: Places) -> Runs:
        """Of places all of which rise."""
        return cls(places, np.array([places.size]))

    def spans(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        """Of each run the places in ``length`` elements from ``start`` on: first and end."""
        at = 0
        for size in self.sizes.tolist():
            first, end = span(self.places[at : at + size], start, length)
            yield at + first, at + end
            at += size

    def within(self, start: int, length: int) -> Positions:
        """All places in ``length`` elements from ``start`` on, run after run."""
        found = [self.places[first:end] for first, end in self.spans(start, length)]
        return np.concatenate(found).astype(np.int64)

    def rising(self) -> Positions:
        """All places in order."""
        if self.sizes.size == 1:
            return self.places.astype(np.int64)
        marks = np.zeros(int(self.places.max(initial=0)) + 1, np.bool_)
        marks[self.places] = True
        return positions_of(marks)


def take_split_steps(elements: Bits, start: int, runs: Runs, steps: SplitSteps, dtype: str) -> None:
    """Take the steps at those places that are among the elements, in place.

    ``elements``: those from position ``start`` on, shape (n,), contiguous. ``steps``: one for each
    place of ``runs``.
    """
    if native.KERNEL is not None:
        native.KERNEL.take_steps(
            elements, start, runs.places, runs.sizes, steps.down, steps.beyond, dtype in FLOATS
        )
        return
    for first, end in runs.spans(start, elements.size):
        at = runs.places[first:end].astype(np.int64) - start
        elements[at] = take_steps(elements[at], steps.joined(first, end), dtype)


_MIX_INDEX = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix64(index: npt.NDArray[np.uint64], bits: Bits) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each (index, bits) pair, shape as the inputs'.

    ``index * 0x9E3779B97F4A7C15 + bits`` through the finalizer of SplitMix64 (Steele, Lea and Flood
    2014, "Fast splittable pseudorandom number generators"), all modulo 2^64.
    """
    z = index * _MIX_INDEX
    z += bits
    z ^= z >> np.uint64(30)
    z *= _MIX_1
    z ^= z >> np.uint64(27)
    z *= _MIX_2
    z ^= z >> np.uint64(31)
    return z


_PIECE = 1 << 15  # elements looked at together: less costs more calls, more leaves the cache


def touch_sum(positions: Positions, bits: Bits, index: int = 0) -> int:
    """``sum mix64(index + position, bits) mod 2^64``: the same in any order, and sums of parts add
    up. ``index``: that in the tensor of the element at position 0."""
    if native.KERNEL is not None:
        return native.KERNEL.touch_sum(positions, bits, index)
    at = positions.view(np.uint64)
    total = 0
    for i in range(0, at.size, _PIECE):
        mixed = mix64(at[i : i + _PIECE] + np.uint64(index), bits[i : i + _PIECE])
        total += int(mixed.sum(dtype=np.uint64))
    return total % (1 << 64)


def touch_sum_of_all(bits: Bits, index: int = 0) -> int:
    """The touch sum of elements that lie one after another, the first at ``index`` of its tensor.

    Over all of a tensor it says what the tensor holds to whoever has it in another layout.
    """
    at = np.arange(min(bits.size, _PIECE))
    total = 0
    for i in range(0, bits.size, _PIECE):
        piece = bits[i : i + _PIECE]
        total += touch_sum(at[: piece.size], piece, index + i)
    return total % (1 << 64)


@dataclass(frozen=True, slots=True)
class Changes:
    """Where two runs of elements differ: positions, rising, and the bits before and after, all of
    shape (k,), and the touch sums of both."""

    positions: Positions
    before: Bits
    after: Bits
    old_sum: int
    new_sum: int


def changes_between(old: Bits, new: Bits, first: int, index: int) -> Changes:
    """The changes between elements of shape (n,), the first of which is at position ``first`` of
    its block, and at ``index`` of its tensor."""
    if native.KERNEL is not None:
        return Changes(*native.KERNEL.compare(old, new, first, index))
    positions = positions_of(old != new)
    before, after = old.take(positions), new.take(positions)
    sums = touch_sum(positions, before, index), touch_sum(positions, after, index)
    return Changes(positions + first, before, after, *sums)
