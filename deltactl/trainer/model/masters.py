"""What it costs to publish float32 masters as they are: measured at a step, beside what it would
cost to publish them rounded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from deltactl.codec import encoding_named
from deltactl.codec.base import BLOCK, EncodedBlock, Encoding, Target
from deltactl.codec.bits import Bits, changes_between
from deltactl.core.dtypes import nbytes_of
from deltactl.files.atomic import Spool
from deltactl.trainer.capture.capture import Capture, TensorChange
from deltactl.trainer.report import log

_SAMPLE = 1 << 24
"""Elements that are looked at, about; of a large model a part says it all."""

_WORTH_A_WORD = 0.5
"""It is told of where rounded ones would take less than this share of the bytes."""


@dataclass(slots=True)
class Cost:
    """Of the elements that were looked at: those that changed, and their bytes in a delta."""

    elements: int = 0
    changed: int = 0
    nbytes: int = 0

    def add(self, tensor: _Tensor) -> None:
        self.elements += tensor.elements
        self.changed += sum(block.count for block in tensor.blocks)
        self.nbytes += tensor.nbytes()

    @property
    def share(self) -> float:
        return self.changed / self.elements


class _Tensor:
    """The blocks of one tensor, encoded as they would be for a delta."""

    def __init__(self, codec: Encoding, spool: Spool, dtype: str) -> None:
        self._codec, self._spool, self._dtype = codec, spool, dtype
        self.elements, self.blocks = 0, list[EncodedBlock]()

    def add(self, before: Bits, after: Bits) -> None:
        """The next block, before the step and after it."""
        found = changes_between(before, after, 0, 0)
        if found.positions.size:
            streams = self._codec.encode(
                before, found.positions, found.before, found.after, self._dtype
            )
            segments = tuple(map(self._spool.append, streams))
            number = self.elements // BLOCK
            self.blocks.append(EncodedBlock(number, found.positions.size, segments))
        self.elements += before.size

    def nbytes(self) -> int:
        if not self.blocks:
            return 0
        target = Target("", "", self._dtype, self.elements)
        size = sum(part.nbytes for part in self._codec.parts(target, self.blocks, self._spool))
        dense = nbytes_of(self._dtype, (self.elements,))
        return min(size, dense) if self._codec.dense_if_smaller else size


class Masters:
    """Tells once of float32 tensors that are published as they are. ``wanted``: whether to."""

    def __init__(self, encoding: str, *, wanted: bool) -> None:
        self._codec, self._wanted = encoding_named(encoding), wanted

    def look(self, capture: Capture) -> None:
        """Of a capture as it was just made; the first that has any changes of such tensors."""
        if not self._wanted:
            return
        full, rounded = _costs(capture, self._codec)
        if not full.changed:
            return
        self._wanted = False
        if rounded.nbytes < _WORTH_A_WORD * full.nbytes:
            log.warning(
                "float32 weights are published as they are: of %s elements of this step %.1f %% "
                "changed, which takes %s bytes; of the same rounded to bfloat16 %.1f %% changed, "
                'which takes %s bytes: dtype="bfloat16", where servers hold no more',
                f"{full.elements:,}", 100 * full.share, f"{full.nbytes:,}",
                100 * rounded.share, f"{rounded.nbytes:,}",
            )  # fmt: skip


def _costs(capture: Capture, codec: Encoding) -> tuple[Cost, Cost]:
    """Of the elements as they are, and rounded."""
    full, rounded = Cost(), Cost()
    tensors = capture.mirror.tensors
    changes = [c for c in capture.changes.values() if c.kind == "sparse"]
    for change in sorted(changes, key=lambda c: (-tensors[c.name].data.size, c.name)):
        held = tensors[change.name]
        if held.dtype == "F32" and full.elements < _SAMPLE:
            with Spool() as spool:
                as_it_is = _Tensor(codec, spool, "F32")
                narrower = _Tensor(codec, spool, "BF16")
                for start in range(0, min(held.bits.size, _SAMPLE), BLOCK):
                    before, after = _block(change, held.bits, start)
                    as_it_is.add(before, after)
                    narrower.add(_rounded(before), _rounded(after))
                full.add(as_it_is)
                rounded.add(narrower)
    return full, rounded


def _block(change: TensorChange, bits: Bits, start: int) -> tuple[Bits, Bits]:
    """A block before the step and after it."""
    after = bits[start : start + BLOCK]
    before = after.copy()
    for chunk in change.chunks:
        if start <= chunk.start < start + BLOCK:
            replace(chunk, start=chunk.start - start).undo(before)
    return before, after


def _rounded(bits: Bits) -> Bits:
    """As ``dtype="bfloat16"`` publishes them."""
    floats = torch.from_numpy(np.ascontiguousarray(bits).view(np.float32))
    found: npt.NDArray[np.uint16] = floats.to(torch.bfloat16).view(torch.uint16).numpy()
    return found
