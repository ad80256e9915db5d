"""Read, compare, write and sum the bits of live weights, on whatever device they lie.

On the CPU the compiled kernel does it, on all processors that the process may use; elsewhere, and
without a kernel, operations of torch that exist on every device. Both give the same bits and sums.

``Patches`` is what the pause of an update waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltactl.codec import bits as core_bits
from deltactl.core import native
from deltactl.core.errors import DeltactlError
from deltactl.vllm.layout.regions import Positions, Region, pieces
from deltactl.vllm.layout.weight_map import Storage
from deltactl.vllm.staging import cores

Bits = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
T = TypeVar("T")
R = TypeVar("R")

_THREADS_MAX = 16  # more wait for the same memory
_LEAST = 1 << 14  # elements that are worth a thread
_PIECE = 1 << 22  # elements that torch sums at a time: each takes about 50 bytes meanwhile
_INT32_MAX = (1 << 31) - 1

LOST = "what was written did not read back"


# Single storages.


def to_device(storage: Storage, values: Bits) -> Tensor:
    """Bits, or int32 or int64 positions, as a tensor of the storage's device."""
    kind = values.dtype
    signed = values if kind.kind == "i" or kind.itemsize == 1 else values.view(f"i{kind.itemsize}")
    return torch.from_numpy(np.array(signed)).to(storage.bits.device)


def positions_in(storage: Storage, positions: Positions) -> Tensor:
    """Runtime positions as a tensor of the storage's device: int32 where that is enough."""
    short = storage.bits.numel() <= _INT32_MAX
    return to_device(storage, positions.astype(np.int32) if short else positions)


def gather(storage: Storage, positions: Tensor) -> Tensor:
    """The bits at the positions. Raises ValueError as ``Patches`` does."""
    found = torch.empty_like(positions, dtype=storage.bits.dtype)
    _check(storage, positions, found)
    if not _by_kernel(storage.bits):
        return storage.bits.index_select(0, positions)
    _on_all_cores(_kernel().take, _shares([_row(storage, positions, found)]))
    return found


def scatter(storage: Storage, positions: Tensor, values: Tensor) -> None:
    """Make the bits at the positions, no two of which are the same, these. Raises ValueError as
    ``Patches`` does."""
    _check(storage, positions, values)
    if _by_kernel(storage.bits):
        _on_all_cores(_kernel().put, _shares([_row(storage, positions, values)]))
    else:
        storage.bits.index_put_((positions,), values)


def equal(storage: Storage, positions: Tensor, expected: Tensor) -> bool:
    """Whether the bits at the positions are exactly these. Raises ValueError as ``Patches``
    does."""
    _check(storage, positions, expected)
    if _by_kernel(storage.bits):
        shares = _shares([_row(storage, positions, expected)])
        return all(_on_all_cores(_kernel().holds, shares))
    return torch.equal(storage.bits.index_select(0, positions), expected)


# All storages at once.


@dataclass(frozen=True, slots=True)
class Patch:
    """Positions in one storage, int32 or int64, no two the same, and the bits there before and
    after, of the storage's dtype. All 1-D, contiguous and on the storage's device."""

    storage: Storage
    positions: Tensor
    old: Tensor
    new: Tensor


