"""Tensors with addresses of their own and no memory behind them, and where they came from.

A loader that is only watched needs no weights: what it is fed, and what its copies give, lies in
reserved address space that nobody touches. So every element has an address that says which tensor
it is of, for as long as the recording lasts, whatever views are taken of it.
"""

from __future__ import annotations

import mmap
import sys
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from deltactl.vllm.layout.regions import Axis

_PIECE = 1 << 30  # bytes reserved at a time
_APART = 64  # bytes between two tensors, at least
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # no swap is set aside; mmap lacks the name


class Lost(Exception):
    """The elements can no longer be followed: the message says why, for a person."""


class Arena:
    """Gives out address space, zeros to whoever reads it; never the same address twice."""

    def __init__(self) -> None:
        self._piece = np.empty(0, np.uint8)
        self._used = 0
        self._held: list[npt.NDArray[np.uint8]] = []

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """``nbytes`` bytes at an address divisible by 64."""
        need = -(-nbytes // _APART) * _APART + _APART
        if self._used + need > self._piece.nbytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            self._piece = np.frombuffer(mmap.mmap(-1, max(_PIECE, need), flags=flags), np.uint8)
            self._held.append(self._piece)
            self._used = 0
        found = self._piece[self._used : self._used + nbytes]
        self._used += need
        return found


@dataclass(frozen=True, slots=True)
class Block:
    """Addresses of one checkpoint tensor, or of a copy that a loader made of a part of one.

    ``axes``: size, stride in the block and stride in the checkpoint tensor, in elements, the
    largest stride in the block first; they fill the block. ``source_offset``: which element of the
    checkpoint tensor is the block's first.
    """

    start: int
    stop: int
    name: str
    width: int
    source_offset: int
    axes: tuple[Axis, ...]

    def source_of(self, address: int, axes: Sequence[Axis]) -> tuple[int, list[Axis]]:
        """Offset and axes in the checkpoint tensor of a view of the block at ``address``. Axes:
        size, stride in the block, and some stride that goes along.

        Raises Lost where the view cuts across the way the block was copied.
        """
        offset, odd = divmod(address - self.start, self.width)
        if odd:
            raise Lost("the loader views it with elements cut apart")
        first, at = [], self.source_offset
        for _, stride, source in self.axes:
            index, offset = divmod(offset, stride)
            first.append(index)
            at += index * source
        room = [n - 1 - i for (n, _, _), i in zip(self.axes, first, strict=True)]
        found: list[Axis] = []
        for size, stride, along in axes:
            found += self._follow(size, stride, along, room)
        return at, found

    def _follow(self, size: int, stride: int, along: int, room: list[int]) -> list[Axis]:
        """One axis of a view as axes of the checkpoint tensor; takes from the ``room`` that is
        left along each of the block's axes."""
        if size == 1:
            return []
        steps, left = [], stride
        for _, own, _ in self.axes:
            step, left = divmod(left, own)
            steps.append(step)
        if all((size - 1) * step <= free for step, free in zip(steps, room, strict=True)):
            for k, step in enumerate(steps):
                room[k] -= (size - 1) * step
            source = sum(step * axis[2] for step, axis in zip(steps, self.axes, strict=True))
            return [(size, source, along)]
        inner = self._to_edge(stride)
        if inner is None or inner >= size or size % inner:
            raise Lost("the loader reshapes a copy of it across dimensions that it has swapped")
        outer = self._follow(size // inner, stride * inner, along * inner, room)
        return outer + self._follow(inner, stride, along, room)

    def _to_edge(self, stride: int) -> int | None:
        """How many steps of ``stride`` along one axis of the block lead to the next one's."""
        for (_, outer, _), (_, own, _) in pairwise(self.axes):
            if stride % own == 0 and stride < outer:
                return None if outer % stride else outer // stride
        return None


class Blocks:
    """Blocks by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        insort(self._starts, block.start)
        self._blocks[block.start] = block

    def find(self, address: int) -> Block | None:
        at = bisect_right(self._starts, address)
        if not at:
            return None
        block = self._blocks[self._starts[at - 1]]
        return block if address < block.stop else None
