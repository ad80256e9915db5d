"""What all live weights of a rank add up to, read through its map: of each tensor, and of the rest.

Nothing is written, so it may be done while the model computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deltactl.vllm.layout.regions import Region, region
from deltactl.vllm.layout.weight_map import WeightMap
from deltactl.vllm.staging import live_weights

_FAR = 1 << 40  # elements, more than any storage has


def owned_sums(weight_map: WeightMap, names: Iterable[str] | None = None) -> dict[str, int]:
    """For each mapped tensor the touch sum, modulo 2^64, of all elements that this rank owns, for
    each copy of them that there is, less that of the copies that it holds. Over all ranks they add
    up to the sum over the whole tensor, if all copies are equal."""
    found = {}
    for name in weight_map.tensors if names is None else names:
        mapped = weight_map.tensors[name]
        found[name] = sum(
            (owned or -1) * live_weights.region_sum(weight_map.storages[one.storage], one)
            for one, owned in zip(mapped.regions, mapped.owned, strict=True)
        ) % (1 << 64)
    return found


def rest_sum(weight_map: WeightMap) -> int:
    """The touch sum, modulo 2^64, of all elements of parameters that no mapped tensor reaches, by
    where they lie: padding, what a layer made of its weights, unmapped tensors. What is written
    through the map does not change it."""
    reached: dict[int, list[Region]] = {}
    for mapped in weight_map.tensors.values():
        for one in mapped.regions:
            if one.count:
                reached.setdefault(one.storage, []).append(one)
    total = 0
    for number, storage in enumerate(weight_map.storages):
        known, whole = reached.get(number, []), storage.bits.numel()
        if not storage.parameter or sum(one.count for one in known) == whole:
            continue
        total += live_weights.region_sum(storage, _in_place(number, 0, [(whole, 1)]))
        for one in known:
            axes = list(zip(one.shape, one.strides, strict=True))
            total -= live_weights.region_sum(storage, _in_place(number, one.offset, axes))
    return total % (1 << 64)


def _in_place(number: int, offset: int, axes: Sequence[tuple[int, int]]) -> Region:
    """Elements of a storage, each with its place in it for an index, apart from other storages'."""
    both = [(n, step, step) for n, step in axes]
    placed = region(number, number * _FAR + offset, offset, both)
    assert placed is not None  # such a region is one already
    return placed
