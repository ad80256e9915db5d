"""A capture becomes a delta file, and the state that it leads to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np

from deltactl.checkpoint.checkpoint import Tensor
from deltactl.checkpoint.state import tensor_state
from deltactl.codec import encoding_named
from deltactl.codec.base import BLOCK, EncodedBlock, Encoding
from deltactl.codec.bits import Bits, Positions
from deltactl.core.digest import TensorState
from deltactl.files.atomic import Spool, atomic_file
from deltactl.files.parallel import hash_threads, map_largest_first
from deltactl.format.carrying import Sparse, carry
from deltactl.format.header import utf8
from deltactl.ops.diff import Compared, DeltaWriter, DiffReport, report_of
from deltactl.ops.oddities import Changed, odd_whole
from deltactl.trainer.capture.capture import Capture, ChunkChange, TensorChange

States = dict[str, TensorState]
"""A state, tensor by tensor."""


@dataclass(frozen=True, slots=True)
class Made:
    """A delta that was written: what is in it, and the state that it leads to."""

    report: DiffReport
    states: States


def write_delta(
    capture: Capture, states: Mapping[str, TensorState], out: Path, *, encoding: str, step: int,
    base_step: int,
) -> Made:  # fmt: skip
    """Write the delta from the state ``states``, which the mirror had before the capture, to the
    one that it has now. Only tensors that changed are read.

    ``out`` gets it whole or not at all. Raises UsageError for an unknown encoding, OSError.
    """
    codec = encoding_named(encoding)
    names = list(capture.changes)
    sizes = {name: _size(capture, name) for name in names}
    with Spool(out.parent) as spool:

        def work(name: str) -> Compared:
            threads = hash_threads(sizes[name], sizes.values())
            return _Tensor(capture, name, states.get(name), codec, spool, threads).compared()

        changed = dict(zip(names, map_largest_first(work, names, sizes.__getitem__), strict=True))
        compared = _with_others(changed, states)
        mirror = capture.mirror
        report = report_of(codec.name, compared, mirror.total_elements, mirror.nbytes)
        with atomic_file(out) as file:
            size = DeltaWriter(report, compared, step, base_step).write(file)
    after = {state.name: state for state in report.result_tensors}
    return Made(replace(report, delta_bytes=size), after)


def _size(capture: Capture, name: str) -> int:
    held = capture.mirror.tensors.get(name)
    return 0 if held is None else held.data.size


def _with_others(
    changed: Mapping[str, Compared], states: Mapping[str, TensorState]
) -> list[Compared]:
    """Also the tensors that did not change, in order of name."""
    names = sorted({*changed, *states}, key=utf8)
    return [changed.get(n) or Compared(states[n], states[n], None, ()) for n in names]


class _Tensor:
    """One tensor that changed."""

    def __init__(
        self,
        capture: Capture,
        name: str,
        before: TensorState | None,
        codec: Encoding,
        spool: Spool,
        threads: int,
    ) -> None:
        self._change: TensorChange = capture.changes[name]
        self._held = capture.mirror.tensors.get(name)
        self._before, self._codec, self._spool, self._threads = before, codec, spool, threads
        self._carry = partial(carry, codec=codec, spool=spool)
        self._changed = Changed(name, "" if self._held is None else self._held.dtype)

    def compared(self) -> Compared:
        """Digest it, encode what changed."""
        held, before = self._held, self._before
        if held is None:
            return Compared(before, None, *self._carry(before, None, None, None))
        after = tensor_state(held, self._threads)
        if self._change.kind == "sparse":
            carried = self._carry(before, after, held.data, self._sparse(held))
            return Compared(before, after, *carried, self._changed.odd(held.bits))
        odd = odd_whole(held)
        return Compared(before, after, *self._carry(before, after, held.data, None), odd)

    def _sparse(self, held: Tensor) -> Sparse:
        blocks = [self._block(held, number, chunks) for number, chunks in self._chunks_by_block()]
        return Sparse(blocks, self._change.old_sum, self._change.new_sum)

    def _chunks_by_block(self) -> Iterator[tuple[int, list[ChunkChange]]]:
        chunks = sorted(self._change.chunks, key=lambda chunk: chunk.start)
        for number, group in groupby(chunks, lambda chunk: chunk.start // BLOCK):
            yield number, list(group)

    def _block(self, held: Tensor, number: int, chunks: Sequence[ChunkChange]) -> EncodedBlock:
        start = number * BLOCK
        block = held.bits[start : start + BLOCK]
        found = [chunk.found(held.bits) for chunk in chunks]
        positions = np.concatenate(
            [c.positions + (chunk.start - start) for c, chunk in zip(found, chunks, strict=True)]
        )
        before = np.concatenate([c.before for c in found])
        after = np.concatenate([c.after for c in found])
        self._changed.see(before, after)
        base = _as_before(block, positions, before) if self._codec.needs_base else block
        streams = self._codec.encode(base, positions, before, after, held.dtype)
        return EncodedBlock(number, positions.size, tuple(map(self._spool.append, streams)))


def _as_before(block: Bits, positions: Positions, before: Bits) -> Bits:
    base = block.copy()
    base[positions] = before
    return base
