"""Regions of which much changes, and the comparison that tells them from those where little does.

Memory is a chunk's and what comes of it: wanted bits stay where they lie, mapped from a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deltactl.codec.bits import Bits, Positions, touch_sum
from deltactl.vllm.layout.regions import MappedTensor, Region, pieces
from deltactl.vllm.layout.weight_map import Storage
from deltactl.vllm.staging import live_weights

_CHUNK = 1 << 20  # elements that are read and compared together
_FEW = 32  # where one element in so many differs, or fewer, they are staged one by one


@dataclass(frozen=True, slots=True)
class Stretch:
    """A region to be written as a whole, from where the tensor's new bits lie.

    ``source``: those of the whole tensor, shape (elements,). ``old``: the bits that were found, of
    the region's shape, on the host; None where they were not kept.
    """

    storage: Storage
    region: Region
    source: Bits
    old: Bits | None

    @property
    def elements(self) -> int:
        return self.region.count

    @property
    def nbytes(self) -> int:
        """Memory that is held for it."""
        return 0 if self.old is None else self.old.nbytes

    def is_old(self) -> bool:
        """Whether the live bits are those that were found; True where those were not kept."""
        return self.old is None or self._holds(self.old)

    def is_new(self) -> bool:
        """Whether the live bits are those that are to be there."""
        return self._holds(part_of(self.source, self.region))

    def write_new(self) -> None:
        """Write the bits that are to be there."""
        live_weights.write_region(self.storage, self.region, self.source)

    def write_old(self) -> bool:
        """Write the bits that were found; False where they were not kept."""
        if self.old is not None:
            live_weights.write_region(self.storage, _alone(self.region), self.old.ravel())
        return self.old is not None

    def _holds(self, bits: Bits) -> bool:
        return np.array_equal(read(self.storage, self.region, bits.dtype), bits)


def read(storage: Storage, region: Region, dtype: np.dtype[Any]) -> Bits:
    """A region's live bits, of its shape."""
    found = np.empty(region.count, dtype)
    live_weights.read_region(storage, _alone(region), found)
    return found.reshape(region.shape)


def _alone(region: Region) -> Region:
    """The region as all there is of its tensor."""
    strides, step = [], 1
    for n in reversed(region.shape):
        strides.append(step)
        step *= n
    return replace(region, source_offset=0, source_strides=tuple(reversed(strides)))


def part_of(bits: Bits, region: Region) -> Bits:
    """A region's elements of a whole tensor's, shape (elements,); a view of the region's shape."""
    strides = [step * bits.itemsize for step in region.source_strides]
    rest = bits[region.source_offset :]
    return np.lib.stride_tricks.as_strided(rest, region.shape, strides, writeable=False)


@dataclass(frozen=True, slots=True)
class Scattered:
    """Elements to be written one by one, on the host: their storage's number, positions in it,
    rising, and bits before and after; all of shape (n,)."""

    storage: int
    positions: Positions
    old: Bits
    new: Bits


def differences(
    mapped: MappedTensor, storages: Sequence[Storage], wanted: Bits, *, keep_old: bool
) -> Iterator[Scattered | Stretch]:
    """Where the live bits of a tensor are others than ``wanted``, all of it, shape (elements,).

    Of a chunk in which few differ those, else the chunk as a whole; ``keep_old``: with its old
    bits.
    """
    for region in mapped.regions:
        storage = storages[region.storage]
        for chunk in pieces(region, _CHUNK):
            old, new = read(storage, chunk, wanted.dtype), part_of(wanted, chunk)
            differ = old != new
            count = np.count_nonzero(differ)
            if count * _FEW > chunk.count:
                yield Stretch(storage, chunk, wanted, old if keep_old else None)
            elif count:
                positions = _indices(chunk, chunk.offset, chunk.strides)[differ]
                order = np.argsort(positions)  # what lies transposed comes in another
                bits = old[differ][order], new[differ][order]
                yield Scattered(region.storage, positions[order], *bits)


def _indices(region: Region, offset: int, strides: Sequence[int]) -> Positions:
    """Where each element of a region is, of its shape."""
    found: Positions = np.full(region.shape, offset, np.int64)
    for axis, (n, stride) in enumerate(zip(region.shape, strides, strict=True)):
        along = [1] * len(region.shape)
        along[axis] = n
        found += (np.arange(n, dtype=np.int64) * stride).reshape(along)
    return found


def owned_sum(mapped: MappedTensor, bits: Bits) -> int:
    """The touch sum of a whole tensor's bits, shape (elements,), over what this rank owns."""
    total = 0
    for region, owned in zip(mapped.regions, mapped.owned, strict=True):
        for chunk in pieces(region, _CHUNK) if owned else ():
            index = _indices(chunk, chunk.source_offset, chunk.source_strides)
            total += touch_sum(index.ravel(), part_of(bits, chunk).ravel())
    return total % (1 << 64)


def owned_count(mapped: MappedTensor) -> int:
    """Elements that this rank owns of a tensor."""
    flags = zip(mapped.regions, mapped.owned, strict=True)
    return sum(region.count for region, owned in flags if owned)
