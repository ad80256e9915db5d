"""Deltas of several files: the index that is written last, and makes a link of them.

Each part is a delta file of some of the tensors: from their state in the base to their state in the
result. Who composes the index needs the parts' headers and the base's table alone. The index says
all that the header of a delta of one file says, so that a chain is read without a look at parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deltactl.core.digest import TensorState, digest_of, is_digest, state_digest
from deltactl.core.dtypes import nbytes_of
from deltactl.core.errors import Malformed, UsageError
from deltactl.files.names import is_plain_name
from deltactl.files.safetensors import Header
from deltactl.files.untrusted import is_size, parse_index
from deltactl.format.delta_header import DeltaHeader, PartFile, parse_delta, parse_ours
from deltactl.format.header import (
    HEADER_DIGEST,
    PLACEHOLDER,
    PREFIX,
    Record,
    delta_metadata,
    in_order,
    is_ours,
    record_to_json,
    seal,
    table_rows,
    table_text,
    utf8,
)
from deltactl.format.metadata_check import check_strings
from deltactl.format.tensor_table import Table, after_delta

DELTA_INDEX = "delta.safetensors.index.json"


def is_delta_path(path: Path) -> bool:
    """Whether a path that may be a delta or a bucket is a delta's: a file, a directory with a
    delta's index, or named like a file of one."""
    if path.is_dir():
        return (path / DELTA_INDEX).is_file()
    return path.is_file() or path.suffix == ".safetensors"


def part_name(number: int, count: int, attempt: str = "") -> str:
    """The name of a part, counted from 0.

    ``attempt``: what no other writer of the step puts there, so that what one left that came to no
    end is in nobody's way.
    """
    return f"delta-{number + 1:05d}-of-{count:05d}{attempt and '-' + attempt}.safetensors"


def part_file(name: str, header: Header) -> PartFile:
    """What the index says of a part that has this header."""
    payload = header.metadata[PREFIX + "payload_digest"]
    return PartFile(name, header.file_size, digest_of(header.raw), payload)


def delta_index(
    before: Table, parts: Mapping[str, Header], step: int, base_step: int
) -> tuple[bytes, dict[str, TensorState]]:
    """The bytes of the index, sealed, and the tensors after the delta.

    ``before``: the tensors of the base; ``parts``: the parts' headers by name. Raises Malformed for
    a part that is no delta of ours, or of tensors that are not so in the base; UsageError for parts
    of different encodings, and for a tensor in two of them.
    """
    headers = {name: _parse_part(name, header) for name, header in parts.items()}
    encodings = {header.encoding for header in headers.values()}
    if len(encodings) != 1:
        raise UsageError("the parts of a delta have one encoding", found=sorted(encodings))
    records: dict[str, Record] = {}
    homes: dict[str, str] = {}
    after: Table = before
    for name, header in headers.items():
        if twice := records.keys() & header.records.keys():
            raise UsageError("two parts of a delta have the tensor", file=name, found=min(twice))
        records |= header.records
        homes |= {tensor: name for tensor, keys in header.keys.items() if keys}
        after = after_delta(after, header)
    metadata = delta_metadata(
        [records[name] for name in sorted(records, key=utf8)],
        encoding=encodings.pop(),
        base_state=state_digest(before.values()),
        result_state=state_digest(after.values()),
        total_elements=sum(tensor.elements for tensor in after.values()),
        step=step,
        base_step=base_step,
    )
    rows = [_row(records[name]) for name in sorted(records, key=utf8)]
    files = [part_file(name, parts[name]) for name in sorted(parts, key=utf8)]
    metadata |= {
        PREFIX + "tensors": table_text(rows),
        PREFIX + "files": table_text(map(_file_row, files)),
        HEADER_DIGEST: PLACEHOLDER,
    }
    ordered = {name: homes[name] for name in sorted(homes, key=utf8)}
    document = {"metadata": dict(sorted(metadata.items())), "weight_map": ordered}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return seal(text.encode()), dict(after)


def _parse_part(name: str, header: Header) -> DeltaHeader:
    found = parse_delta(header, name)
    if not found.has_digests:
        raise Malformed("the part carries no digests", file=name)
    return found


def _row(record: Record) -> dict[str, Any]:
    row = record_to_json(record)
    return row if record.kind == "removed" else row | {"bytes": record.nbytes}


def _file_row(file: PartFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "bytes": file.nbytes,
        "header": file.header_digest,
        "payload": file.payload_digest,
    }


def parse_delta_index(raw: bytes, file: object) -> DeltaHeader:
    """The index of a delta of several files, all its bytes. Raises Malformed, Unsupported."""
    metadata, homes = parse_index(raw, file, what="the delta's index")
    strings = {key: value for key, value in metadata.items() if isinstance(value, str)}
    if not is_ours(strings):
        what = "the delta's index carries no digests"
        raise Malformed(what, file=file, expected="deltactl.* in its metadata")
    found = parse_ours(raw, strings, file)
    check_strings(metadata, file)
    files = _parse_files(strings.get(PREFIX + "files", ""), file)
    rows = table_rows(strings[PREFIX + "tensors"], file)
    records = {
        r.name: _sized(r, row, file) for r, row in zip(found.records.values(), rows, strict=True)
    }
    header = replace(
        found,
        records=records,
        files=files,
        homes=homes,
        nbytes=len(raw) + sum(f.nbytes for f in files),
    )
    _check_homes(header, file)
    return header


def _parse_files(text: str, file: object) -> tuple[PartFile, ...]:
    files = tuple(_parse_file(row, file) for row in table_rows(text, file))
    in_order([f.name for f in files], file, what="the delta's list of files")
    return files


def _parse_file(row: object, file: object) -> PartFile:
    if isinstance(row, dict):
        name, size = row.get("name"), row.get("bytes")
        header, payload = row.get("header"), row.get("payload")
        plain = isinstance(name, str) and is_plain_name(name) and name.endswith(".safetensors")
        if plain and is_size(size) and is_digest(header) and is_digest(payload):
            return PartFile(str(name), size, str(header), str(payload))
    raise Malformed("the delta's list of files is malformed", file=file, found=str(row)[:200])


def _nbytes(record: Record) -> int:
    assert record.dtype is not None and record.shape is not None
    return nbytes_of(record.dtype, record.shape)


def _sized(record: Record, row: Mapping[str, Any], file: object) -> Record:
    if record.kind == "removed":
        return record
    size = row.get("bytes")
    takes = _nbytes(record) if record.whole else size
    if not is_size(size) or size != takes:
        what = "the tensor table's 'bytes' is malformed"
        raise Malformed(what, file=file, tensor=record.name, found=size)
    return replace(record, nbytes=size)


def _check_homes(header: DeltaHeader, file: object) -> None:
    """Raise Malformed unless every tensor with entries is in one of the files, and fits there."""
    if header.homes.keys() != {name for name, keys in header.keys.items() if keys}:
        raise Malformed("the index's weight_map and its tensor table differ", file=file)
    room = {part.name: part.nbytes for part in header.files}
    for name, home in header.homes.items():
        if home not in room:
            what = "the index's weight_map names a file that is not in its files"
            raise Malformed(what, file=file, tensor=name, found=home)
        room[home] -= header.records[name].nbytes
        if room[home] < 0:
            what = "the file is smaller than the tensors that the index puts there"
            raise Malformed(what, file=file, tensor=name, found=home)
