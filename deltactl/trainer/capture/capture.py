"""What changed since the last capture, taken from the live tensors in one pass.

This is the only part that training waits for. Each chunk of a live tensor is compared with the
mirror; what differs is noted, old bits and all, and put into the mirror. So the next capture finds
what came after, and a capture that cannot be published is undone: then the next one finds it again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from deltactl.chain.admission import Described
from deltactl.checkpoint.checkpoint import Tensor
from deltactl.codec.base import BLOCK
from deltactl.codec.bits import Bits, Changes, changes_between
from deltactl.core.threads import cores
from deltactl.format.header import utf8
from deltactl.trainer.capture.device import Staging, copier_for
from deltactl.trainer.capture.mirror import Mirror
from deltactl.trainer.model.tensors import Live, host_chunks

Kind = Literal["sparse", "added", "replaced", "removed"]


@dataclass(frozen=True, slots=True)
class ChunkChange:
    """What changed in one chunk. ``start``: its first element; ``positions``: from there on,
    rising, shape (k,), with ``before`` the bits there, shape (k,). Where most changed ``positions``
    is None and ``before`` all of the chunk: so a capture takes no more room than the tensors
    themselves, however much changes."""

    start: int
    positions: npt.NDArray[np.int32] | None
    before: Bits

    def undo(self, bits: Bits) -> None:
        """Put the old bits into the tensor's elements."""
        if self.positions is None:
            bits[self.start : self.start + self.before.size] = self.before
        else:
            bits[self.start :][self.positions] = self.before

    def found(self, bits: Bits) -> Changes:
        """The change against the tensor's elements as they are after it."""
        if self.positions is None:
            now = bits[self.start : self.start + self.before.size]
            return changes_between(self.before, now, 0, self.start)
        positions = self.positions.astype(np.int64)
        after = bits[self.start :].take(positions)
        return Changes(positions, self.before, after, 0, 0)


@dataclass(slots=True)
class TensorChange:
    """How one tensor differs from what was captured before. ``chunks`` and touch sums: of a sparse
    change; ``old``: the tensor that was removed, or replaced by one of another dtype or shape."""

    name: str
    kind: Kind
    chunks: list[ChunkChange] = field(default_factory=list)
    old_sum: int = 0
    new_sum: int = 0
    old: Tensor | None = None


@dataclass(slots=True)
class Capture:
    """All that changed, by name, and the mirror that now holds the state after it.

    The mirror is to be left alone until the capture has been encoded, or undone.
    """

    mirror: Mirror
    changes: dict[str, TensorChange] = field(default_factory=dict)

    def undo(self) -> None:
        """Bring the mirror back to the state before; also from a capture that was broken off."""
        for change in self.changes.values():
            if change.kind in ("added", "replaced"):
                self.mirror.take(change.name)
            if change.old is not None:
                self.mirror.put(change.old)
            if change.kind == "sparse":
                bits = self.mirror.tensors[change.name].bits
                for chunk in change.chunks:
                    chunk.undo(bits)
        self.changes = {}

    def settle(self) -> None:
        """Keep what changed alone, in order of name."""
        self.changes = {
            name: self.changes[name]
            for name in sorted(self.changes, key=utf8)
            if self.changes[name].kind != "sparse" or self.changes[name].chunks
        }


