"""What changed since the last capture, from the ranks that hold it to those that write it.

Each rank watches parts of tensors, and compares them with its mirror of those. It sends what
changed to the tensors' owners: bits and positions, so much as has changed. The owner has a mirror
of its whole tensors, and so knows the bits before. Nobody has the model.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltactl.codec.base import BLOCK
from deltactl.codec.bits import Bits, Positions, elements, touch_sum
from deltactl.core.errors import Malformed, UsageError
from deltactl.trainer.capture.capture import Capture, Capturer, ChunkChange, TensorChange, match
from deltactl.trainer.capture.mirror import Mirror
from deltactl.trainer.model.tensors import Live, live_tensors
from deltactl.trainer.ranks.group import Group
from deltactl.trainer.ranks.layout import Layout, Part, Placed
from deltactl.trainer.ranks.piece import local_of, piece_of

_HEAD = struct.Struct("<QQQ")  # the tensor's number; whether all of the part follows; elements
_NARROW = 1 << 32  # elements of a tensor, up to which a position takes 4 bytes


def describe(tensors: Mapping[str, torch.Tensor], dtype: str | None) -> dict[str, Part]:
    """What this rank holds, as it is published. Raises as ``live_tensors`` and ``piece_of``."""
    pieces = {name: piece_of(tensor) for name, tensor in tensors.items()}
    live = _live(tensors, [name for name, piece in pieces.items() if piece is not None], dtype)
    return {name: Part(live[name].dtype, piece) for name, piece in pieces.items() if piece}


def _live(
    tensors: Mapping[str, torch.Tensor], names: Sequence[str], dtype: str | None
) -> dict[str, Live]:
    return live_tensors({name: local_of(tensors[name]) for name in names}, dtype)


@dataclass(slots=True)
class Sent:
    """What this rank's parts gave, and what it got for the tensors that it owns, by sender."""

    parts: Capture
    received: list[bytes]


class Parts:
    """The parts that this rank watches, and the mirror of them."""

    def __init__(self, layout: Layout, mirror: Mirror) -> None:
        self._layout = layout
        self._capturer = Capturer(mirror)

    def capture(
        self,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        dtype: str | None,
        group: Group,
    ) -> Sent:
        """Take what changed and send it to the owners. Collective, of the size of what changed.

        Where that fails on any rank it raises on all, and the mirrors are as they were.
        """
        parts: Capture | None = None
        outgoing, fault = None, None
        try:
            parts = self._capturer.capture(self._watched(tensors(), dtype))
            outgoing = self._outgoing(parts, group.size)
        except Exception as error:  # the others have to hear of it, or they would wait for ever
            fault = error
        try:
            received = group.exchange(outgoing)
        except BaseException:
            if parts is not None:
                parts.undo()
            raise
        if parts is None or received is None:
            if parts is not None:
                parts.undo()
            raise fault or RuntimeError("another rank could not take what changed")
        return Sent(parts, received)

    def _watched(self, tensors: Mapping[str, torch.Tensor], dtype: str | None) -> dict[str, Live]:
        read = self._layout.read
        if missing := read.keys() - tensors.keys():
            raise _changed(min(missing), "no such tensor")
        if more := tensors.keys() - {tensor.name for tensor in self._layout.tensors}:
            raise _changed(min(more), "a new tensor")
        found = _live(tensors, list(read), dtype)
        for name, live in found.items():
            spec = live.dtype, live.shape
            placed = read[name]
            if spec != (placed.dtype, placed.readers[self._layout.rank].local_shape):
                raise _changed(name, f"{live.dtype} {list(live.shape)}")
        return found

    def _outgoing(self, parts: Capture, ranks: int) -> list[bytes]:
        """What to send to each rank."""
        found: list[list[bytes]] = [[] for _ in range(ranks)]
        for name, change in parts.changes.items():
            placed = self._layout.read[name]
            bits = parts.mirror.tensors[name].bits
            found[placed.owner] += _message(placed, self._layout.rank, change, bits)
        return [b"".join(pieces) for pieces in found]

    def close(self) -> None:
        """Let go of threads and buffers."""
        self._capturer.close()


def _changed(name: str, found: str) -> UsageError:
    return UsageError(
        "the model's tensors are others than when the publisher was made",
        tensor=name,
        found=found,
        hint="close the publisher, and make another",
    )


