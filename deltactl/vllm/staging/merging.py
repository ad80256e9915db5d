"""What a run of deltas makes of one tensor, given only live bits at the positions that they change.

Block by block the positions of all links are united and the live bits gathered there. Then link
after link is decoded against the bits that the one before leaves, and its touch sums of old and new
bits are taken on the way: whatever link the live weights do not stand on, its sum tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deltactl.codec.base import BLOCK, BlockChanges, Decoder, unseen
from deltactl.codec.bits import Bits, Bytes, Positions, touch_sum
from deltactl.core.errors import Conflict, Unsupported
from deltactl.format.delta import Delta
from deltactl.format.header import Record
from deltactl.vllm.layout.regions import Located, TensorSpec

_MASK = (1 << 64) - 1

Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class TouchSums:
    """Touch sums of the bits before and after a link, modulo 2^64, and of how many elements."""

    old: int = 0
    new: int = 0
    count: int = 0

    def add(self, old: int, new: int, count: int) -> None:
        self.old = (self.old + old) & _MASK
        self.new = (self.new + new) & _MASK
        self.count += count


@dataclass(frozen=True, slots=True)
class Layer:
    """One link's change to a tensor: ``decoder`` for a sparse one, ``whole`` bytes for a dense one.

    ``link``: its number in the run. ``owned``: sums over the elements that this rank answers for;
    ``held``: over all that it has.
    """

    link: int
    record: Record
    decoder: Decoder | None = None
    whole: Bytes | None = None
    owned: TouchSums = field(default_factory=TouchSums)
    held: TouchSums = field(default_factory=TouchSums)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Bits at the positions asked for, 0 where this rank has none; which of them it has, and which
    of them it owns; and where it has them."""

    bits: Bits
    held: Flags
    owned: Flags
    places: Sequence[Located]


Gather = Callable[[Positions], Gathered | None]
"""Of positions in a tensor, rising; None where this rank has none of them."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A block after all links: positions in the tensor, rising, what was found there, and the bits
    after. Those of elements that this rank does not have mean nothing."""

    positions: Positions
    found: Gathered
    new: Bits


def layers_of(spec: TensorSpec, deltas: Sequence[Delta]) -> list[Layer]:
    """What the links do to a tensor that the server holds, in order.

    Raises Unsupported where a link gives it another form, Conflict where it expects another,
    Malformed.
    """
    found = []
    for number, delta in enumerate(deltas):
        record = delta.records.get(spec.name)
        if record is None:
            continue
        check_form(delta, record, spec)
        if record.whole:
            found.append(Layer(number, record, whole=delta.whole(spec.name)))
        else:
            found.append(Layer(number, record, delta.decoder(spec.name, spec.dtype, spec.elements)))
    return found


def check_form(delta: Delta, record: Record, spec: TensorSpec | None) -> None:
    """Raise Unsupported unless the record changes nothing but bits, Conflict unless it counts on
    the dtype and shape that the server's model was made from."""
    if record.kind in ("added", "removed") or record.replaced:
        what = "is there in another form" if record.replaced else f"is {record.kind}"
        raise Unsupported(
            f"with the link the tensor {what}, which a running server cannot follow",
            file=delta.path,
            tensor=record.name,
            step=delta.header.step,
            hint="pull the step, and start the server anew on it",
        )
    if spec is None or (record.dtype, record.shape) == (spec.dtype, spec.shape):
        return
    raise Conflict(
        "the server's model has the tensor in another form than the link expects",
        file=delta.path,
        tensor=record.name,
        step=delta.header.step,
        expected=f"{record.dtype} {list(record.shape or ())}",
        found=f"{spec.dtype} {list(spec.shape)}",
    )


def merged_blocks(
    layers: Sequence[Layer], spec: TensorSpec, count: int, gather: Gather, base: Bits | None
) -> Iterator[Merged]:
    """The blocks that sparse layers change and this rank has a part of; the layers' sums are added
    to.

    ``count``: elements of the tensor. ``base``: all of them in the state before the first layer,
    for encodings that need it. Raises Malformed.
    """
    for number in sorted({n for layer in layers for n in _decoder(layer).numbers()}):
        length = min(BLOCK, count - number * BLOCK)
        changes = _decode(layers, number, spec.dtype, length, base)
        start = number * BLOCK
        positions = [change.positions for change in changes]
        united = _united(positions)
        found = gather(united + start)
        if found is not None:
            new = _follow(layers, changes, positions, united, found, start)
            yield Merged(united + start, found, new)


def _decoder(layer: Layer) -> Decoder:
    assert layer.decoder is not None
    return layer.decoder


def _decode(
    layers: Sequence[Layer], number: int, dtype: str, length: int, base: Bits | None
) -> list[BlockChanges]:
    """Each layer's changes to a block; on a copy of the base's where one of them needs that."""
    if not any(_decoder(layer).needs_base for layer in layers):
        nothing = unseen(dtype, length)
        return [_decoder(layer).block(number, nothing) for layer in layers]
    assert base is not None
    block = base[number * BLOCK : number * BLOCK + length].copy()
    found = []
    for layer in layers:
        changes = _decoder(layer).block(number, block)
        changes.put(block, 0)
        found.append(changes)
    return found


def _united(positions: Sequence[Positions]) -> Positions:
    """All positions, rising, each once."""
    if len(positions) == 1:
        return positions[0]
    merged = np.sort(np.concatenate(positions), kind="stable")  # which merges runs that rise
    first = np.ones(merged.size, np.bool_)
    np.not_equal(merged[1:], merged[:-1], out=first[1:])
    return merged[first]


def _follow(
    layers: Sequence[Layer],
    changes: Sequence[BlockChanges],
    positions: Sequence[Positions],
    united: Positions,
    found: Gathered,
    start: int,
) -> Bits:
    """The bits at the united positions after all layers, each of which changes ``positions``;
    ``start``: the block's first element."""
    current = found.bits.copy()
    for layer, change, own in zip(layers, changes, positions, strict=True):
        every = own.size == united.size
        at: slice | Positions = slice(None) if every else np.searchsorted(united, own)
        before = current[at]
        after = change.new_bits(before)
        owned, held = found.owned[at], found.held[at]
        sums = _sums(own, before, after, owned, start)
        layer.owned.add(*sums)
        if not np.array_equal(owned, held):
            sums = _sums(own, before, after, held, start)
        layer.held.add(*sums)
        current[at] = after
    return current


def _sums(
    positions: Positions, before: Bits, after: Bits, chosen: Flags, start: int
) -> tuple[int, int, int]:
    if not chosen.all():
        positions, before, after = positions[chosen], before[chosen], after[chosen]
    old, new = touch_sum(positions, before, start), touch_sum(positions, after, start)
    return old, new, positions.size
