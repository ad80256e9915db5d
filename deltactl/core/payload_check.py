"""Every byte of a link against its digests; of links without digests, that they can be read."""

from __future__ import annotations

from pathlib import Path

from deltactl.core import trl_check
from deltactl.core.anchor import AnchorHeader
from deltactl.core.anchor_check import check_file, tensor_faults
from deltactl.core.chain import Link
from deltactl.core.checkpoint import open_checkpoint
from deltactl.core.delta import Delta, open_delta
from deltactl.core.errors import DeltactlError
from deltactl.core.fetching import Fetched
from deltactl.core.tensor_table import Table


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
        elif not checked or link.directory is not None:
            faults = _delta_faults(link, place, checked, before)
    for fault in faults:
        fault.step, fault.file = link.step, fault.file or link.name
    return faults


def _delta_faults(
    link: Link, place: Path, checked: bool, before: Table | None
) -> list[DeltactlError]:
    try:
        delta = open_delta(place)  # whether its files make one
        if not checked:
            check_delta(delta, before)
    except DeltactlError as error:
        parts = {str(place / item.name.rsplit("/", 1)[1]): item.name for item in link.objects}
        error.file = parts.get(error.file or "", link.name)
        return [error]
    return []


def check_delta(delta: Delta, before: Table | None = None) -> None:
    """Every byte of the payload against its digest; without one, that what it says is possible."""
    if delta.header.has_digests:
        delta.check_payload()
        return
    trl_check.check_data(delta, before)


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
    except DeltactlError as error:
        error.file = link.name
        faults.append(error)
    return faults
