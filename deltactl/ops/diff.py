"""Two checkpoints to a delta: compare, digest and encode in one pass over cache-sized chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from deltactl.checkpoint.checkpoint import Checkpoint, Tensor
from deltactl.checkpoint.state import tensor_state
from deltactl.codec import DEFAULT, encoding_named
from deltactl.codec.base import BLOCK, EncodedBlock, Encoding, Part
from deltactl.codec.bits import Changes, changes_between
from deltactl.core.digest import TensorState, hasher, state_digest
from deltactl.core.dtypes import DTYPES
from deltactl.core.errors import UsageError
from deltactl.core.progress import Meter, Progress, silent
from deltactl.files.atomic import Spool, atomic_file
from deltactl.files.parallel import hash_threads, map_largest_first
from deltactl.files.safetensors import make_header
from deltactl.format.carrying import Sparse, carry
from deltactl.format.header import (
    PLACEHOLDER,
    PREFIX,
    Record,
    check_step,
    delta_metadata,
    seal,
    utf8,
)
from deltactl.ops.oddities import Changed, Odd, exchanged, is_floating, odd_whole, sentences

_CHUNK = 1 << 22  # bytes of each looked at together: less costs more calls, more leaves the cache


@dataclass(frozen=True, slots=True)
class DiffReport:
    """What ``diff`` found. Sizes in bytes; ``records`` in order of name; ``notes``: what is odd
    about the values, a sentence each."""

    encoding: str
    base_state: str
    result_state: str
    total_elements: int
    changed_elements: int
    delta_bytes: int
    checkpoint_bytes: int
    records: tuple[Record, ...]
    result_tensors: tuple[TensorState, ...]
    notes: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        return self.base_state == self.result_state

    @property
    def sparsity(self) -> float:
        """Share of the result's elements that keep their bits; 1.0 where nothing changed, and 0.0
        where the result has no elements and something did."""
        if not self.total_elements:
            return 1.0 if self.identical else 0.0
        return 1 - self.changed_elements / self.total_elements

    @property
    def bytes_per_changed_element(self) -> float | None:
        return self.delta_bytes / self.changed_elements if self.changed_elements else None

    @property
    def times_smaller(self) -> float:
        """The whole checkpoint's tensors over the delta."""
        return self.checkpoint_bytes / self.delta_bytes


@dataclass(frozen=True, slots=True)
class Compared:
    """One tensor's outcome: its state on each side, and how the delta carries it, if at all.

    A record's ``nbytes`` are filled in by ``report_of``. ``odd``: what is odd about its values.
    """

    before: TensorState | None
    after: TensorState | None
    record: Record | None
    parts: tuple[Part, ...]
    odd: Odd | None = None


def diff(
    base: Checkpoint,
    result: Checkpoint,
    out: Path | IO[bytes] | None,
    *,
    encoding: str = DEFAULT,
    step: int | None = None,
    base_step: int | None = None,
    progress: Progress = silent,
) -> DiffReport:
    """Make the delta that leads from ``base`` to ``result``.

    Written to ``out``, a path (which gets it whole or not at all) or an open file; with None it is
    only measured. ``step`` and ``base_step`` are the model versions to write into its header.
    Raises UsageError for an unknown encoding.
    """
    codec = encoding_named(encoding)
    if step is not None:
        check_step(step)
    if isinstance(out, Path):
        _check_out(out, (base, result))
    names = sorted({*base.tensors, *result.tensors}, key=utf8)
    sizes = [_bytes_to_read(base, result, name) for name in names]
    meter = Meter(progress, "comparing", sum(sizes))
    threads = {n: hash_threads(s, sizes) for n, s in zip(names, sizes, strict=True)}
    with Spool() as spool:

        def work(name: str) -> Compared:
            before, after = base.tensors.get(name), result.tensors.get(name)
            return _compare(before, after, codec, spool, threads[name], meter)

        size_of = dict(zip(names, sizes, strict=True))
        compared = map_largest_first(work, names, size_of.__getitem__)
        report = report_of(codec.name, compared, result.total_elements, result.nbytes)
        writer = DeltaWriter(report, compared, step, base_step)
        target = atomic_file(out) if isinstance(out, Path) else nullcontext(out)
        with target as file:
            return replace(report, delta_bytes=writer.write(file))


def _check_out(out: Path, inputs: Iterable[Checkpoint]) -> None:
    """Raise UsageError where the delta would take the place of a file that it is made from."""
    for checkpoint in inputs:
        for shard in checkpoint.shards:
            path = checkpoint.path / shard.file if checkpoint.is_directory else checkpoint.path
            if out.resolve() == path.resolve():
                raise UsageError("the output is one of the two checkpoints' files", file=out)


def _bytes_to_read(base: Checkpoint, result: Checkpoint, name: str) -> int:
    return sum(c.tensors[name].nbytes for c in (base, result) if name in c.tensors)


def _compare(
    before: Tensor | None,
    after: Tensor | None,
    codec: Encoding,
    spool: Spool,
    threads: int,
    meter: Meter,
) -> Compared:
    if before is not None and after is not None and _alike(before, after):
        return _Comparison(before, after, codec, spool, threads, meter).run()
    old = None if before is None else tensor_state(before, threads, meter.add)
    new = None if after is None else tensor_state(after, threads, meter.add)
    if after is None:
        return Compared(old, new, *carry(old, new, None, None, codec, spool))
    odd = odd_whole(after)
    return Compared(old, new, *carry(old, new, after.data, None, codec, spool), odd)


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape)


