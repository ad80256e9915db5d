"""What is odd about a step's values: NaN and infinities that were not there, as where training blew
up, tensors that became all zeros, and tensors that have each other's weights.

Only changed elements can have become such, so only those are looked at; of a first checkpoint, all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltactl.checkpoint.checkpoint import Checkpoint, Tensor
from deltactl.codec.bits import Bits
from deltactl.core.digest import TensorState
from deltactl.core.dtypes import FLOATS
from deltactl.core.errors import listed
from deltactl.files.parallel import map_largest_first

_LIMITS = {code: row.not_finite for code, row in FLOATS.items() if row.not_finite is not None}
_PIECE = 1 << 21  # elements looked at together, so that they stay in cache
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Odd:
    """One tensor. ``not_finite``: elements that are NaN or infinite, and were not before;
    ``zeroed``: whether it has become all zeros."""

    name: str
    not_finite: int = 0
    zeroed: bool = False


def is_floating(dtype: str) -> bool:
    """Whether elements of a dtype can be NaN in a way that is known here."""
    return dtype in _LIMITS


def _not_finite(bits: Bits, dtype: str) -> npt.NDArray[np.bool_]:
    kind, sign = bits.dtype.type, 1 << (8 * bits.itemsize - 1)
    found: npt.NDArray[np.bool_] = (bits & kind(sign - 1)) >= kind(_LIMITS[dtype])
    return found


def _all_finite(bits: Bits, dtype: str) -> bool:
    """By the largest of either sign, which costs a fraction of looking at each."""
    limit, sign = _LIMITS[dtype], 1 << (8 * bits.itemsize - 1)
    signed = bits.view(f"<i{bits.itemsize}")
    return not bits.size or (int(bits.max()) < sign + limit and int(signed.max()) < limit)


def count_not_finite(bits: Bits, dtype: str, before: Bits | None = None) -> int:
    """How many elements are NaN or infinite; with ``before``, of the same shape, how many became
    so. 0 where ``is_floating`` says no."""
    if not is_floating(dtype) or _all_finite(bits, dtype):
        return 0
    found = _not_finite(bits, dtype)
    if before is not None:
        found &= ~_not_finite(before, dtype)
    return int(np.count_nonzero(found))


class Changed:
    """Looks at what changes in one tensor, part by part."""

    def __init__(self, name: str, dtype: str) -> None:
        self._name, self._dtype = name, dtype
        self._not_finite = 0
        self._zeros = is_floating(dtype)

    def see(self, before: Bits, after: Bits) -> None:
        """The elements of a part that changed, each of shape (k,)."""
        self._not_finite += count_not_finite(after, self._dtype, before)
        self._zeros = self._zeros and not after.any()

    def odd(self, whole: Bits) -> Odd | None:
        """What there is to say when all has been seen; ``whole``: the tensor as it is now. One
        element alone may well become 0."""
        zeroed = self._zeros and whole.size > 1 and not whole.any()
        return Odd(self._name, self._not_finite, zeroed) if self._not_finite or zeroed else None


def odd_whole(tensor: Tensor) -> Odd | None:
    """Of a tensor without one to compare it with."""
    parts = (tensor.bits[at : at + _PIECE] for at in range(0, tensor.elements, _PIECE))
    count = sum(count_not_finite(part, tensor.dtype) for part in parts)
    return Odd(tensor.name, count) if count else None


def of_first(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What to say of a checkpoint that is not compared with one before, a sentence each."""
    floating = [t for t in checkpoint.tensors.values() if is_floating(t.dtype)]
    odd = map_largest_first(odd_whole, floating, lambda tensor: tensor.nbytes)
    return sentences([o for o in odd if o is not None], len(floating), first=True)


def sentences(odd: Sequence[Odd], total: int, *, first: bool = False) -> tuple[str, ...]:
    """What to say of the odd ones of ``total`` floating tensors, a sentence each."""
    found = []
    blown = [f"{o.name} ({_elements(o.not_finite)})" for o in odd if o.not_finite]
    if blown:
        what = f"{len(blown)} of {total} floating tensors hold NaN or infinities"
        what += "" if first else " where the step before had numbers"
        found.append(f"{what}: {listed(blown, _SHOWN)}")
    zeroed = [o.name for o in odd if o.zeroed]
    if zeroed:
        what = f"{len(zeroed)} of {total} floating tensors became all zeros"
        found.append(f"{what}: {listed(zeroed, _SHOWN)}")
    return tuple(found)


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count:,} elements"


def exchanged(pairs: Iterable[tuple[TensorState, TensorState]]) -> tuple[str, ...]:
    """What to say of tensors that have exactly each other's bits of the step before; ``pairs``:
    each tensor before and after, by one name."""
    changed = [(old, new) for old, new in pairs if old.digest != new.digest]
    was = {(old.digest, old.dtype, old.shape): old.name for old, _ in changed}
    now = {new.name: was.get((new.digest, new.dtype, new.shape)) for _, new in changed}
    moved = [f"{name} has that of {old}" for name, old in now.items() if old and now.get(old)]
    if not moved:
        return ()
    what = f"{len(moved)} tensors have each other's content of the step before"
    return (f"{what}, as where names were exchanged: {listed(moved, _SHOWN)}",)
