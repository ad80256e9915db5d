"""A delta as files: opened and checked, its changes given block by block.

``open_delta`` reads our deltas, of one file or of several, and both of TRL's dialects. What it
returns has passed every check that headers alone allow; ``check_payload`` compares the payload with
its digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deltactl.codec import ENCODINGS
from deltactl.codec.base import Decoder, StoredPart, Target
from deltactl.codec.bits import Bytes
from deltactl.core.errors import DeltactlError, Malformed, NotFound, Unproven
from deltactl.files.mapped import check_mapped, mapped_fault
from deltactl.files.safetensors import Header, map_file
from deltactl.files.untrusted import read_index
from deltactl.format.checker import Expected, expected_of, mapped_faults
from deltactl.format.delta_header import (
    DENSE,
    DeltaHeader,
    PartFile,
    check_entries,
    parse_delta,
)
from deltactl.format.delta_index import DELTA_INDEX, parse_delta_index
from deltactl.format.header import Record

__all__ = [
    "DENSE",
    "Delta",
    "DeltaHeader",
    "open_delta",
    "parse_delta",
]


@dataclass(frozen=True, slots=True)
class _File:
    """One mapped file, and what it has to be."""

    path: Path
    header: Header
    data: Bytes
    expected: Expected


class Delta:
    """A delta with its payload mapped; ``path``: its file, or the directory of its files."""

    def __init__(self, path: Path) -> None:
        self.path = path.parent if path.name == DELTA_INDEX else path
        if self.path.is_dir():
            index = self.path / DELTA_INDEX
            self.header = parse_delta_index(read_index(index), index)
            self._files = [self._open_part(part) for part in self.header.files]
        else:
            raw, data = map_file(path)
            self.header = parse_delta(raw, path)
            expected = expected_of(self.header, None, path, data.size)
            self._files = [_File(path, raw, data, expected)]
        self._entries = {
            key: StoredPart(entry.dtype, entry.shape, file.data[entry.start : entry.stop])
            for file in self._files
            for key, entry in file.header.entries.items()
        }
        if self.header.files:
            self._check_sizes()

    def _open_part(self, part: PartFile) -> _File:
        path = self.path / part.name
        try:
            raw, data = map_file(path)
        except NotFound:
            what = "a file of the delta is missing"
            raise Malformed(what, file=path, expected=f"{part.nbytes} bytes") from None
        if data.size != part.nbytes:
            what = "a file of the delta has another size"
            raise Malformed(what, file=path, expected=part.nbytes, found=data.size)
        expected = expected_of(self.header, part.name, path, data.size)
        expected.spans(raw.raw)
        homes = self.header.homes
        records = [r for r in self.records.values() if homes.get(r.name) == part.name]
        check_entries(raw, records, self.header.keys, path)
        return _File(path, raw, data, expected)

    def _check_sizes(self) -> None:
        """Raise Malformed where a tensor takes another number of bytes than the index says."""
        for name, keys in self.header.keys.items():
            found = sum(self._entries[key].data.size for key in keys.values())
            if found != self.records[name].nbytes:
                what = "the tensor takes another number of bytes than the index says"
                expected = self.records[name].nbytes
                raise Malformed(
                    what, file=self.header.file, tensor=name, expected=expected, found=found
                )

    @property
    def records(self) -> dict[str, Record]:
        return self.header.records

    @property
    def payload_bytes(self) -> int:
        """Bytes of all entries."""
        return self.header.payload_bytes

    def parts(self) -> Iterator[tuple[Path, Header]]:
        """The files of a delta of several, and the header of each."""
        for file in self._files if self.header.files else ():
            yield file.path, file.header

    def payload_faults(self) -> list[DeltactlError]:
        """Every byte against its digest. Raises Unproven where there is none."""
        if not self.header.has_digests:
            raise Unproven("the delta carries no digest of its payload", file=self.path)
        return mapped_faults([(file.expected, file.data) for file in self._files])

    def check_payload(self) -> None:
        """Raise the first of its payload's faults, Malformed; Unproven where it has no digest."""
        for fault in self.payload_faults():
            raise fault

    def stands(self) -> bool:
        """Whether its files are still what was mapped."""
        return all(mapped_fault(file.data) is None for file in self._files)

    def check_stands(self) -> None:
        """Raise Malformed where a file is not any more what was mapped."""
        for file in self._files:
            check_mapped(file.data)

    def whole(self, name: str) -> Bytes:
        """All bytes, shape (n,), of a tensor that is carried whole."""
        return self._entries[self.header.keys[name][DENSE]].data

    def decoder(self, name: str, dtype: str, element_count: int) -> Decoder:
        """The changes of a sparse tensor, which in the base has ``element_count`` elements of
        ``dtype``.

        Raises Malformed where the delta's record says otherwise or the parts do not fit.
        """
        record = self.records[name]
        known = record.elements
        if (record.dtype or dtype) != dtype or (known is not None and known != element_count):
            raise Malformed(
                "the delta's tensor is not of the base's dtype and size",
                file=self.path,
                tensor=name,
                expected=f"{element_count} elements of {dtype}",
                found=f"{known} elements of {record.dtype}",
            )
        target = Target(str(self.path), name, dtype, element_count)
        parts = {suffix: self._entries[key] for suffix, key in self.header.keys[name].items()}
        decoder = ENCODINGS[self.header.encoding].decoder(target, parts)
        if decoder.count != record.changed:
            raise Malformed(
                "the tensor has another number of changes than the header says",
                file=self.path,
                tensor=name,
                expected=record.changed,
                found=decoder.count,
            )
        return decoder


def open_delta(path: Path) -> Delta:
    """Open a delta, ours or TRL's: a file, a directory of files, or the index in it.

    Raises NotFound, Malformed, Unsupported.
    """
    return Delta(path)