class _Comparison:
    """One tensor that both checkpoints have, with one dtype and shape."""

    def __init__(
        self,
        before: Tensor,
        after: Tensor,
        codec: Encoding,
        spool: Spool,
        threads: int,
        meter: Meter,
    ) -> None:
        self._before, self._after = before, after
        self._codec, self._spool, self._meter = codec, spool, meter
        self._old_hash, self._new_hash = hasher(threads), hasher(threads)
        self._old = before.bits
        self._new = after.bits
        self._dtype = before.dtype
        self._blocks: list[EncodedBlock] = []
        self._old_sum = self._new_sum = 0
        self._changed = Changed(after.name, after.dtype)

    def run(self) -> Compared:
        for start in range(0, self._old.size, BLOCK):
            self._block(start)
        old = self._state(self._before, self._old_hash)
        new = self._state(self._after, self._new_hash)
        sparse = Sparse(self._blocks, self._old_sum, self._new_sum)
        carried = carry(old, new, self._after.data, sparse, self._codec, self._spool)
        odd = self._changed.odd(self._new) if self._blocks else None
        return Compared(old, new, *carried, odd)

    @staticmethod
    def _state(tensor: Tensor, digest: Any) -> TensorState:
        return TensorState(tensor.name, tensor.dtype, tensor.shape, digest.hexdigest())

    def _block(self, start: int) -> None:
        """Digest and compare one block chunk by chunk, then encode what changed in it."""
        stop = min(start + BLOCK, self._old.size)
        chunk = _CHUNK // self._old.itemsize
        found = [self._chunk(at, min(at + chunk, stop), start) for at in range(start, stop, chunk)]
        positions = np.concatenate([changes.positions for changes in found])
        if not positions.size:
            return
        before = np.concatenate([changes.before for changes in found])
        after = np.concatenate([changes.after for changes in found])
        self._changed.see(before, after)
        streams = self._codec.encode(self._old[start:stop], positions, before, after, self._dtype)
        segments = tuple(map(self._spool.append, streams))
        self._blocks.append(EncodedBlock(start // BLOCK, positions.size, segments))

    def _chunk(self, at: int, end: int, start: int) -> Changes:
        """What changed from element ``at`` to ``end``, all while it is in cache; positions from
        ``start`` on."""
        old, new = self._old[at:end], self._new[at:end]
        self._old_hash.update(old.view(np.uint8))
        self._new_hash.update(new.view(np.uint8))
        found = changes_between(old, new, at - start, at)
        self._old_sum += found.old_sum
        self._new_sum += found.new_sum
        self._meter.add(old.nbytes + new.nbytes)
        return found


def report_of(
    encoding: str, compared: Sequence[Compared], total_elements: int, checkpoint_bytes: int
) -> DiffReport:
    """The report on all tensors of base and result, in order of name, before the delta is written.

    ``total_elements``, ``checkpoint_bytes``: of the result.
    """
    after = tuple(c.after for c in compared if c.after is not None)
    records = tuple(
        replace(c.record, nbytes=sum(part.nbytes for part in c.parts))
        for c in compared
        if c.record is not None
    )
    return DiffReport(
        encoding=encoding,
        base_state=state_digest(c.before for c in compared if c.before is not None),
        result_state=state_digest(after),
        total_elements=total_elements,
        changed_elements=sum(record.changed for record in records),
        delta_bytes=0,
        checkpoint_bytes=checkpoint_bytes,
        records=records,
        result_tensors=after,
        notes=_odd(compared),
    )


def _odd(compared: Sequence[Compared]) -> tuple[str, ...]:
    floating = sum(c.after is not None and is_floating(c.after.dtype) for c in compared)
    both = ((c.before, c.after) for c in compared if c.before is not None and c.after is not None)
    return sentences([c.odd for c in compared if c.odd is not None], floating) + exchanged(both)


class DeltaWriter:
    """Lays the file out, and writes the header last, when the payload's digest is known.

    ``compared``: as the report was made of.
    """

    def __init__(
        self,
        report: DiffReport,
        compared: Iterable[Compared],
        step: int | None,
        base_step: int | None,
    ) -> None:
        self._metadata = delta_metadata(
            report.records,
            encoding=report.encoding,
            base_state=report.base_state,
            result_state=report.result_state,
            total_elements=report.total_elements,
            step=step,
            base_step=base_step,
        )
        keyed = [
            (c.record.name + part.suffix, part)
            for c in compared
            if c.record is not None
            for part in c.parts
        ]
        # Widest elements first, so that each entry is aligned to its own width.
        self._parts = sorted(keyed, key=lambda kp: (-DTYPES[kp[1].dtype].bits, utf8(kp[0])))

    def _header(self, payload_digest: str) -> bytes:
        entries = [(key, part.dtype, part.shape) for key, part in self._parts]
        metadata = self._metadata | {PREFIX + "payload_digest": payload_digest}
        return make_header(entries, metadata)

    def write(self, file: IO[bytes] | None) -> int:
        """Write the delta where ``file`` stands, if there is one; returns its size in bytes."""
        size = len(self._header(PLACEHOLDER)) + sum(part.nbytes for _, part in self._parts)
        if file is None:
            return size
        start = file.tell()
        file.write(self._header(PLACEHOLDER))
        digest = hasher()
        for _, part in self._parts:
            for piece in part.pieces:
                digest.update(piece)
                file.write(piece)
        end = file.tell()
        file.seek(start)
        file.write(seal(self._header(digest.hexdigest())))
        file.seek(end)
        return end - start
