"""Every byte of a link against its digests; of links without digests, that they can be read."""

from __future__ import annotations

from pathlib import Path

from deltactl.chain.chain import Link
from deltactl.chain.check import trl
from deltactl.chain.check.anchor import check_file, sum_faults, tensor_faults
from deltactl.chain.check.delta import content_faults
from deltactl.chain.transfer.fetching import Fetched
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.core.errors import DeltactlError
from deltactl.format.anchor import AnchorHeader
from deltactl.format.delta import Delta, open_delta
from deltactl.format.tensor_table import Table


def payload_faults(link: Link, found: Fetched, before: Table | None) -> list[DeltactlError]:
    """What is wrong with a link's bytes: as seen on the way where it was fetched, else read now.

    ``before``: the tensors of the step before, where they are known. Every error has the step, and
    a file.
    """
    faults = found.faults(link)
    if not faults:
        place, checked = found.places[link.name], link.name in found.checked
        if isinstance(link.header, AnchorHeader):
            faults = _anchor_faults(link, link.header, place, checked)
        else:
            faults = _delta_faults(link, place, checked, before)
    for fault in faults:
        fault.step, fault.file = link.step, fault.file or link.name
    return faults


def _delta_faults(
    link: Link, place: Path, checked: bool, before: Table | None
) -> list[DeltactlError]:
    try:
        faults = data_faults(open_delta(place), before, checked=checked)
    except DeltactlError as error:
        faults = [error]
    parts = {str(place / item.name.rsplit("/", 1)[1]): item.name for item in link.objects}
    for fault in faults:
        fault.file = parts.get(fault.file or "", link.name)
    return faults


def data_faults(
    delta: Delta, before: Table | None = None, *, checked: bool = False
) -> list[DeltactlError]:
    """Every byte of the payload against its digest, unless that was ``checked`` before, and what
    the payload shows against the rows; without digests, whether what it says is possible.

    Raises Malformed.
    """
    if not delta.header.has_digests:
        trl.check_data(delta, before)
        return []
    if not checked:
        delta.check_payload()
    return content_faults(delta)


def _anchor_faults(
    link: Link, header: AnchorHeader, place: Path, checked: bool
) -> list[DeltactlError]:
    faults: list[DeltactlError] = []
    for file in () if checked else header.files:
        try:
            check_file(place / file.name, file, link)
        except DeltactlError as error:
            faults.append(error)
    if any(fault.file and fault.file.endswith(".safetensors") for fault in faults):
        return faults
    try:
        with open_checkpoint(place) as checkpoint:  # whether its files make one
            faults += [] if checked else tensor_faults(checkpoint, link)
            faults += sum_faults(checkpoint, link)
    except DeltactlError as error:
        error.file = link.name
        faults.append(error)
    return faults
