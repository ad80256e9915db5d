"""One tensor's part of the whole, and the sum over tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from deltactl.codec import ENCODINGS
from deltactl.codec.absolute import gap_dtype, index_dtype
from deltactl.codec.bits import Positions
from deltactl.core.dtypes import element_bytes
from deltactl.ops.stats.histograms import ExponentCounts, StepCounts
from deltactl.ops.stats.report import Sizes, Source, Stats, TensorStats, share_kept, total

ABSOLUTE = ("raw", "gap_delta")
"""The encodings whose size follows from the positions alone."""


@dataclass(slots=True)
class Measured:
    """What was found of one tensor. ``sizes``: payload bytes by encoding."""

    row: TensorStats
    sizes: Sizes
    steps: StepCounts = field(default_factory=StepCounts)
    exponents: ExponentCounts = field(default_factory=ExponentCounts)


def same_in_all(size: int) -> Sizes:
    """A size that does not depend on the encoding."""
    return dict.fromkeys(ENCODINGS, size)


def together(
    found: Iterable[Measured],
    source: Source,
    *,
    total_elements: int | None,
    dense: int | None,
    encoding: str | None = None,
) -> Stats:
    """Add up tensors. ``dense``: bytes of the whole result, as far as they are known."""
    found = list(found)
    steps, exponents = StepCounts(), ExponentCounts()
    for measured in found:
        steps.merge(measured.steps)
        exponents.merge(measured.exponents)
    changed = sum(measured.row.changed for measured in found)
    sizes: dict[str, int | None] = {"dense": dense}
    for name in ENCODINGS:
        sizes[name] = total(measured.sizes[name] for measured in found)
    return Stats(
        source=source,
        encoding=encoding,
        changed_elements=changed,
        total_elements=total_elements,
        sparsity=share_kept(changed, total_elements),
        tensors=tuple(measured.row for measured in found),
        sizes=sizes,
        steps=steps,
        exponents=exponents,
    )


class Gaps:
    """Changed positions as they come in order: how many, and the widest gap between two."""

    def __init__(self) -> None:
        self.count = 0
        self._last, self._widest = -1, 0

    def add(self, positions: Positions, start: int) -> None:
        """Positions, shape (n,), strictly rising, in a block that begins at element ``start``."""
        if not positions.size:
            return
        first = int(positions[0]) + start - self._last
        between = int(np.diff(positions).max()) if positions.size > 1 else 0
        self._widest = max(self._widest, first - 1, between - 1)
        self._last = int(positions[-1]) + start
        self.count += positions.size

    def size(self, encoding: str, dtype: str, elements: int | None) -> int:
        """Bytes in one of ABSOLUTE; ``elements``: the tensor's, None where they are not known."""
        if encoding == "raw":
            return raw_bytes(self.count, dtype, elements or self._last + 1)
        return self.count * (element_bytes(gap_dtype(self._widest)) + element_bytes(dtype))


def raw_bytes(changed: int, dtype: str, elements: int) -> int:
    """Bytes of ``changed`` elements of a tensor in raw."""
    return changed * (element_bytes(index_dtype(elements)) + element_bytes(dtype))


def all_gaps_bytes(changed: int, dtype: str) -> int:
    """Bytes of a tensor in gap_delta of which all elements change."""
    return changed * (element_bytes(gap_dtype(0)) + element_bytes(dtype))
