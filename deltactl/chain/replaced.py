"""Links that keep next to nothing of the step before: to be told of, as another model, or another
run, may have begun.

Judged by what tells. Tensors under other names, dtypes or shapes do. So do elements that keep
their bits, and changed ones of 16 bits or fewer: between two optimizer steps about 1 % of a model's
bf16 change. Changed elements of more bits do not: of float32 nearly all change at every step.
"""

from __future__ import annotations

from collections.abc import Collection

from deltactl.chain.chain import Chain, Link
from deltactl.chain.model import tensors_at
from deltactl.core.digest import TensorState
from deltactl.core.dtypes import DTYPES
from deltactl.core.errors import DeltactlError
from deltactl.format.anchor import AnchorHeader
from deltactl.format.delta_header import DeltaHeader
from deltactl.format.header import Record

NARROW = 16
"""Bits of an element: where there are more, ordinary training changes nearly all."""

NEARLY_ALL = 0.95
"""Share of the elements that tell: where more changed, they are not the ones before, trained on."""


def replaces_all(chain: Chain, link: Link) -> bool:
    """Whether a link keeps next to nothing of the step below.

    A delta by ``keeps_nothing``; an anchor where no delta leads to its step and no tensor is as it
    was. False where the step below is not known.
    """
    if isinstance(link.header, DeltaHeader):
        return delta_replaces_all(link.header)
    below = chain.below(link.step)
    if below is None or link.step in chain.deltas:
        return False
    return _begins_anew(chain, link.header, below)


def delta_replaces_all(header: DeltaHeader) -> bool:
    """``keeps_nothing`` of a delta's header."""
    return keeps_nothing(header.records.values(), header.total_elements)


def keeps_nothing(records: Collection[Record], total_elements: int | None) -> bool:
    """Whether a delta keeps next to nothing of its base; ``total_elements``: of the result.

    No tensor has the name, dtype and shape of one before; or of the elements of those that have,
    more than half tell, and more than ``NEARLY_ALL`` of these changed. An element tells unless it
    changed and is of more than ``NARROW`` bits, or of a dtype that is not known. False where
    nothing changed, or it is not known of how many.
    """
    if total_elements is None or not records:
        return False
    carried = total_elements - sum(r.changed for r in records if _is_anew(r))
    if not carried and all(map(_is_anew, records)):
        return True
    changed = [r for r in records if not _is_anew(r)]
    narrow = sum(r.changed for r in changed if _is_narrow(r))
    telling = carried - sum(r.changed for r in changed) + narrow
    return 2 * telling > carried and narrow > NEARLY_ALL * telling


def other_run(records: Collection[Record], total_elements: int) -> tuple[str, ...]:
    """What a push has to say of tensors that are the chain's but for their elements."""
    if all(map(_is_anew, records)) or not keeps_nothing(records, total_elements):
        return ()
    changed = sum(record.changed for record in records)
    counts = f"{changed:,} of {total_elements:,} elements changed"
    return (f"{counts}: these look like another run's weights",)


def _is_anew(record: Record) -> bool:
    return record.kind in ("added", "removed") or record.replaced


def _is_narrow(record: Record) -> bool:
    return record.dtype is not None and DTYPES[record.dtype].bits <= NARROW


def _begins_anew(chain: Chain, header: AnchorHeader, below: int) -> bool:
    try:
        before = tensors_at(chain, below)
    except DeltactlError:  # what is wrong with the chain is not for here
        return False
    kept = (tensor for tensor in header.tensors if _same(before.get(tensor.name), tensor))
    return bool(before) and next(kept, None) is None


def _same(before: TensorState | None, after: TensorState) -> bool:
    """By digest; of TRL's, which have none, by dtype and shape."""
    if before is None or (before.dtype, before.shape) != (after.dtype, after.shape):
        return False
    return before.digest in ("", after.digest) or not after.digest
