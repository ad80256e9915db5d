"""Every byte of a link against its digests, and what only its content shows; of links without
digests, that they can be read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deltactl.chain.chain import Chain, Link
from deltactl.chain.check import trl
from deltactl.chain.check.delta import content_faults
from deltactl.chain.check.objects import faults_at
from deltactl.chain.transfer.fetching import Fetched
from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.codec.bits import touch_sum_of_all
from deltactl.core.errors import DeltactlError, difference
from deltactl.format.anchor import INDEX, AnchorHeader
from deltactl.format.delta import Delta, open_delta
from deltactl.format.header import touch_sum_text
from deltactl.format.tensor_table import Table


def payload_faults(
    chain: Chain, link: Link, found: Fetched, tables: Mapping[int, Table]
) -> list[DeltactlError]:
    """What is wrong with a link's bytes: as seen on the way where it was fetched, else read now.

    ``tables``: the tensors of steps, as far as they are known. Every error has the step, and a
    file.
    """
    faults = found.faults(link)
    if not faults:
        place, checked = found.places[link.name], link.name in found.checked
        if isinstance(link.header, AnchorHeader):
            faults = _anchor_faults(link, link.header, place, checked)
        else:
            before = chain.before(link)
            table = None if before is None else tables.get(before)
            faults = _delta_faults(link, place, checked, table)
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
    return ([] if checked else delta.payload_faults()) or content_faults(delta)


def _anchor_faults(
    link: Link, header: AnchorHeader, place: Path, checked: bool
) -> list[DeltactlError]:
    faults: list[DeltactlError] = []
    try:
        faults += [] if checked else faults_at(link, place)
        with open_checkpoint(place) as checkpoint:  # whether its files make one
            faults += _sum_faults(checkpoint, link, header)
    except DeltactlError as error:
        if not faults:
            error.file = link.name
            faults.append(error)
    return faults


def _sum_faults(checkpoint: Checkpoint, anchor: Link, header: AnchorHeader) -> list[DeltactlError]:
    """The tensors whose elements have another touch sum than the anchor's rows give them."""
    what = "the tensor does not have the touch sum that the anchor names"
    faults: list[DeltactlError] = []
    for name, expected in header.sums.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            continue  # and that is said of it
        found = touch_sum_text(touch_sum_of_all(tensor.bits))
        home = _home(checkpoint, name, anchor.name)
        fault = difference(what, touch_sum_text(expected), found, file=home, tensor=name)
        faults += [fault] if fault is not None else []
    return faults


def _home(checkpoint: Checkpoint, tensor: str, anchor: str) -> str:
    """The object that holds a tensor of an anchor whose header is in the object ``anchor``."""
    if not anchor.endswith(INDEX):
        return anchor
    files = [shard.file for shard in checkpoint.shards if tensor in shard.tensors]
    return anchor.removesuffix(INDEX) + files[0] if files else anchor
