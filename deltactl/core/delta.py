"""A delta as a file: opened and checked, its changes given block by block.

``open_delta`` reads our deltas and both of TRL's dialects. What it returns has passed every check
that the header alone allows; ``check_payload`` compares the payload with its digest.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

from deltactl.core import trl
from deltactl.core.bits import Bytes
from deltactl.core.digest import hasher
from deltactl.core.encoding import ENCODINGS, encoding_named
from deltactl.core.encoding.base import Decoder, Encoding, StoredPart, Target
from deltactl.core.errors import Malformed, Unproven
from deltactl.core.header import (
    PREFIX,
    Record,
    check_seal,
    check_version,
    in_order,
    is_ours,
    need_count,
    need_digest,
    record_from_json,
    table_rows,
)
from deltactl.core.safetensors_io import Header, map_file

DENSE = ".dense"
"""The suffix of a tensor that a delta carries whole."""


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """What a delta's header says. States and digest are None in what TRL wrote."""

    file: str
    dialect: str
    encoding: str
    step: int | None
    base_step: int | None
    base_state: str | None
    result_state: str | None
    payload_digest: str | None
    total_elements: int | None
    records: dict[str, Record]
    metadata: dict[str, str]
    nbytes: int
    _keys: dict[str, dict[str, str]] = field(repr=False)

    @property
    def payload_start(self) -> int:
        """Where the header ends: its bytes, and the payload's offset."""
        return self.nbytes - sum(record.nbytes for record in self.records.values())

    @property
    def changed_elements(self) -> int:
        """Elements whose bits change, those of added tensors included."""
        return sum(record.changed for record in self.records.values())


def parse_delta(header: Header, file: object) -> DeltaHeader:
    """Check a delta's header, which may have come by range. Raises Malformed, Unsupported."""
    metadata = header.metadata
    if not is_ours(metadata):
        return _parse_trl(header, file)
    check_seal(header.raw, metadata, file)
    check_version(metadata, file)
    if metadata.get("sparse") != "True":
        raise Malformed("the file is no delta", file=file, found=metadata.get("sparse"))
    encoding = encoding_named(metadata.get("encoding", ""), file)
    rows = table_rows(metadata.get(PREFIX + "tensors", ""), file)
    records = [record_from_json(row, file) for row in rows]
    in_order([record.name for record in records], file)
    keys = _match_parts(header, encoding, records, file)
    records = [
        replace(
            record, nbytes=sum(header.entries[key].nbytes for key in keys[record.name].values())
        )
        for record in records
    ]
    step = "model_version" in metadata
    base_step = "prev_model_version" in metadata
    return DeltaHeader(
        file=str(file),
        dialect="deltactl",
        encoding=encoding.name,
        step=need_count(metadata, "model_version", file) if step else None,
        base_step=need_count(metadata, "prev_model_version", file) if base_step else None,
        base_state=need_digest(metadata, "base_state", file),
        result_state=need_digest(metadata, "result_state", file),
        payload_digest=need_digest(metadata, "payload_digest", file),
        total_elements=need_count(metadata, "total_elements", file),
        records={record.name: record for record in records},
        metadata=metadata,
        nbytes=header.file_size,
        _keys=keys,
    )


def _match_parts(
    header: Header, encoding: Encoding, records: list[Record], file: object
) -> dict[str, dict[str, str]]:
    """For each record its entries' keys by suffix; every entry has to belong to one record."""
    keys: dict[str, dict[str, str]] = {}
    for record in records:
        suffixes = (DENSE,) if record.whole else encoding.suffixes
        if record.kind == "removed":
            suffixes = ()
        keys[record.name] = {suffix: record.name + suffix for suffix in suffixes}
        for key in keys[record.name].values():
            if key not in header.entries:
                raise Malformed(f"the delta lacks {key!r}", file=file, tensor=record.name)
    known = {key for parts in keys.values() for key in parts.values()}
    for key in header.entries:
        if key not in known:
            raise Malformed("the tensor table does not name this entry", file=file, tensor=key)
    for record in (record for record in records if record.whole):
        entry = header.entries[record.name + DENSE]
        if (entry.dtype, entry.shape) != (record.dtype, record.shape):
            raise Malformed(
                "the tensor carried whole is not of the dtype and shape that the table gives",
                file=file,
                tensor=record.name,
                expected=f"{record.dtype} {list(record.shape or ())}",
                found=f"{entry.dtype} {list(entry.shape)}",
            )
    return keys


def _parse_trl(header: Header, file: object) -> DeltaHeader:
    patch = trl.parse_delta(header, file)
    by_name: dict[str, dict[str, str]] = defaultdict(dict)
    for (name, suffix), key in patch.keys.items():
        by_name[name][suffix] = key
    return DeltaHeader(
        file=str(file),
        dialect=patch.dialect,
        encoding=patch.encoding,
        step=patch.step,
        base_step=patch.base_step,
        base_state=None,
        result_state=None,
        payload_digest=None,
        total_elements=patch.total_elements,
        records={record.name: record for record in patch.records},
        metadata=header.metadata,
        nbytes=header.file_size,
        _keys=dict(by_name),
    )


def payload_fault(file: object, expected: str, found: str) -> Malformed:
    """The error for a payload that has another digest."""
    what = "the payload does not have the digest that the header names"
    return Malformed(what, file=file, expected=expected, found=found)


class Delta:
    """A delta with its payload mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        raw, self._data = map_file(path)
        self.header = parse_delta(raw, path)
        self._entries = raw.entries
        self._payload_start = len(raw.raw)

    @property
    def records(self) -> dict[str, Record]:
        return self.header.records

    @property
    def payload_bytes(self) -> int:
        """Bytes after the header."""
        return int(self._data.size) - self._payload_start

    def check_payload(self) -> None:
        """Compare the payload with its digest. Raises Malformed; Unproven where there is none."""
        expected = self.header.payload_digest
        if expected is None:
            raise Unproven("the delta carries no digest of its payload", file=self.path)
        digest = hasher()
        payload = self._data[self._payload_start :]
        for at in range(0, payload.size, 1 << 20):
            digest.update(payload[at : at + (1 << 20)])
        if digest.hexdigest() != expected:
            raise payload_fault(self.path, expected, digest.hexdigest())

    def whole(self, name: str) -> Bytes:
        """All bytes, shape (n,), of a tensor that is carried whole."""
        return self._stored(self.header._keys[name][DENSE]).data

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
        parts = {suffix: self._stored(key) for suffix, key in self.header._keys[name].items()}
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

    def _stored(self, key: str) -> StoredPart:
        entry = self._entries[key]
        return StoredPart(entry.dtype, entry.shape, self._data[entry.start : entry.stop])


def open_delta(path: Path) -> Delta:
    """Open a delta, ours or TRL's. Raises NotFound, Malformed, Unsupported."""
    return Delta(path)
