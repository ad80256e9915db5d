"""What a delta says without its base: steps are known where the encoding has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from deltactl.codec import ENCODINGS
from deltactl.codec.base import BLOCK, Decoder, unseen
from deltactl.codec.bits import Bits, Positions
from deltactl.codec.room import room_for
from deltactl.codec.ulp import UlpDecoder
from deltactl.codec.ulp_ctx import UlpCtxDecoder
from deltactl.core.dtypes import FLOATS
from deltactl.core.progress import Meter, Progress, silent
from deltactl.files.parallel import map_largest_first
from deltactl.format.delta import Delta
from deltactl.format.header import Record
from deltactl.ops.stats.histograms import StepCounts
from deltactl.ops.stats.measured import (
    ABSOLUTE,
    Gaps,
    Measured,
    all_gaps_bytes,
    raw_bytes,
    same_in_all,
    together,
)
from deltactl.ops.stats.report import Stats, Status, TensorStats

_PIECE = 1 << 19  # positions looked at together
_MOST_ELEMENTS = 1 << 48  # bounds the indices of a delta that does not say its tensors' sizes


def stats_delta(delta: Delta, progress: Progress = silent) -> Stats:
    """What a delta says of itself, without its base. Its tensors are those that it changes.

    The payload is checked first, where it has a digest. Raises Malformed.
    """
    header = delta.header
    if header.has_digests:
        delta.check_payload()
    records = list(delta.records.values())
    meter = Meter(progress, "measuring", sum(record.nbytes for record in records))

    def work(record: Record) -> Measured:
        measured = _measure(delta, record)
        meter.add(record.nbytes)
        return measured

    stats = together(
        map_largest_first(work, records, lambda record: record.nbytes),
        "delta",
        total_elements=header.total_elements,
        dense=None,
        encoding=header.encoding,
    )
    assert stats.steps is not None
    stats.steps.sign_flips = None
    return replace(
        stats, steps=stats.steps if header.encoding not in ABSOLUTE else None, exponents=None
    )


def _measure(delta: Delta, record: Record) -> Measured:
    row = row_of(record)
    if row.status != "changed":
        return Measured(row, same_in_all(record.nbytes))
    if record.kind == "sparse":
        return _measure_sparse(delta, record, row)
    assert record.dtype is not None
    sizes: dict[str, int | None] = dict.fromkeys(ENCODINGS)
    sizes["raw"] = raw_bytes(record.changed, record.dtype, record.elements or 0)
    if record.changed == record.elements:  # else the positions are not known
        sizes["gap_delta"] = all_gaps_bytes(record.changed, record.dtype)
    sizes[delta.header.encoding] = record.nbytes
    return Measured(row, sizes)


def row_of(record: Record) -> TensorStats:
    """One tensor that a delta changes."""
    status: Status = "changed"
    if record.kind == "added":
        status = "added"
    elif record.kind == "removed":
        status = "removed"
    elif record.replaced:
        status = "replaced"
    seen = 0 if status == "removed" else record.elements
    return TensorStats(
        record.name, status, record.dtype, record.shape, record.elements, record.changed, seen
    )


def _measure_sparse(delta: Delta, record: Record, row: TensorStats) -> Measured:
    dtype, count = record.dtype, record.elements
    assert dtype is not None
    limit = count if count is not None else delta.header.total_elements or _MOST_ELEMENTS
    decoder = delta.decoder(record.name, dtype, limit)
    gaps, steps = Gaps(), StepCounts()
    for number in decoder.numbers():
        start = number * BLOCK
        length = min(BLOCK, limit - start)
        with room_for(decoder.count_in(number)):
            if isinstance(decoder, UlpDecoder | UlpCtxDecoder):
                found = decoder.steps(number, length)
                if dtype in FLOATS:
                    steps.add_all(found)
                del found  # before the positions take as much
            for at in _positions(decoder, number, unseen(dtype, length)):
                gaps.add(at, start)
    sizes: dict[str, int | None] = dict.fromkeys(ENCODINGS)
    if decoder.needs_base:
        sizes["raw"] = raw_bytes(decoder.count, dtype, limit)
    for name in () if decoder.needs_base else ABSOLUTE:
        sizes[name] = gaps.size(name, dtype, count)
    sizes[delta.header.encoding] = record.nbytes
    return Measured(row, sizes, steps)


def _positions(decoder: Decoder, number: int, nothing: Bits) -> Iterator[Positions]:
    """A block's positions, rising, some at a time; none where only its base tells them."""
    if isinstance(decoder, UlpDecoder):
        places = decoder.places(number, nothing.size)
        for first in range(0, places.size, _PIECE):
            yield places[first : first + _PIECE].astype(np.int64)
    elif not decoder.needs_base:
        yield decoder.block(number, nothing).positions
