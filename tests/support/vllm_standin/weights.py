"""Live weights in memory, and what a link makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from deltactl.bucket import open_bucket
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.codec.base import BLOCK
from deltactl.codec.bits import Bits, elements, touch_sum
from deltactl.core.digest import TensorState, hasher, state_digest
from deltactl.core.errors import Conflict, NotFound
from deltactl.format.delta import Delta, open_delta
from deltactl.ops.pull import pull


@dataclass
class Live:
    """One tensor: its elements are written in place."""

    dtype: str
    shape: tuple[int, ...]
    bits: Bits


Tensors = dict[str, Live]


def load(path: Path) -> Tensors:
    with open_checkpoint(path) as checkpoint:
        return {
            name: Live(t.dtype, t.shape, elements(np.array(t.data), t.dtype))
            for name, t in checkpoint.tensors.items()
        }


def state(tensors: Tensors) -> str:
    """The state digest of what is live."""
    rows = []
    for name, live in tensors.items():
        digest = hasher().update(live.bits.tobytes()).hexdigest()
        rows.append(TensorState(name, live.dtype, live.shape, digest))
    return state_digest(rows)


def part(size: int, rank: int, ranks: int) -> slice:
    """The elements of a tensor that a rank holds."""
    return slice(size * rank // ranks, size * (rank + 1) // ranks)


def part_sum(bits: Bits, which: slice) -> int:
    """Touch sum over all elements of a part."""
    at = np.arange(which.start, which.stop, dtype=np.int64)
    return touch_sum(at, bits[which]) % (1 << 64)


@dataclass
class Row:
    """One tensor of one link: the changed positions, bits before and after, and what the header
    says they add up to."""

    name: str
    positions: np.ndarray
    old: Bits
    new: Bits
    expected: tuple[int | None, int | None, int]

    def sums(self, size: int, rank: int, ranks: int) -> tuple[int, int, int]:
        """(old, new, count) of a rank's part."""
        which = part(size, rank, ranks)
        mine = (self.positions >= which.start) & (self.positions < which.stop)
        at = self.positions[mine]
        old, new = touch_sum(at, self.old[mine]), touch_sum(at, self.new[mine])
        return old % (1 << 64), new % (1 << 64), int(mine.sum())


@dataclass
class Staged:
    """Elements to write, by tensor, and the rows that prove them."""

    before: dict[str, Bits] = field(default_factory=dict)
    after: dict[str, Bits] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    fetched: int = 0

    def check(self, tensors: Tensors) -> bool:
        return all(np.array_equal(tensors[n].bits, bits) for n, bits in self.before.items())

    def write(self, tensors: Tensors, which: dict[str, Bits] | None = None) -> None:
        for name, bits in (self.after if which is None else which).items():
            tensors[name].bits[:] = bits


def stage_deltas(tensors: Tensors, bucket: str, names: Sequence[str]) -> Staged:
    """What the links make of what is live."""
    staged, opened = Staged(), open_bucket(bucket)
    for name in names:
        path = opened.path(name)
        if path is None or not path.exists():
            raise NotFound("no such link", file=name)
        delta = open_delta(path)
        delta.check_payload()
        staged.fetched += path.stat().st_size
        for record in delta.records.values():
            if record.kind in ("added", "removed") or record.replaced:
                raise Conflict("the structure changes", tensor=record.name)
            _stage_record(tensors, delta, record.name, staged)
    return staged


def _stage_record(tensors: Tensors, delta: Delta, name: str, staged: Staged) -> None:
    live, record = tensors[name], delta.records[name]
    old = staged.after.get(name, live.bits)
    new = old.copy()
    if record.whole:
        new[:] = elements(np.array(delta.whole(name)), live.dtype)
        positions = np.arange(new.size, dtype=np.int64)
        expected: tuple[int | None, int | None, int] = (None, None, new.size)
    else:
        decoder = delta.decoder(name, live.dtype, new.size)
        found = [np.empty(0, np.int64)]
        for number in decoder.numbers():
            block = slice(number * BLOCK, (number + 1) * BLOCK)
            changes = decoder.block(number, old[block])
            changes.put(new[block], 0)
            found.append(changes.positions.astype(np.int64) + number * BLOCK)
        positions = np.concatenate(found)
        expected = (record.old_sum, record.new_sum, record.changed)
    staged.rows.append(Row(name, positions, old[positions], new[positions], expected))
    staged.before.setdefault(name, live.bits.copy())
    staged.after[name] = new


def stage_full(tensors: Tensors, bucket: str, step: int, scratch: Path) -> Staged:
    """Every tensor of a step, whatever is live."""
    report = pull(open_bucket(bucket), scratch, step=step)
    staged = Staged(fetched=report.bytes_fetched)
    for name, live in load(scratch).items():
        if name not in tensors or tensors[name].shape != live.shape:
            raise Conflict("the model has no such tensor", tensor=name)
        staged.after[name] = live.bits
    return staged
