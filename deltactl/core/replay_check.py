"""Every state of a run of deltas against the digests that their headers name, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deltactl.core.bits import Bits
from deltactl.core.checkpoint import Checkpoint
from deltactl.core.delta import Delta
from deltactl.core.digest import hasher
from deltactl.core.errors import DeltactlError, Malformed
from deltactl.core.header import Record
from deltactl.core.parallel import Meter, map_largest_first
from deltactl.core.progress import Progress
from deltactl.core.replay import Stack, stacks

Fault = tuple[int | None, DeltactlError]
"""The number of the delta in its run, None for the run's base, and what is wrong."""


def replay_faults(base: Checkpoint, deltas: Sequence[Delta], progress: Progress) -> list[Fault]:
    """Replay ``deltas`` from ``base``; every changed tensor is digested after every delta.

    Each tensor goes through memory once, a block at a time, with a hasher for each of its changes.
    Deltas without digests are replayed all the same: that they can be is all there is to show.
    """
    usable, faults = _usable(base, deltas)
    work = [s for of_tensor in stacks(base, usable).values() for s in of_tensor if s.dtype]
    work = [s for s in work if s.layers or s.origin >= 0]
    meter = Meter(progress, "replaying", sum(stack.nbytes for stack in work))

    def check(stack: Stack) -> list[Fault]:
        return _check(stack, usable, meter)

    for found in map_largest_first(check, work, lambda s: s.nbytes * (1 + len(s.layers))):
        faults += found
    return sorted(faults, key=lambda fault: -1 if fault[0] is None else fault[0])


def _usable(base: Checkpoint, deltas: Sequence[Delta]) -> tuple[Sequence[Delta], list[Fault]]:
    """The deltas before the first that cannot stand on what comes before it."""
    try:
        stacks(base, deltas)
    except DeltactlError:
        for count in range(1, len(deltas) + 1):
            try:
                stacks(base, deltas[:count])
            except DeltactlError as error:
                return deltas[: count - 1], [(count - 1, error)]
    return deltas, []


def _check(stack: Stack, deltas: Sequence[Delta], meter: Meter) -> list[Fault]:
    expected: dict[int, Record] = {layer.number: layer.record for layer in stack.layers}
    digests: dict[int, Any] = {number: hasher() for number in expected}
    whole = hasher()
    try:
        for offset, chunk in stack.chunks(lambda number, bits: _update(digests[number], bits)):
            if stack.origin >= 0:
                whole.update(stack.data[offset : offset + chunk.nbytes])
            meter.add(chunk.nbytes)
    except DeltactlError as error:
        return [(_number_of(error, deltas), error)]
    if stack.origin >= 0:
        expected[stack.origin] = deltas[stack.origin].records[stack.name]
        digests[stack.origin] = whole
    return [
        (number, _differs(stack.name, record, digests[number].hexdigest()))
        for number, record in sorted(expected.items())
        if record.digest not in (None, digests[number].hexdigest())
    ]


def _update(digest: Any, bits: Bits) -> None:
    digest.update(bits.view(np.uint8))


def _number_of(error: DeltactlError, deltas: Sequence[Delta]) -> int | None:
    paths = [str(delta.path) for delta in deltas]
    return paths.index(error.file) if error.file in paths else None


def _differs(name: str, record: Record, found: str) -> Malformed:
    what = "the rebuilt tensor does not have the digest that the delta names"
    return Malformed(what, tensor=name, expected=record.digest, found=found)