class Patches:
    """Patches of any number of storages, each compared, written or taken back in one sweep.

    Raises ValueError if a position lies outside its storage, or the tensors do not fit together.
    """

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._patches = [patch for patch in patches if len(patch.positions)]
        for patch in self._patches:
            _check(patch.storage, patch.positions, patch.old, patch.new)
        self._native = bool(self._patches) and all(
            _by_kernel(patch.storage.bits) for patch in self._patches
        )
        if self._native:
            rows = [_row(patch.storage, patch.positions, patch.old) for patch in self._patches]
            self._old = _shares(rows)
            rows = [_row(patch.storage, patch.positions, patch.new) for patch in self._patches]
            self._new = _shares(rows)

    @property
    def elements(self) -> int:
        return sum(len(patch.positions) for patch in self._patches)

    @property
    def nbytes(self) -> int:
        """Bytes of positions and bits that are held for it."""
        held = ((patch.positions, patch.old, patch.new) for patch in self._patches)
        return sum(tensor.nbytes for tensors in held for tensor in tensors)

    def is_old(self) -> bool:
        """Whether every live bit at the positions is the old one."""
        if self._native:
            return all(_on_all_cores(_kernel().holds, self._old))
        return self._hold([patch.old for patch in self._patches])

    def is_new(self) -> bool:
        """Whether every live bit at the positions is the new one."""
        if self._native:
            return all(_on_all_cores(_kernel().holds, self._new))
        return self._hold([patch.new for patch in self._patches])

    def replace(self) -> bool:
        """Where every live bit at the positions is the old one, write the new ones and read them
        back. Else False, and all is as it was.

        Raises DeltactlError where they do not read back; ``write_old`` then writes the old ones.
        """
        if not self._native:
            return self._replace()
        pairs = list(zip(self._old, self._new, strict=True))
        done = _on_all_cores(lambda pair: _kernel().replace(*pair), pairs)
        if min(done) < 0:
            raise DeltactlError(LOST)
        if sum(done) == self.elements:
            return True
        written = [_first(share, n) for share, n in zip(self._old, done, strict=True)]
        _on_all_cores(_kernel().put, written)
        return False

    def _replace(self) -> bool:
        if not self.is_old():
            return False
        self._put([patch.new for patch in self._patches])
        if not self.is_new():
            raise DeltactlError(LOST)
        return True

    def write_old(self) -> None:
        """Write the old bits back."""
        if self._native:
            _on_all_cores(_kernel().put, self._old)
        else:
            self._put([patch.old for patch in self._patches])

    def _hold(self, expected: Sequence[Tensor]) -> bool:
        """Waits for the device once, not once a storage."""
        differ = [
            (patch.storage.bits.index_select(0, patch.positions) != bits).any()
            for patch, bits in zip(self._patches, expected, strict=True)
        ]
        return not differ or not bool(torch.stack(differ).any())

    def _put(self, values: Sequence[Tensor]) -> None:
        for patch, bits in zip(self._patches, values, strict=True):
            patch.storage.bits.index_put_((patch.positions,), bits)


def _check(storage: Storage, positions: Tensor, *sides: Tensor) -> None:
    live = storage.bits
    fit = all(
        side.dtype == live.dtype and side.shape == positions.shape and side.is_contiguous()
        for side in sides
    )
    known = positions.dtype in (torch.int32, torch.int64) and positions.dim() == 1
    near = all(side.device == live.device for side in (positions, *sides))
    if not (fit and known and near and positions.is_contiguous()):
        raise ValueError(f"{storage.name}: positions and bits do not fit the storage")
    if len(positions) and (int(positions.min()) < 0 or int(positions.max()) >= live.numel()):
        raise ValueError(f"{storage.name}: a position lies outside its {live.numel()} elements")


# Sums.


def touch_sum(index: Tensor, found: Tensor) -> int:
    """``codec.bits.touch_sum`` of bits, of a storage's dtype, whose indices in their tensor are
    ``index``, int32 or int64 and of the same shape (n,)."""
    if _by_kernel(found):
        return core_bits.touch_sum(index.to(torch.int64).numpy(), _numpy(found))
    total = 0
    for at in range(0, len(found), _PIECE):
        some = slice(at, at + _PIECE)
        total += int(_mix64(index[some].to(torch.int64), found[some]).sum())
    return total % (1 << 64)


