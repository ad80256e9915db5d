"""Whether the live weights are what a run of links stands on, told by sums added over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from deltactl.core.errors import Conflict, Malformed
from deltactl.format.delta import Delta
from deltactl.format.header import Record
from deltactl.vllm.staging.merging import Layer

Standing = Literal["ready", "already"]

_COLUMNS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """A link's record of a tensor, and the link's number."""

    link: int
    delta: Delta
    record: Record

    @property
    def count(self) -> int:
        """The elements that the ranks have to find: of a tensor carried whole, all."""
        return (self.record.elements or 0) if self.record.whole else self.record.changed


class Sums:
    """What one rank found, a row for each link and tensor, the same rows on every rank.

    ``values``, int64, (rows, 5): touch sums of the bits before and after over elements that the
    rank owns, and how many they are; then of ranks that hold all changed elements of the tensor
    1 where they are not the link's old ones, and 1 where they are not its new ones. Values of all
    ranks are to be added, modulo 2^64.
    """

    def __init__(self, rows: Iterable[tuple[int, Delta, Record]]) -> None:
        self.rows = tuple(Row(*row) for row in rows)
        self.values: npt.NDArray[np.int64] = np.zeros((len(self.rows), _COLUMNS), np.int64)
        self._places = {(row.link, row.record.name): n for n, row in enumerate(self.rows)}

    def enter(self, layers: Sequence[Layer]) -> None:
        """Note what was found of one tensor."""
        for layer in layers:
            record, held = layer.record, layer.held
            complete = not record.whole and held.count == record.changed
            was_old = (held.old, held.new) == (record.old_sum, record.new_sum)
            was_new = held.old == record.new_sum
            found = (
                layer.owned.old,
                layer.owned.new,
                layer.owned.count,
                int(complete and not was_old),
                int(complete and not was_new),
            )
            row = self.values[self._places[layer.link, record.name]]
            row[:] = np.array(found, np.uint64).view(np.int64)

    def judge(self, total: npt.NDArray[np.int64]) -> Standing:
        """What the sums over all ranks say of the live weights: that they are what the first link
        stands on, or what a single link leads to.

        """
        found = [self._read(row, values) for row, values in zip(self.rows, total, strict=True)]
        for row, one in zip(self.rows, found, strict=True):
            if one.count != row.count:
                raise self._incomplete(row, one)
        if len({row.link for row in self.rows}) == 1 and all(one.is_new for one in found):
            return "already"
        for row, one in zip(self.rows, found, strict=True):
            if not one.is_old:
                raise self._another(row, one)
        return "ready"

    def _read(self, row: Row, values: npt.NDArray[np.int64]) -> _Total:
        old, new, count, not_old, not_new = (int(value) for value in values.view(np.uint64))
        record = row.record
        if record.whole:
            return _Total(old, new, count, True, old == new)
        is_old = (old, new) == (record.old_sum, record.new_sum) and not not_old
        return _Total(old, new, count, is_old, old == record.new_sum and not not_new)

    def _incomplete(self, row: Row, found: _Total) -> Conflict:
        return Conflict(
            "the server's ranks do not have all of the tensor between them"
            if found.count
            else "the server's model has no such tensor",
            file=row.delta.path,
            tensor=row.record.name,
            step=row.delta.header.step,
            expected=f"{row.count} elements",
            found=f"{found.count} elements",
            hint="pull the step, and start the server anew on it",
        )

    def _another(self, row: Row, found: _Total) -> Conflict | Malformed:
        record, delta = row.record, row.delta
        if found.old == record.old_sum and found.new != record.new_sum:
            return Malformed(
                "the link's changes are not those that its header tells of",
                file=delta.path,
                tensor=record.name,
                step=delta.header.step,
                expected=f"touch sum {record.new_sum:016x}",
                found=f"touch sum {found.new:016x}",
                hint="deltactl verify BUCKET --level data",
            )
        return Conflict(
            "the live weights are not what the link stands on",
            file=delta.path,
            tensor=record.name,
            step=delta.header.step,
            expected=f"touch sum {record.old_sum:016x}, state {delta.header.base_state}",
            found=f"touch sum {found.old:016x}",
            hint="write every tensor anew: deltactl apply BUCKET@STEP --server URL --repair",
        )


@dataclass(frozen=True, slots=True)
class _Total:
    old: int
    new: int
    count: int
    is_old: bool
    is_new: bool
