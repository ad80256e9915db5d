"""Ranks without a server: live storages that hold slices of a checkpoint, and their maps.

A tensor's name says how its ranks hold it: ``rows`` and ``columns`` are sliced, ``turned`` is
transposed and every rank has all of it, as of ``norm``; of ``twice`` each rank has two copies. Rows
and columns are fused into one storage each with what is not the checkpoint's between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from deltactl.vllm.layout.ownership import owners
from deltactl.vllm.layout.regions import MappedTensor, Region, TensorSpec, region
from deltactl.vllm.layout.weight_map import Storage, WeightMap
from tests.support.adversarial import unsigned
from tests.support.checkpoints import Spec

GAP = 5
"""Elements before and after each tensor in a storage."""

FILL = 0x5A


class Rank:
    """One rank's live weights: ``map``, over storages that ``memory`` gives the bytes of."""

    def __init__(self, tensors: Mapping[str, Spec], rank: int, world: int) -> None:
        self._layout: list[tuple[str, list[Region]]] = []
        self.memory: list[np.ndarray[Any, Any]] = []
        for name, (dtype, shape, _) in tensors.items():
            self._layout.append((name, self._place(name, dtype, shape, rank, world)))
        storages = tuple(
            Storage(f"storage {n}", torch.from_numpy(bits.view(_signed(bits.dtype))))
            for n, bits in enumerate(self.memory)
        )
        mapped = {
            name: MappedTensor(TensorSpec(name, *tensors[name][:2]), tuple(regions))
            for name, regions in self._layout
        }
        self.map = WeightMap(storages, mapped, (), {})

    def _place(
        self, name: str, dtype: str, shape: tuple[int, ...], rank: int, world: int
    ) -> list[Region]:
        kind = name.split(".")[0]
        if kind in ("norm", "twice"):
            count = prod(shape)
            copies = 2 if kind == "twice" else 1
            return [self._region(dtype, 0, [(count, 1, 1)]) for _ in range(copies)]
        rows, columns = shape
        if kind == "turned":
            return [self._region(dtype, 0, [(rows, columns, 1), (columns, 1, rows)])]
        if kind == "rows":
            part = rows // world
            return [self._region(dtype, rank * part * columns, [(part * columns, 1, 1)])]
        part = columns // world
        return [self._region(dtype, rank * part, [(rows, columns, part), (part, 1, 1)])]

    def _region(self, dtype: str, source: int, axes: list[tuple[int, int, int]]) -> Region:
        size = prod(n for n, _, _ in axes) + 2 * GAP
        memory = np.full(size * unsigned(dtype).itemsize, FILL, np.uint8)
        self.memory.append(memory.view(unsigned(dtype)))
        made = region(len(self.memory) - 1, source, GAP, axes)
        assert made is not None
        return made

    def load(self, tensors: Mapping[str, Spec]) -> None:
        """Write this rank's parts of a checkpoint."""
        for one, (live, whole) in self._views(tensors):
            del one
            live[...] = whole

    def holds(self, tensors: Mapping[str, Spec]) -> bool:
        """Whether the live bits are exactly the checkpoint's, and nothing else has been touched."""
        copies = [memory.copy() for memory in self.memory]
        for bits in copies:
            bits.view(np.uint8)[:] = FILL
        for one, (live, whole) in self._views(tensors):
            if not np.array_equal(live, whole):
                return False
            _view(copies[one.storage], one.shape, one.offset, one.strides)[...] = whole
        return all(map(np.array_equal, self.memory, copies))

    def _views(self, tensors: Mapping[str, Spec]) -> Any:
        for name, regions in self._layout:
            dtype, _, data = tensors[name]
            bits = np.frombuffer(data, unsigned(dtype))
            for one in regions:
                live = _view(self.memory[one.storage], one.shape, one.offset, one.strides)
                yield one, (live, _view(bits, one.shape, one.source_offset, one.source_strides))


def _view(bits: Any, shape: Sequence[int], offset: int, strides: Sequence[int]) -> Any:
    steps = [step * bits.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(bits[offset:], shape, steps)


def _signed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.uint8 if dtype.itemsize == 1 else f"<i{dtype.itemsize}")


def make_ranks(tensors: Mapping[str, Spec], world: int = 1) -> list[Rank]:
    """Ranks that hold these tensors, settled among them as to who owns what."""
    ranks = [Rank(tensors, rank, world) for rank in range(world)]
    agreed = owners([rank.map.summary() for rank in ranks])
    for number, rank in enumerate(ranks):
        rank.map.settle(agreed, number)
        rank.map.unproven.clear()  # as the sums of what was loaded would show
        rank.load(tensors)
        assert rank.holds(tensors)
        assert not rank.map.unmapped
    return ranks