def region_sum(storage: Storage, region: Region) -> int:
    """The touch sum of every element of a region, by its index in the checkpoint tensor."""
    live = storage.bits
    if _by_kernel(live):
        share = max(_LEAST, -(-region.count // (4 * _threads())))
        parts = list(pieces(region, share))
        return sum(_on_all_cores(lambda part: _kernel_sum(_numpy(live), part), parts)) % (1 << 64)
    total = 0
    for part in pieces(region, _PIECE):
        index = torch.full(part.shape, part.source_offset, device=live.device, dtype=torch.int64)
        for axis, (n, step) in enumerate(zip(part.shape, part.source_strides, strict=True)):
            along = [1] * len(part.shape)
            along[axis] = n
            index += (torch.arange(n, device=live.device) * step).view(along)
        some = torch.as_strided(live, part.shape, part.strides, part.offset)
        total += int(_mix64(index, some).sum())
    return total % (1 << 64)


def _kernel_sum(live: Bits, part: Region) -> int:
    axes = np.array([part.shape, part.strides, part.source_strides], np.int64)
    return _kernel().rectangle(live[part.offset :], axes, part.source_offset)


_MIX_INDEX, _MIX_1, _MIX_2 = (
    int(np.uint64(factor).view(np.int64))
    for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mix64(index: Tensor, found: Tensor) -> Tensor:
    """``codec.bits.mix64`` in int64, which wraps as uint64 does; shifts are made unsigned."""
    width = found.dtype.itemsize
    z = index * _MIX_INDEX
    z += found.to(torch.int64) & ((1 << 8 * width) - 1) if width < 8 else found
    z ^= (z >> 30) & ((1 << 34) - 1)
    z *= _MIX_1
    z ^= (z >> 27) & ((1 << 37) - 1)
    z *= _MIX_2
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z


# Whole regions.


def read_region(storage: Storage, region: Region, out: Bits) -> None:
    """Copy a region's live bits to where its elements lie in the whole tensor: ``out``, shape
    (elements,), of their width."""
    for part, live in _strided(storage, region):
        _view(out, part)[...] = _numpy(live.cpu())


def write_region(storage: Storage, region: Region, source: Bits) -> None:
    """Copy a region's elements from the whole tensor, shape (elements,), into the live storage."""
    for part, live in _strided(storage, region):
        if live.device.type == "cpu":
            _numpy(live)[...] = _view(source, part)
        else:
            live.copy_(to_device(storage, _view(source, part)))


def _strided(storage: Storage, region: Region) -> Iterator[tuple[Region, Tensor]]:
    for part in pieces(region, _PIECE):
        yield part, torch.as_strided(storage.bits, part.shape, part.strides, part.offset)


def _view(whole: Bits, part: Region) -> Bits:
    strides = [step * whole.itemsize for step in part.source_strides]
    return np.lib.stride_tricks.as_strided(whole[part.source_offset :], part.shape, strides)


def _numpy(live: Tensor) -> Bits:
    """The same memory as an array of codec.bits' unsigned integers."""
    found = live.numpy()
    return found.view(f"<u{found.itemsize}")


# The kernel, and threads for it.


def _by_kernel(live: Tensor) -> bool:
    return native.KERNEL is not None and live.device.type == "cpu"


def _kernel() -> native.Kernel:
    assert native.KERNEL is not None  # as the caller has asked
    return native.KERNEL


def _row(storage: Storage, positions: Tensor, values: Tensor) -> list[int]:
    live = storage.bits
    return [
        live.data_ptr(),
        positions.data_ptr(),
        values.data_ptr(),
        len(positions),
        live.dtype.itemsize,
        positions.dtype.itemsize,
    ]


def _shares(rows: Sequence[list[int]]) -> list[Rows]:
    """Rows of the kernel dealt out to threads, cut so that each gets as many positions."""
    total = sum(row[3] for row in rows)
    share = max(_LEAST, -(-total // _threads()))
    found: list[list[list[int]]] = [[]]
    left = share
    for elements, positions, values, count, width, step in rows:
        while count:
            if not left:
                found.append([])
                left = share
            n = min(count, left)
            found[-1].append([elements, positions, values, n, width, step])
            positions, values = positions + n * step, values + n * width
            count, left = count - n, left - n
    return [np.array(share, np.int64).reshape(-1, 6) for share in found]


def _first(rows: Rows, count: int) -> Rows:
    """Rows of the kernel up to so many positions."""
    before = np.cumsum(rows[:, 3]) - rows[:, 3]
    found = rows.copy()
    found[:, 3] = np.clip(count - before, 0, rows[:, 3])
    return found


@cache
def _threads() -> int:
    return min(_THREADS_MAX, len(cores.usable()) or 1)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), "deltactl-live", initializer=cores.spread)


def _on_all_cores(work: Callable[[T], R], parts: Sequence[T]) -> list[R]:
    if len(parts) == 1:
        return [work(parts[0])]
    return list(_pool().map(work, parts))
