"""A link's objects: which files it has, and what each has to be by its header."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deltactl.chain.chain import Link
from deltactl.chain.store import Object
from deltactl.core.errors import DeltactlError
from deltactl.files.mapped import map_bytes
from deltactl.files.safetensors import read_header
from deltactl.format.anchor import INDEX, AnchorFile, AnchorHeader
from deltactl.format.checker import (
    Expected,
    expected_of,
    mapped_faults,
    pieces_of,
    stream_faults,
)
from deltactl.format.header import HEADER_DIGEST


def seal_of(link: Link) -> str | None:
    """A digest that no other link shares: its header's, which names those of all else. None: of a
    link of TRL's nothing is known beforehand."""
    return link.header.metadata.get(HEADER_DIGEST)


def expected_in(link: Link, item: Object) -> Expected:
    """What one of a link's objects has to be."""
    name = None if link.directory is None else item.name.removeprefix(link.directory)
    return expected_of(link.header, name, item.name, item.size)


def faults_at(link: Link, place: Path) -> list[DeltactlError]:
    """What is wrong with a link's objects by their digests, where they lie on this machine.

    ``place``: its file, or the directory. Every byte is read. Each error names an object, unless a
    file was torn meanwhile: that is raised, Malformed.
    """
    faults: list[DeltactlError] = []
    mapped = []
    for item, path in _paths(link, place):
        expected = expected_in(link, item)
        try:
            if expected.header_bytes is not None and expected.header_bytes in (0, item.size):
                faults += stream_faults(expected, pieces_of(path))  # small: an index, a config
            else:
                mapped.append((expected, map_bytes(path)))
        except DeltactlError as error:
            error.file, error.step = item.name, link.step
            faults.append(error)
    return faults + mapped_faults(mapped)


def check_file(anchor: Link, file: AnchorFile, path: Path) -> None:
    """Raise Malformed unless a file of an anchor is as its index says; of a shard its header alone
    is looked at."""
    name = object_of(anchor, file)
    expected = expected_of(anchor.header, file.name, name, file.nbytes)
    try:
        if file.is_shard:
            expected.spans(read_header(path).raw)
            return
        for fault in stream_faults(expected, pieces_of(path)):
            raise fault
    except DeltactlError as error:
        error.file, error.step = name, anchor.step
        raise


def _paths(link: Link, place: Path) -> Iterator[tuple[Object, Path]]:
    for item in link.objects:
        short = "" if link.directory is None else item.name.removeprefix(link.directory)
        yield item, place / short


def anchor_files(anchor: Link) -> tuple[AnchorFile, ...]:
    """The files that an anchor's index names; none where the anchor is one file."""
    header = anchor.header
    assert isinstance(header, AnchorHeader)
    return header.files


def aux_files(anchor: Link) -> tuple[AnchorFile, ...]:
    """Those of them that are no shards."""
    return tuple(file for file in anchor_files(anchor) if not file.is_shard)


def object_of(anchor: Link, file: AnchorFile) -> str:
    """The name of the object that is a file of an anchor's directory."""
    return anchor.name.removesuffix(INDEX) + file.name