class Capturer:
    """Captures into one mirror, on all cores, through buffers that are kept from step to step."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        self._pool = ThreadPoolExecutor(cores(), thread_name_prefix="deltactl-capture")
        self._staging: dict[torch.device, Staging] = {}

    def capture(self, live: Mapping[str, Live]) -> Capture:
        """Compare the live tensors with the mirror, and bring it to their state.

        The tensors must not change meanwhile. Where this raises the mirror is as it was.
        """
        found = Capture(self.mirror)
        futures: list[Future[None]] = []
        try:
            fresh = match(found, live)
            for future in self._begin(list(live.values()), _Comparison(found, fresh)):
                futures.append(future)  # one by one: those before an error count too
            for future in futures:
                future.result()
        except BaseException:
            wait(futures)  # or one would write to the mirror after this
            found.undo()
            raise
        found.settle()
        return found

    def _begin(self, tensors: Sequence[Live], comparison: _Comparison) -> Iterator[Future[None]]:
        for live in sorted(tensors, key=lambda live: -live.nbytes):
            if live.flat.device.type == "cpu":
                for start in range(0, live.flat.numel(), BLOCK):
                    yield self._pool.submit(comparison.host_span, live, start)
        for device, there in _by_device(tensors).items():
            yield from self._ring(device).each_chunk(there, comparison.chunk, self._pool)

    def _ring(self, device: torch.device) -> Staging:
        if device not in self._staging:
            self._staging[device] = Staging(lambda: copier_for(device))
        return self._staging[device]

    def close(self) -> None:
        """Let go of threads and buffers."""
        self._pool.shutdown()
        self._staging = {}


def _by_device(tensors: Iterable[Live]) -> dict[torch.device, list[Live]]:
    found: dict[torch.device, list[Live]] = {}
    for live in tensors:
        if live.flat.device.type != "cpu":
            found.setdefault(live.flat.device, []).append(live)
    return found


def match(found: Capture, live: Mapping[str, Described]) -> frozenset[str]:
    """Note what is added, removed, replaced; make room in the mirror. Returns the names of tensors
    that the mirror has no bits of yet."""
    mirror = found.mirror
    fresh = []
    for name in mirror.tensors.keys() - live.keys():
        found.changes[name] = TensorChange(name, "removed", old=mirror.take(name))
    for name, tensor in live.items():
        held = mirror.tensors.get(name)
        if held is not None and (held.dtype, held.shape) == (tensor.dtype, tensor.shape):
            found.changes[name] = TensorChange(name, "sparse")
            continue
        fresh.append((name, tensor.dtype, tensor.shape))
    replaced = {name: mirror.tensors[name] for name, _, _ in fresh if name in mirror.tensors}
    mirror.add(fresh)
    for name, _, _ in fresh:
        kind: Kind = "replaced" if name in replaced else "added"
        found.changes[name] = TensorChange(name, kind, old=replaced.get(name))
    return frozenset(name for name, _, _ in fresh)


class _Comparison:
    """Compares chunks, from many threads."""

    def __init__(self, found: Capture, fresh: frozenset[str]) -> None:
        self._changes, self._fresh = found.changes, fresh
        self._bits = {name: held.bits for name, held in found.mirror.tensors.items()}
        self._lock = threading.Lock()

    def host_span(self, live: Live, start: int) -> None:
        """A block of a tensor in the host's memory."""
        stop = min(start + BLOCK, live.flat.numel())
        for at, bits in host_chunks(live, start, stop):
            self.chunk(live, at, bits)

    def chunk(self, live: Live, at: int, new: Bits) -> None:
        """Compare one chunk, note what changed, and then put it into the mirror."""
        old = self._bits[live.name][at : at + new.size]
        if live.name in self._fresh:
            old[:] = new
            return
        found = changes_between(old, new, 0, at)
        if not found.positions.size:
            return
        noted = _noted(at, found, old)
        with self._lock:
            change = self._changes[live.name]
            change.chunks.append(noted)
            change.old_sum = (change.old_sum + found.old_sum) % (1 << 64)
            change.new_sum = (change.new_sum + found.new_sum) % (1 << 64)
        old[found.positions] = found.after


def _noted(at: int, found: Changes, old: Bits) -> ChunkChange:
    """In copies: what was found is the front of arrays as long as the chunk."""
    sparse = found.positions.size * (4 + old.itemsize)
    if sparse >= old.nbytes:
        return ChunkChange(at, None, old.copy())
    return ChunkChange(at, found.positions.astype(np.int32), found.before.copy())
