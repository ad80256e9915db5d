"""Which classes and silent segments make a block smallest: only its size depends on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltactl.codec.bits import Bits, Positions, SplitSteps
from deltactl.codec.classes import MOST_CLASSES, SEGMENT, SEGMENT_BITS, exponents

Floats = npt.NDArray[np.float64]

_SAMPLE = 1 << 19  # elements that are looked at to learn how many have each exponent
_CLASS_BITS = 120.0  # what a class costs by itself: its counts, parameters and padding


def set_bits(members: Any, total: Any) -> Any:
    """The least bits that say which of ``total`` things are members, when all are alike."""
    share = np.clip(members / np.maximum(total, 1), 1e-12, 1 - 1e-12)
    return -total * (share * np.log2(share) + (1 - share) * np.log2(1 - share))


def silent_segments(positions: Positions, length: int) -> Positions:
    """The segments without changes, where to name them costs less than it saves; else none.

    So it is where rows of an embedding have had no gradient.
    """
    segments = -(-length >> SEGMENT_BITS)
    has_change = np.zeros(segments, np.bool_)
    has_change[positions >> SEGMENT_BITS] = True
    silent = np.flatnonzero(~has_change)
    if not silent.size:
        return silent
    left = length - (silent.size << SEGMENT_BITS)
    if silent[-1] == segments - 1:
        left += -length % SEGMENT  # which it is short of
    named = set_bits(silent.size, segments) + set_bits(positions.size, max(left, positions.size))
    return silent if named + 64 < set_bits(positions.size, length) else silent[:0]


def choose_borders(base: Bits, before: Bits, steps: SplitSteps, dtype: str) -> tuple[int, ...]:
    """The exponents at which a class had best begin.

    Of all ways to cut the exponents that occur into runs, the one of least entropy, by dynamic
    programming.
    """
    sample = base[:: max(1, base.size // _SAMPLE)]
    totals = np.bincount(exponents(sample, dtype)) * (base.size / sample.size)
    of_changes = exponents(before, dtype)
    lengths = steps.beyond.astype(np.float64)
    size = max(totals.size, int(of_changes.max()) + 1)
    columns = [
        np.pad(totals, (0, size - totals.size)),
        np.bincount(of_changes, minlength=size),
        np.bincount(of_changes, weights=lengths != 0, minlength=size),
        np.bincount(of_changes, weights=lengths, minlength=size),
    ]
    table = np.stack(columns)
    table[0] = np.maximum(table[0], table[1])
    present = np.flatnonzero(table[0])
    present = present[
        :: -(-present.size // MOST_CLASSES)
    ]  # F64 may have more than classes there be
    starts = _best_runs(np.add.reduceat(table, present, axis=1))
    return tuple(present[starts[1:]].tolist())


def _best_runs(table: Floats) -> list[int]:
    """Where the runs of columns begin that cost least together."""
    sums = np.concatenate([np.zeros((4, 1)), np.cumsum(table, axis=1)], axis=1)
    count = table.shape[1]
    best, cut = np.zeros(count + 1), np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        costs = best[:end] + _run_bits(sums[:, end, None] - sums[:, :end])
        cut[end] = np.argmin(costs)
        best[end] = costs[cut[end]]
    starts = [count]
    while starts[-1]:
        starts.append(int(cut[starts[-1]]))
    return starts[:0:-1]


def _run_bits(run: Floats) -> Floats:
    """The cost of runs, one a column: elements, changes, longer steps, and units beyond one."""
    elements, changes, longer, units = run
    bits: Floats = set_bits(changes, elements) + set_bits(longer, changes)
    bits += set_bits(longer, units) + _CLASS_BITS
    return bits
