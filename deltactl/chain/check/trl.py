"""What can be checked of links that TRL wrote: no digest says what they should hold.

Names, dtypes and sizes of their tensors come from the anchor that a chain has; so a delta that
names another tensor, or an element past a tensor's end, is found though its header looks sound.
"""

from __future__ import annotations

from deltactl.core.errors import DeltactlError, Malformed
from deltactl.format.anchor import AnchorHeader
from deltactl.format.delta import Delta
from deltactl.format.delta_header import DeltaHeader
from deltactl.format.header import Record
from deltactl.format.tensor_table import Table

_MOST_ELEMENTS = 1 << 48
"""Bounds the indices where nothing is known of the tensor."""


def anchor_faults(header: AnchorHeader, before: Table) -> list[DeltactlError]:
    """Tensors of another dtype or shape than in the step before: TRL's deltas change neither."""
    faults: list[DeltactlError] = []
    for tensor in header.tensors:
        known = before.get(tensor.name)
        if known is not None and (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
            what = "the anchor's tensor has another dtype or shape than in the step before"
            faults.append(
                Malformed(
                    what,
                    file=header.file,
                    tensor=tensor.name,
                    expected=f"{known.dtype} {list(known.shape)}",
                    found=f"{tensor.dtype} {list(tensor.shape)}",
                )
            )
    return faults


def delta_faults(header: DeltaHeader, before: Table) -> list[DeltactlError]:
    """Changes to tensors that the step before does not have, or not so."""
    faults = (_record_fault(header, record, before) for record in header.records.values())
    return [fault for fault in faults if fault is not None]


def _record_fault(header: DeltaHeader, record: Record, before: Table) -> Malformed | None:
    tensor = before.get(record.name)
    what, expected, found = "", "", ""
    if tensor is None:
        what, found = "the delta changes a tensor that the step before lacks", "no such tensor"
    elif record.dtype != tensor.dtype:
        what = "the delta's values have another dtype than the tensor"
        expected, found = tensor.dtype, str(record.dtype)
    elif record.changed > tensor.elements:
        what = "the delta changes more elements than the tensor has"
        expected, found = f"<= {tensor.elements}", str(record.changed)
    if not what:
        return None
    return Malformed(
        what, file=header.file, tensor=record.name, expected=expected or None, found=found
    )


def gap(step: int, below: int | None, header: DeltaHeader) -> Malformed | None:
    """What to say of a delta that does not name its base and has none at the step right below.

    TRL publishes nothing for a step that changed nothing, so steps may be missing in a sound chain.
    """
    if header.base_step is not None or below is None or below == step - 1:
        return None
    return Malformed(
        "the delta does not name the step that it stands on, and the one below it has no link",
        file=header.file,
        step=step,
        expected=f"step {step - 1}",
        found=f"step {below}",
    )


def check_data(delta: Delta, before: Table | None = None) -> None:
    """Decode all changes, against the tensors of the step before where they are known.

    Tensors that ``delta_faults`` finds fault with are passed over. Raises Malformed.
    """
    most = delta.header.total_elements or _MOST_ELEMENTS
    for record in delta.records.values():
        assert record.dtype is not None
        if before is None:
            delta.decoder(record.name, record.dtype, most)
        elif _record_fault(delta.header, record, before) is None:
            delta.decoder(record.name, record.dtype, before[record.name].elements)
