"""Where the elements of a checkpoint tensor lie in live storages, as rectangular copies.

A *source* position is the flat index of an element in its checkpoint tensor, in units of its own
width; a *runtime* position is the flat index in the whole storage of a live parameter. numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]

Part = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Elements of one tensor: offset, shape and strides, outermost first. Plain, to be sent about."""

Axis = tuple[int, int, int]
"""One dimension of a copy: its size, the stride in the source, and in the target."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A checkpoint tensor: ``dtype`` is a safetensors code, ``shape`` in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Region:
    """One copy: for each index i below ``shape``, element ``source_offset + sum(i *
    source_strides)`` of the checkpoint tensor lies at ``offset + sum(i * strides)`` of the storage
    numbered ``storage``.

    Source strides fall, and no two indices share a source position. Made by ``regions.region``.
    """

    storage: int
    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many elements it covers."""
        return prod(self.shape)

    @property
    def source(self) -> Part:
        """The elements of the checkpoint tensor that it covers."""
        axes = [(n, s, 0) for n, s in zip(self.shape, self.source_strides, strict=True)]
        return self.source_offset, *_columns(_joined(axes, both=False))[:2]

    @property
    def is_run(self) -> bool:
        """Whether neighbours in the checkpoint are neighbours in the storage, all through."""
        return self.source_strides == self.strides == (1,)


def region(storage: int, source_offset: int, offset: int, axes: Iterable[Axis]) -> Region | None:
    """The copy with these axes in its simplest form. None where one element would go to, or come
    from, two places, or where the axes are entangled so that positions cannot be told apart."""
    kept = sorted((axis for axis in axes if axis[0] != 1), key=lambda axis: -axis[1])
    if not _apart([(n, s) for n, s, _ in kept]):
        return None
    if not _apart(sorted(((n, d) for n, _, d in kept), key=lambda axis: -axis[1])):
        return None
    shape, source_strides, strides = _columns(_joined(kept, both=True) or [(1, 1, 1)])
    return Region(storage, shape, source_offset, source_strides, offset, strides)


def _apart(axes: Sequence[tuple[int, int]]) -> bool:
    """Whether each stride, largest first, is beyond all that the smaller ones reach together."""
    reach = 0
    for size, stride in reversed(axes):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _joined(axes: Sequence[Axis], *, both: bool) -> list[Axis]:
    """With axes made one that are one run in the source, and in the target too if ``both``."""
    found: list[Axis] = []
    for size, source, target in axes:
        if found:
            outer, outer_source, outer_target = found[-1]
            if outer_source == size * source and (not both or outer_target == size * target):
                found[-1] = (outer * size, source, target)
                continue
        found.append((size, source, target))
    return found


def _columns(
    axes: Sequence[Axis],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return (
        tuple(size for size, _, _ in axes),
        tuple(source for _, source, _ in axes),
        tuple(target for _, _, target in axes),
    )


@dataclass(frozen=True, slots=True)
class Located:
    """Those of the positions asked for that one region holds.

    ``positions``: in the storage numbered ``storage``, int64, in the order asked for (so rising
    only where the region keeps order). ``chosen``: which of those asked for, to index with.
    """

    region: int
    storage: int
    positions: Positions
    chosen: slice | Positions


@dataclass(slots=True)
class MappedTensor:
    """A checkpoint tensor and the copies that its loader makes of it on this rank.

    ``owned``: for each region how often this rank adds it to sums over ranks; see ``ownership``.
    """

    spec: TensorSpec
    regions: tuple[Region, ...]
    owned: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        self.owned = self.owned or (1,) * len(self.regions)

    @property
    def count(self) -> int:
        """Elements covered, twice where they are copied to two places."""
        return sum(region.count for region in self.regions)

    def locate(self, positions: Positions) -> list[Located]:
        """Where elements at rising source positions, shape (n,), lie on this rank: an entry for
        each region that holds any. A position may be in none (another rank has it) or several."""
        found = (self._in_region(at, positions) for at in range(len(self.regions)))
        return [located for located in found if located is not None]

    def _in_region(self, at: int, positions: Positions) -> Located | None:
        region = self.regions[at]
        axes = list(zip(region.shape, region.source_strides, region.strides, strict=True))
        reach = sum((n - 1) * source for n, source, _ in axes)
        first, end = np.searchsorted(
            positions, (region.source_offset, region.source_offset + reach + 1)
        )
        if first == end:
            return None
        rest = positions[first:end] - region.source_offset
        if region.is_run:
            rest += region.offset
            return Located(at, region.storage, rest, slice(int(first), int(end)))
        target = np.full(rest.size, region.offset, np.int64)
        inside = np.ones(rest.size, np.bool_)
        for n, source, stride in axes:
            index = rest // source
            inside &= index < n
            rest -= index * source
            index *= stride
            target += index
        inside &= rest == 0
        if inside.all():
            return Located(at, region.storage, target, slice(int(first), int(end)))
        chosen = np.flatnonzero(inside)
        if not chosen.size:
            return None
        return Located(at, region.storage, target[chosen], chosen + first)


def pieces(whole: Region, most: int) -> Iterator[Region]:
    """The region in parts of at most ``most`` elements, in order."""
    if whole.count <= most:
        yield whole
        return
    size, *inner = whole.shape
    rows = max(1, most // prod(inner))
    for at in range(0, size, rows):
        n = min(rows, size - at)
        outer = n > 1 or not inner
        part = Region(
            whole.storage,
            (n, *inner) if outer else tuple(inner),
            whole.source_offset + at * whole.source_strides[0],
            whole.source_strides if outer else whole.source_strides[1:],
            whole.offset + at * whole.strides[0],
            whole.strides if outer else whole.strides[1:],
        )
        yield from pieces(part, most) if not outer else (part,)
