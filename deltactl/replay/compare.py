"""A rebuilt step against a checkpoint, bit for bit, without writing it anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltactl.checkpoint.checkpoint import Checkpoint, Tensor
from deltactl.core.errors import DeltactlError, Malformed
from deltactl.core.progress import Meter, Progress
from deltactl.files.parallel import map_largest_first
from deltactl.format.delta import Delta
from deltactl.format.header import utf8
from deltactl.replay.states import Stack, final_stacks


def first_differences(
    base: Checkpoint, deltas: Sequence[Delta], other: Checkpoint, progress: Progress
) -> list[DeltactlError]:
    """One error for each tensor that differs, in order of name: its first differing element's index
    and both bit patterns, or that one side lacks it, or has it in another dtype or shape. Raises
    Malformed.
    """
    rebuilt = final_stacks(base, deltas)
    names = sorted({*rebuilt, *other.tensors}, key=utf8)
    meter = Meter(progress, "comparing", sum(stack.nbytes for stack in rebuilt.values()))

    def compare(name: str) -> DeltactlError | None:
        return _difference(name, rebuilt.get(name), other.tensors.get(name), meter)

    def size(name: str) -> int:
        return rebuilt[name].nbytes if name in rebuilt else 0

    return [error for error in map_largest_first(compare, names, size) if error is not None]


def _difference(
    name: str, stack: Stack | None, tensor: Tensor | None, meter: Meter
) -> DeltactlError | None:
    found = None if stack is None else (stack.dtype, stack.shape)
    expected = None if tensor is None else (tensor.dtype, tensor.shape)
    if stack is None or tensor is None or found != expected:
        what = "the chain's step and the checkpoint do not have the same tensor"
        return Malformed(what, tensor=name, expected=_describe(expected), found=_describe(found))
    wanted = tensor.bits
    for offset, chunk in stack.chunks():
        start = offset // chunk.itemsize
        part = wanted[start : start + chunk.size]
        meter.add(chunk.nbytes)
        if not np.array_equal(chunk, part):
            at = int(np.flatnonzero(chunk != part)[0])
            return Malformed(
                f"the bits differ, first at element {start + at}",
                tensor=name,
                expected=_hex(int(part[at]), chunk.itemsize),
                found=_hex(int(chunk[at]), chunk.itemsize),
            )
    return None


def _hex(bits: int, width: int) -> str:
    return f"0x{bits:0{2 * width}x}"


def _describe(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor[0]} {list(tensor[1])}"
