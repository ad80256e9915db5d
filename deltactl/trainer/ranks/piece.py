"""Which elements of a tensor a rank holds, and where they lie in the whole.

A distributed tensor is cut along its dimensions, one cut after the other, as ``torch.chunk`` cuts:
into parts of equal size, the last shorter or empty. So what a rank holds of it is, along each
dimension, one or more ranges of indices, and all their combinations.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from deltactl.codec.bits import Bits, Positions
from deltactl.core.errors import Unsupported

Ranges = tuple[tuple[int, int], ...]
"""Rising ranges of indices, each from its first to past its last."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor of this ``shape``: ``held``, by dimension, are the indices that it has."""

    shape: tuple[int, ...]
    held: tuple[Ranges, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part by itself."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.held)

    @property
    def elements(self) -> int:
        return prod(self.local_shape)

    def positions(self, local: Positions) -> Positions:
        """Where elements of the part lie in the whole: both row-major, rising, shape (k,)."""
        whole = [((0, length),) for length in self.shape[1:]]
        if not self.shape or (len(self.held[0]) == 1 and list(self.held[1:]) == whole):
            return local + (self.held[0][0][0] * prod(self.shape[1:]) if self.shape else 0)
        found = np.zeros(local.size, np.int64)
        for at, indices, length in zip(
            np.unravel_index(local, self.local_shape), self._indices(), self.shape, strict=True
        ):
            found *= length
            found += indices[at]
        return found

    def put(self, whole: Bits, part: Bits) -> None:
        """Put the part's elements, shape (n,), to their places among all, shape (m,)."""
        whole.reshape(self.shape)[self._places()] = part.reshape(self.local_shape)

    def take(self, whole: Bits) -> Bits:
        """The part's elements among all; a copy."""
        return np.ascontiguousarray(whole.reshape(self.shape)[self._places()]).reshape(-1)

    def _indices(self) -> list[npt.NDArray[np.int64]]:
        return [
            np.concatenate([np.empty(0, np.int64), *(np.arange(*span) for span in ranges)])
            for ranges in self.held
        ]

    def _places(self) -> tuple[Any, ...]:
        if all(len(ranges) == 1 for ranges in self.held):
            return tuple(slice(*ranges[0]) for ranges in self.held)
        return np.ix_(*self._indices())


def whole_of(shape: tuple[int, ...]) -> Piece:
    """All of a tensor."""
    return Piece(shape, tuple(((0, length),) for length in shape))


def piece_of(tensor: torch.Tensor) -> Piece | None:
    """What this rank holds of a tensor; all, of one that is not distributed; None where it is
    distributed over other ranks.

    Raises Unsupported for placements that say nothing of where elements are (sums to be made yet).
    """
    found = whole_of(tuple(tensor.shape))
    if not isinstance(tensor, DTensor):
        return found
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    held = list(found.held)
    for dim in _order(tensor):
        cut = _cuts(tensor.placements[dim])
        if cut is not None:
            held[cut] = _cut(held[cut], mesh.size(dim), coordinate[dim])
    piece = Piece(found.shape, tuple(held))
    if piece.local_shape != tuple(local_of(tensor).shape):
        raise _unknown(tensor)
    return piece


def is_spread(model: torch.nn.Module) -> bool:
    """Whether a model's parameters are distributed over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that this rank holds, by themselves; no communication."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local().detach()  # no parameter, which is never empty


_LATER = "_StridedShard"
"""Torch's kind of Shard for what FSDP makes of a tensor that tensor parallelism has cut in the same
dimension: it cuts what later dimensions of the mesh have left, in ``split_factor`` parts."""


def _cuts(placement: Any) -> int | None:
    """Which dimension of the tensor a placement cuts."""
    is_cut = isinstance(placement, Shard) or type(placement).__name__ == _LATER
    return int(placement.dim) if is_cut else None


def _order(tensor: DTensor) -> list[int]:
    """The dimensions of the mesh in the order in which they cut."""
    dims = range(len(tensor.placements))
    later = [d for d in dims if type(tensor.placements[d]).__name__ == _LATER]
    for d in dims:
        known = type(tensor.placements[d]) in (Shard, Replicate)
        if not known and not (d in later and _is_after_all(tensor, d)):
            raise _unknown(tensor)
    return [d for d in dims if d not in later] + later[::-1]


def _is_after_all(tensor: DTensor, dim: int) -> bool:
    placement: Any = tensor.placements[dim]
    sizes = [
        tensor.device_mesh.size(d)
        for d in range(dim + 1, len(tensor.placements))
        if _cuts(tensor.placements[d]) == placement.dim
    ]
    return int(placement.split_factor) == prod(sizes)


def _unknown(tensor: DTensor) -> Unsupported:
    return Unsupported(
        "a tensor that is distributed in this way cannot be published",
        expected="Shard and Replicate",
        found=str(tensor.placements),
    )


def _cut(ranges: Ranges, count: int, number: int) -> Ranges:
    """One of ``count`` parts of the indices in these ranges."""
    total = sum(stop - start for start, stop in ranges)
    size = -(-total // count)
    first, last = min(number * size, total), min((number + 1) * size, total)
    found, at = [], 0
    for start, stop in ranges:
        begin, end = max(first - at, 0), min(last - at, stop - start)
        if begin < end:
            found.append((start + begin, start + end))
        at += stop - start
    return tuple(found)
