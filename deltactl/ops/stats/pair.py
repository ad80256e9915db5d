"""Two checkpoints compared: what changed, by how much, from what, and what it takes to carry."""

from __future__ import annotations

import numpy as np

from deltactl.checkpoint.checkpoint import Checkpoint, Tensor
from deltactl.codec import ENCODINGS
from deltactl.codec.base import BLOCK, EncodedBlock, Target
from deltactl.codec.bits import Bits, Positions, changes_between, steps_between
from deltactl.core.dtypes import FLOATS
from deltactl.core.progress import Meter, Progress, silent
from deltactl.files.atomic import Segment, Spool
from deltactl.files.parallel import map_largest_first
from deltactl.format.header import utf8
from deltactl.ops.stats.histograms import ExponentCounts, StepCounts
from deltactl.ops.stats.measured import ABSOLUTE, Gaps, Measured, same_in_all, together
from deltactl.ops.stats.report import Sizes, Stats, Status, TensorStats

_CHUNK = 1 << 20  # bytes of each checkpoint looked at together: both fit a core's share of cache


def stats_pair(a: Checkpoint, b: Checkpoint, progress: Progress = silent) -> Stats:
    """What changed from ``a`` to ``b``, and what the delta would take in each encoding."""
    names = sorted({*a.tensors, *b.tensors}, key=utf8)
    sizes = {name: _bytes_to_read(a.tensors.get(name), b.tensors.get(name)) for name in names}
    meter = Meter(progress, "measuring", sum(sizes.values()))

    def work(name: str) -> Measured:
        return _measure(a.tensors.get(name), b.tensors.get(name), meter)

    found = map_largest_first(work, names, sizes.__getitem__)
    return together(found, "pair", total_elements=b.total_elements, dense=b.nbytes)


def _bytes_to_read(before: Tensor | None, after: Tensor | None) -> int:
    if before is None or after is None or not _alike(before, after):
        return 0
    return before.nbytes + after.nbytes


def _alike(before: Tensor, after: Tensor) -> bool:
    return (before.dtype, before.shape) == (after.dtype, after.shape)


def _measure(before: Tensor | None, after: Tensor | None, meter: Meter) -> Measured:
    if after is None:
        assert before is not None
        return Measured(_row(before, "removed", 0), same_in_all(0))
    if before is not None and _alike(before, after):
        return _Comparison(before, after, meter).run()
    status: Status = "added" if before is None else "replaced"
    return Measured(_row(after, status, after.elements), same_in_all(after.nbytes))


def _row(tensor: Tensor, status: Status, changed: int) -> TensorStats:
    seen = 0 if status == "removed" else tensor.elements
    return TensorStats(
        tensor.name, status, tensor.dtype, tensor.shape, tensor.elements, changed, seen
    )


class _Comparison:
    """One tensor that both checkpoints have, with one dtype and shape."""

    def __init__(self, before: Tensor, after: Tensor, meter: Meter) -> None:
        self._tensor, self._meter = after, meter
        self._old = before.bits
        self._new = after.bits
        self._steps, self._exponents, self._gaps = StepCounts(), ExponentCounts(), Gaps()
        self._codecs = {n: codec for n, codec in ENCODINGS.items() if n not in ABSOLUTE}
        self._blocks: dict[str, list[EncodedBlock]] = {name: [] for name in self._codecs}

    def run(self) -> Measured:
        for start in range(0, self._old.size, BLOCK):
            self._block(start)
        changed = self._gaps.count
        row = _row(self._tensor, "changed" if changed else "unchanged", changed)
        sizes = self._sizes() if changed else same_in_all(0)
        return Measured(row, sizes, self._steps, self._exponents)

    def _block(self, start: int) -> None:
        stop = min(start + BLOCK, self._old.size)
        chunk = _CHUNK // self._old.itemsize
        found = [self._chunk(at, min(at + chunk, stop), start) for at in range(start, stop, chunk)]
        positions, old, new = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        self._gaps.add(positions, start)
        if not positions.size:
            return
        for name, codec in self._codecs.items():
            base = self._old[start:stop]
            streams = codec.encode(base, positions, old, new, self._tensor.dtype)
            lengths = tuple(Segment(0, len(stream)) for stream in streams)
            self._blocks[name].append(EncodedBlock(start // BLOCK, positions.size, lengths))

    def _chunk(self, at: int, end: int, start: int) -> tuple[Positions, Bits, Bits]:
        """What changed from element ``at`` to ``end``; positions from ``start`` on."""
        old, new = self._old[at:end], self._new[at:end]
        found = changes_between(old, new, at - start, at)
        before, after = found.before, found.after
        dtype = self._tensor.dtype
        if dtype in FLOATS:
            self._steps.add(steps_between(before, after, dtype))
            self._steps.add_flips(before, after)
            self._exponents.add(old, before, dtype)
        self._meter.add(old.nbytes + new.nbytes)
        return found.positions, before, after

    def _sizes(self) -> Sizes:
        tensor, count = self._tensor, self._old.size
        target = Target("", tensor.name, tensor.dtype, count)
        sizes: dict[str, int | None] = {}
        for name in ABSOLUTE:
            sizes[name] = self._gaps.size(name, tensor.dtype, count)
        with Spool() as empty:  # these parts' sizes follow from the lengths of their streams
            for name, codec in self._codecs.items():
                parts = codec.parts(target, self._blocks[name], empty)
                size = sum(part.nbytes for part in parts)
                sizes[name] = min(size, tensor.nbytes) if codec.dense_if_smaller else size
        return sizes