def _message(placed: Placed, rank: int, change: TensorChange, bits: Bits) -> Iterator[bytes]:
    if change.kind != "sparse":  # the mirror had no such part yet
        yield _HEAD.pack(placed.number, 1, bits.size)
        yield _padded(bits.tobytes())
        return
    found = [
        (chunk.start, chunk.found(bits))
        for chunk in sorted(change.chunks, key=lambda chunk: chunk.start)
    ]
    local = np.concatenate([changes.positions + start for start, changes in found])
    positions = placed.readers[rank].positions(local)
    yield _HEAD.pack(placed.number, 0, positions.size)
    yield _padded(positions.astype(_position_dtype(placed)).tobytes())
    yield _padded(np.concatenate([changes.after for _, changes in found]).tobytes())


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def _position_dtype(placed: Placed) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u4" if int(np.prod(placed.shape, dtype=object)) <= _NARROW else "<u8")


@dataclass(frozen=True, slots=True)
class _Message:
    """What a rank sent of a tensor: all of its part, or bits and their positions in the tensor."""

    source: int
    positions: Positions | None
    bits: Bits


class _Reader:
    """Messages, one after the other."""

    def __init__(self, layout: Layout, source: int, data: bytes) -> None:
        self._layout, self._source = layout, source
        self._data, self._at = np.frombuffer(data, np.uint8), 0

    def messages(self) -> Iterator[tuple[Placed, _Message]]:
        while self._at < self._data.size:
            number, whole, count = _HEAD.unpack(self._take(_HEAD.size).tobytes())
            placed = self._layout.tensors[number]
            positions = None
            if not whole:
                kind = _position_dtype(placed)
                taken = self._take(count * kind.itemsize).view(kind)
                positions = taken.astype(np.int64)
            width = elements(np.empty(8, np.uint8), placed.dtype).itemsize
            bits = elements(self._take(count * width), placed.dtype)
            yield placed, _Message(self._source, positions, bits)

    def _take(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        found = self._data[self._at : self._at + size]
        self._at += size + -size % 8
        return found


def receive(mirror: Mirror, layout: Layout, received: Sequence[bytes]) -> Capture:
    """The change of the tensors that this rank owns, and ``mirror``, of these, brought to the state
    after it. Where this raises the mirror is as it was."""
    found = Capture(mirror)
    try:
        fresh = match(found, layout.owned)
        got: dict[str, list[_Message]] = {}
        for source, data in enumerate(received):
            for placed, message in _Reader(layout, source, data).messages():
                got.setdefault(placed.name, []).append(message)
        for name in fresh:
            _fill(mirror.tensors[name].bits, layout.owned[name], got.pop(name, []))
        for name, messages in got.items():
            _change(found.changes[name], mirror.tensors[name].bits, messages)
    except BaseException:
        found.undo()
        raise
    found.settle()
    return found


def _fill(bits: Bits, placed: Placed, messages: Sequence[_Message]) -> None:
    """Put a tensor together that the mirror has no bits of yet."""
    sources = {message.source for message in messages if message.positions is None}
    if sources != placed.readers.keys():
        what = "a new tensor did not come from all ranks that hold it"
        expected, found = sorted(placed.readers), sorted(sources)
        raise Malformed(what, tensor=placed.name, expected=expected, found=found)
    for message in messages:
        placed.readers[message.source].put(bits, message.bits)


def _change(change: TensorChange, bits: Bits, messages: Sequence[_Message]) -> None:
    """Note what changed, block by block, and then put it into the mirror."""
    positions = np.concatenate([m.positions for m in messages if m.positions is not None])
    after = np.concatenate([message.bits for message in messages])
    order = np.argsort(positions)
    positions, after = positions[order], after[order]
    before = bits.take(positions)
    if (before == after).any():
        what = "a rank's mirror is of another state than the owner's"
        raise Malformed(what, tensor=change.name)
    for start in range(int(positions[0]) // BLOCK * BLOCK, int(positions[-1]) + 1, BLOCK):
        first, end = np.searchsorted(positions, (start, start + BLOCK))
        if first < end:
            within = (positions[first:end] - start).astype(np.int32)
            change.chunks.append(ChunkChange(start, within, before[first:end]))
    change.old_sum = touch_sum(positions, before)
    change.new_sum = touch_sum(positions, after)
    bits[positions] = after
