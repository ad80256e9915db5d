"""Every state of a run of deltas against the digests that their headers name, in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.codec.base import BlockChanges
from deltactl.codec.bits import Bits, Positions, touch_sum
from deltactl.core.digest import hasher
from deltactl.core.errors import DeltactlError, difference
from deltactl.core.progress import Meter, Progress
from deltactl.files.parallel import map_largest_first
from deltactl.format.delta import Delta
from deltactl.format.header import Record, touch_sum_text
from deltactl.replay.states import Stack, stacks

Fault = tuple[int | None, DeltactlError]
"""The number of the delta in its run, None for the run's base, and what is wrong."""

Work = tuple[Stack, Stack | None]
"""A stack, and the one that takes its place whole in one dtype and shape, if one does."""


def replay_faults(base: Checkpoint, deltas: Sequence[Delta], progress: Progress) -> list[Fault]:
    """Replay ``deltas`` from ``base``; every changed tensor is digested after every delta, and what
    its row says of the changes is compared with them: how many there are, and both touch sums.

    Each tensor goes through memory once, a block at a time, with a hasher for each of its changes.
    Deltas without digests are replayed all the same: that they can be is all there is to show.
    """
    usable, faults = _usable(base, deltas)
    work = [pair for of_tensor in stacks(base, usable).values() for pair in _work(of_tensor)]
    meter = Meter(progress, "replaying", sum(stack.nbytes for stack, _ in work))

    def check(pair: Work) -> list[Fault]:
        return _check(*pair, usable, meter)

    for found in map_largest_first(check, work, lambda w: w[0].nbytes * (1 + len(w[0].layers))):
        faults += found
    return sorted(faults, key=lambda fault: -1 if fault[0] is None else fault[0])


def _work(of_tensor: Sequence[Stack]) -> Iterator[Work]:
    """What there is to look at of a tensor's stacks."""
    for stack, after in zip_longest(of_tensor, of_tensor[1:]):
        same = after is not None and (after.dtype, after.shape) == (stack.dtype, stack.shape)
        if stack.dtype and (stack.layers or stack.origin >= 0 or same):
            yield stack, after if same else None


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


def _check(stack: Stack, after: Stack | None, deltas: Sequence[Delta], meter: Meter) -> list[Fault]:
    seen: dict[int, _Seen] = {layer.number: _Seen() for layer in stack.layers}
    records = {layer.number: layer.record for layer in stack.layers}
    whole, replaced = hasher(), 0
    try:
        for offset, chunk in stack.chunks(_Watch(seen)):
            if stack.origin >= 0:
                whole.update(stack.data[offset : offset + chunk.nbytes])
            if after is not None:
                part = after.data[offset : offset + chunk.nbytes].view(chunk.dtype)
                replaced += int(np.count_nonzero(part != chunk))
            meter.add(chunk.nbytes)
    except DeltactlError as error:
        return [(_number_of(error, deltas), error)]
    faults = [fault for n in sorted(seen) for fault in _of_layer(n, records[n], seen[n])]
    if stack.origin >= 0:
        record = deltas[stack.origin].records[stack.name]
        faults += _compared(stack.origin, record, _DIGEST, record.digest, whole.hexdigest())
    if after is not None:
        record = deltas[after.origin].records[stack.name]
        faults += _compared(after.origin, record, _CHANGED, record.changed, replaced)
    return faults


_DIGEST = "the rebuilt tensor does not have the digest that the delta names"
_CHANGED = "another number of the tensor's elements changes than the delta's row says"
_OLD = "the old touch sum is not that of the base's bits"
_NEW = "the new touch sum is not that of the result's bits"


def _of_layer(number: int, record: Record, seen: _Seen) -> Iterator[Fault]:
    """What a sparse row says that is not so; a row of TRL's says nothing of it."""
    if record.digest is None or record.old_sum is None or record.new_sum is None:
        return
    yield from _compared(number, record, _DIGEST, record.digest, seen.digest.hexdigest())
    yield from _compared(number, record, _CHANGED, record.changed, seen.changed)
    for what, expected, found in (
        (_OLD, record.old_sum, seen.old_sum),
        (_NEW, record.new_sum, seen.new_sum),
    ):
        yield from _compared(
            number, record, what, touch_sum_text(expected), touch_sum_text(found % (1 << 64))
        )


def _compared(
    number: int, record: Record, what: str, expected: object, found: object
) -> Iterator[Fault]:
    fault = difference(what, expected, found, tensor=record.name)
    if record.digest is not None and fault is not None:
        yield number, fault


@dataclass(slots=True)
class _Seen:
    """What a layer did to its tensor: the digest after it, the elements whose bits changed, and the
    touch sums over those that it lists, before and after."""

    digest: Any = field(default_factory=hasher)
    changed: int = 0
    old_sum: int = 0
    new_sum: int = 0


class _Watch:
    """Adds up what each layer does, chunk by chunk."""

    def __init__(self, seen: Mapping[int, _Seen]) -> None:
        self._seen = seen
        self._positions: Positions = np.empty(0, np.int64)
        self._bits: Bits = np.empty(0, np.uint8)

    def before(
        self, number: int, changes: BlockChanges, index: int, start: int, chunk: Bits
    ) -> None:
        """See Watch."""
        self._positions = changes.within(start, chunk.size)
        self._bits = chunk.take(self._positions - start)
        self._seen[number].old_sum += touch_sum(self._positions, self._bits, index)

    def after(
        self, number: int, changes: BlockChanges, index: int, start: int, chunk: Bits
    ) -> None:
        """See Watch."""
        seen, bits = self._seen[number], chunk.take(self._positions - start)
        seen.digest.update(chunk.view(np.uint8))
        seen.changed += int(np.count_nonzero(bits != self._bits))
        seen.new_sum += touch_sum(self._positions, bits, index)


def _number_of(error: DeltactlError, deltas: Sequence[Delta]) -> int | None:
    paths = [str(delta.path) for delta in deltas]
    return paths.index(error.file) if error.file in paths else None
