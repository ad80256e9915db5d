"""The tensors of a step, as headers tell them, and what a delta makes of them."""

from __future__ import annotations

from collections.abc import Mapping

from deltactl.core.digest import TensorState
from deltactl.core.errors import Malformed
from deltactl.format.delta_header import DeltaHeader
from deltactl.format.header import Record

Table = Mapping[str, TensorState]
"""The tensors of a step by name; of TRL's steps their digests are empty."""


def after_delta(before: Table, header: DeltaHeader) -> dict[str, TensorState]:
    """The tensors after a delta with digests; Malformed where its records do not fit those before.

    Their state digest is not looked at.
    """
    after = dict(before)
    for record in header.records.values():
        _check_fits(before.get(record.name), record, header.file)
        if record.kind == "removed":
            del after[record.name]
            continue
        assert record.dtype is not None and record.shape is not None and record.digest is not None
        after[record.name] = TensorState(record.name, record.dtype, record.shape, record.digest)
    return after


def _check_fits(before: TensorState | None, record: Record, file: str) -> None:
    found = None if before is None else (before.dtype, before.shape)
    if found != record.base_form:
        what = "the delta's tensor does not fit the one in the step before"
        raise Malformed(
            what, file=file, tensor=record.name, expected=str(record.base_form), found=str(found)
        )
