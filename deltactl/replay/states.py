"""The states that deltas lead to, tensor by tensor and block by block, without a state in memory.

Of each tensor, block after block, every delta's changes are decoded; then chunk by chunk, so that
all stays in cache, the base is copied and they are put on it in turn: however many deltas, each
element is read and written once, and the last writer of an element wins. So catching up costs what
changed, and memory is a block's changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.codec.base import BLOCK, BlockChanges, Decoder
from deltactl.codec.bits import Bits, Bytes, elements
from deltactl.codec.room import room_for
from deltactl.core.dtypes import element_bytes, elements_of
from deltactl.core.errors import Conflict
from deltactl.format.delta import Delta
from deltactl.format.header import Record, utf8


class LayerWatch(Protocol):
    """Sees each chunk before and after each layer; the arrays are only valid during the call.

    ``number``: the layer's; ``changes``: the block's; ``index``: the place of the block's first
    element in the tensor; ``start``: that of the chunk's in the block.
    """

    def before(
        self, number: int, changes: BlockChanges, index: int, start: int, chunk: Bits
    ) -> None: ...
    def after(
        self, number: int, changes: BlockChanges, index: int, start: int, chunk: Bits
    ) -> None: ...


CHUNK = 1 << 20
"""Bytes handled together: less costs more calls, more leaves the cache."""


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """One delta's changes to a tensor; ``number`` is the delta's place in the sequence."""

    number: int
    decoder: Decoder
    record: Record


@dataclass(slots=True)
class Stack:
    """A tensor's content as one delta or the base gives it whole, and the sparse changes upon it.

    ``origin``: the number of the delta that carries it whole; -1 for the base.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Bytes
    origin: int = -1
    layers: list[SparseLayer] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return int(self.data.size)

    def chunks(self, watch: LayerWatch | None = None) -> Iterator[tuple[int, Bits]]:
        """Each chunk's byte offset and final elements; the array is valid until the next.

        ``watch`` sees the chunk before and after each layer too. Raises Malformed.
        """
        source = elements(self.data, self.dtype)
        width = element_bytes(self.dtype)
        for start in range(0, source.size, BLOCK):
            block = source[start : start + BLOCK]
            for at, chunk in self._block(start // BLOCK, block, watch):
                yield (start + at) * width, chunk

    def _block(
        self, number: int, block: Bits, watch: LayerWatch | None
    ) -> Iterator[tuple[int, Bits]]:
        """Where each chunk begins in the block, and its final elements."""
        size = CHUNK // block.itemsize
        counts = [layer.decoder.count_in(number) for layer in self.layers]
        # Some layers are decoded by the block that the last one left, and many large ones are not
        # to be held at once.
        needs_base = any(layer.decoder.needs_base for layer in self.layers[1:])
        if needs_base or (len(counts) > 1 and sum(counts) > BLOCK):
            whole = block.copy()
            for layer, count in zip(self.layers, counts, strict=True):
                with room_for(count):
                    changes = layer.decoder.block(number, whole)
                    for at in range(0, whole.size, size):
                        piece = whole[at : at + size]
                        _put_watched(watch, layer.number, changes, number, at, piece)
                    del changes
            yield 0, whole
            return
        with room_for(sum(counts)):
            yield from self._in_chunks(number, block, watch)

    def _in_chunks(
        self, number: int, block: Bits, watch: LayerWatch | None
    ) -> Iterator[tuple[int, Bits]]:
        """The same, by all layers' changes, a piece that stays in cache at a time."""
        decoded = [(layer.number, layer.decoder.block(number, block)) for layer in self.layers]
        size = CHUNK // block.itemsize
        buffer = np.empty(min(size, block.size), block.dtype)
        for at in range(0, block.size, size):
            chunk = buffer[: min(size, block.size - at)]
            np.copyto(chunk, block[at : at + size])
            for layer_number, changes in decoded:
                _put_watched(watch, layer_number, changes, number, at, chunk)
            yield at, chunk


def _put_watched(
    watch: LayerWatch | None, layer: int, changes: BlockChanges, block: int, at: int, chunk: Bits
) -> None:
    if watch is None:
        changes.put(chunk, at)
        return
    watch.before(layer, changes, block * BLOCK, at, chunk)
    changes.put(chunk, at)
    watch.after(layer, changes, block * BLOCK, at, chunk)


def stacks(base: Checkpoint, deltas: Sequence[Delta]) -> dict[str, list[Stack]]:
    """For every tensor that ever existed, its stacks in order: a new one wherever a delta carries
    it whole or removes it (then the list ends with an empty marker of ``dtype`` "").

    Raises Conflict where a delta cannot stand on what comes before, Malformed.
    """
    found = {
        name: [Stack(name, tensor.dtype, tensor.shape, tensor.data)]
        for name, tensor in base.tensors.items()
    }
    for number, delta in enumerate(deltas):
        for record in delta.records.values():
            _put(found.setdefault(record.name, []), number, delta, record)
    return found


def final_stacks(base: Checkpoint, deltas: Sequence[Delta]) -> dict[str, Stack]:
    """The last stack of every tensor that exists after all deltas, in order of name."""
    last = {name: of_tensor[-1] for name, of_tensor in stacks(base, deltas).items()}
    return {name: last[name] for name in sorted(last, key=utf8) if last[name].dtype}


def _put(of_tensor: list[Stack], number: int, delta: Delta, record: Record) -> None:
    current = of_tensor[-1] if of_tensor and of_tensor[-1].dtype else None
    _check_stands(current, delta, record)
    if record.kind == "removed":
        of_tensor.append(Stack(record.name, "", (), np.empty(0, np.uint8), number))
    elif record.whole:
        assert record.dtype is not None and record.shape is not None
        data = delta.whole(record.name)
        of_tensor.append(Stack(record.name, record.dtype, record.shape, data, number))
    else:
        assert current is not None
        count = elements_of(current.dtype, current.shape)
        decoder = delta.decoder(record.name, current.dtype, count)
        current.layers.append(SparseLayer(number, decoder, record))


def _check_stands(current: Stack | None, delta: Delta, record: Record) -> None:
    """Raise Conflict where the base has, lacks, or has otherwise what the delta counts on."""
    found = None if current is None else (current.dtype, current.shape)
    if record.fits(found):
        return
    raise Conflict(
        "wrong base: it does not have this tensor as the delta expects it",
        file=delta.path,
        tensor=record.name,
        step=delta.header.step,
        expected=_describe(record.base_form),
        found=_describe(found),
    )


def _describe(tensor: tuple[str | None, tuple[int, ...] | None] | None) -> str:
    if tensor is None:
        return "no such tensor"
    dtype, shape = tensor
    return f"a tensor of {dtype}" if shape is None else f"{dtype} {list(shape)}"
