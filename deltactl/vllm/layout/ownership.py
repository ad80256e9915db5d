"""Which rank answers for which part of a tensor, so that sums over ranks add up to the tensor's.

Ranks hold slices of some tensors and whole copies of others. Of equal parts the lowest rank owns
the first, and knows how many there are. Sums over owned parts of all ranks then count each element
of the checkpoint once; where the owner's count for all copies and the copies are taken off again,
they do so only if all copies are equal. Where
parts overlap without being equal, or leave elements out, nothing can be said, and the tensor is
unmapped on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from deltactl.vllm.layout.regions import Part

Box = tuple[tuple[int, int], ...]
"""First and end index along each dimension of a tensor."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What one rank knows, plain enough to be sent to the others.

    ``held``: name -> shape of the checkpoint tensor, source parts of its regions in order.
    """

    held: Mapping[str, tuple[tuple[int, ...], tuple[Part, ...]]]
    ignored: tuple[str, ...]
    unmapped: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ownership:
    """What all ranks agree on. ``owned``: for each rank, name -> of each region that it owns how
    many equal ones there are, itself among them, and 0 for one that it does not own.
    ``unmapped``: name -> why. ``ignored``: by every rank."""

    owned: tuple[Mapping[str, tuple[int, ...]], ...]
    ignored: tuple[str, ...]
    unmapped: Mapping[str, str]


def owners(ranks: Sequence[Summary]) -> Ownership:
    """Settle who owns what; ``ranks`` in order of rank. The same answer on every rank."""
    unmapped: dict[str, str] = {}
    owned: tuple[dict[str, tuple[int, ...]], ...] = tuple({} for _ in ranks)
    for at, rank in enumerate(ranks):
        for name, why in rank.unmapped.items():
            unmapped.setdefault(name, why if len(ranks) == 1 else f"{why} (rank {at})")
    names = dict.fromkeys(name for rank in ranks for name in rank.held)
    for name in names:
        if name in unmapped:
            continue
        holders = {at: rank.held[name] for at, rank in enumerate(ranks) if name in rank.held}
        flags, trouble = _settle(holders)
        if trouble is not None:
            unmapped[name] = trouble
            continue
        for at, mine in flags.items():
            owned[at][name] = mine
    ignored = dict.fromkeys(name for rank in ranks for name in rank.ignored)
    left = tuple(name for name in ignored if name not in names and name not in unmapped)
    return Ownership(owned, left, unmapped)


def _settle(
    holders: Mapping[int, tuple[tuple[int, ...], tuple[Part, ...]]],
) -> tuple[dict[int, tuple[int, ...]], str | None]:
    (shape, *others) = {shape for shape, _ in holders.values()}
    if others:
        return {}, "ranks were given other shapes of it"
    copies = Counter(part for _, parts in holders.values() for part in parts)
    seen: set[Part] = set()
    flags: dict[int, tuple[int, ...]] = {}
    for rank, (_, parts) in sorted(holders.items()):
        mine = []
        for part in parts:
            mine.append(0 if part in seen else copies[part])
            seen.add(part)
        flags[rank] = tuple(mine)
    boxes = [box(part, shape) for part in seen]
    known = [found for found in boxes if found is not None]
    if len(known) < len(boxes) and len(boxes) > 1:
        return {}, "it is held in parts that are no slices of it"
    if overlap(known):
        return {}, "parts of it overlap, on one rank or on two"
    count, whole = sum(prod(part[1]) for part in seen), prod(shape)
    if count != whole:
        return {}, f"the loader leaves {whole - count} of its {whole} elements out"
    return flags, None


def box(part: Part, shape: Sequence[int]) -> Box | None:
    """The part as a slice of a contiguous tensor of that shape, None where it is none."""
    offset, sizes, strides = part
    units = [prod(shape[at + 1 :]) for at in range(len(shape))]
    first, left = [], offset
    for unit in units:
        index, left = divmod(left, unit) if unit else (0, left)
        first.append(index)
    end = [index + 1 for index in first]
    for size, stride in zip(sizes, strides, strict=True):
        at = _dimension(stride, size, units, shape)
        while size > 1:
            if at < 0 or end[at] != first[at] + 1:
                return None
            if first[at] + size <= shape[at]:
                end[at] = first[at] + size
                break
            if first[at] or size % shape[at]:
                return None
            end[at] = shape[at]
            size //= shape[at]
            at -= 1
    return tuple(zip(first, end, strict=True))


def _dimension(stride: int, size: int, units: Sequence[int], shape: Sequence[int]) -> int:
    """The dimension, not of size 1, along which an element's stride is that; -1 where none is."""
    fitting = (at for at in range(len(shape)) if units[at] == stride and shape[at] > 1)
    return next(fitting, -1) if size > 1 else -1


def overlap(boxes: Sequence[Box], rows: int = 256) -> bool:
    """Whether any two of the boxes, all of the same number of dimensions, share an element."""
    if len(boxes) < 2:
        return False
    found = np.array(boxes, np.int64).reshape(len(boxes), len(boxes[0]), 2)
    first, end = found[:, :, 0], found[:, :, 1]
    for at in range(0, len(boxes), rows):
        some = slice(at, at + rows)
        shared = (first[some, None] < end[None]) & (first[None] < end[some, None])
        if np.count_nonzero(shared.all(axis=2)) > len(boxes[some]):  # each shares with itself
            return True
    return False
