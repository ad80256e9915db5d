"""How a delta carries a tensor: not at all, as what changed of it, whole, or as gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from deltactl.codec.base import EncodedBlock, Encoding, Part, Target
from deltactl.codec.bits import Bytes
from deltactl.core.digest import TensorState
from deltactl.files.atomic import Spool
from deltactl.format.delta_header import DENSE
from deltactl.format.header import Record

_PIECE = 1 << 22


class Sparse(NamedTuple):
    """What changed of a tensor: its blocks that have changes, encoded, in order of their numbers,
    and the touch sums over the changed elements."""

    blocks: Sequence[EncodedBlock]
    old_sum: int
    new_sum: int


class Carried(NamedTuple):
    """A tensor's row in the delta's table, whose ``nbytes`` are not counted yet, None where nothing
    changed; and its parts."""

    record: Record | None
    parts: tuple[Part, ...]


def carry(
    before: TensorState | None,
    after: TensorState | None,
    data: Bytes | None,
    sparse: Sparse | None,
    codec: Encoding,
    spool: Spool,
) -> Carried:
    """How a delta carries a tensor that is ``before`` in the base and ``after`` in the result; None
    where it is not there.

    ``data``: all its bytes in the result, shape (n,), to be read when the parts are written.
    ``sparse``: None where the base has none of this dtype and shape, or what changed of that is not
    known; then it is carried whole, as it is where that takes no more bytes.
    """
    if after is None or data is None:
        assert before is not None
        return Carried(Record(before.name, "removed", before.dtype, before.shape, 0), ())
    whole = Record(after.name, "added", after.dtype, after.shape, after.elements, after.digest)
    if before is not None:
        whole = replace(whole, kind="dense")
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            whole = replace(whole, base_dtype=before.dtype, base_shape=before.shape)
    if sparse is None:
        return Carried(whole, (_dense(after, data),))
    if not sparse.blocks:
        return Carried(None, ())
    changed = replace(whole, changed=sum(block.count for block in sparse.blocks))
    target = Target("", after.name, after.dtype, after.elements)
    parts = codec.parts(target, sparse.blocks, spool)
    if codec.dense_if_smaller and sum(part.nbytes for part in parts) >= data.size:
        return Carried(changed, (_dense(after, data),))
    old_sum, new_sum = sparse.old_sum % (1 << 64), sparse.new_sum % (1 << 64)
    return Carried(replace(changed, kind="sparse", old_sum=old_sum, new_sum=new_sum), parts)


def _dense(tensor: TensorState, data: Bytes) -> Part:
    pieces = (data[at : at + _PIECE].tobytes() for at in range(0, data.size, _PIECE))
    return Part(DENSE, tensor.dtype, tensor.shape, pieces)
