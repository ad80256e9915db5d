"""Anchors: a whole checkpoint as a link, and what its header says.

A single file carries it in its own metadata. A directory carries it in the metadata of its index,
which is written last: an anchor without its index is none.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltactl.core.digest import TensorState, is_digest, state_digest
from deltactl.core.errors import Malformed
from deltactl.files.names import is_plain_path
from deltactl.files.safetensors import Header
from deltactl.files.untrusted import is_size, parse_index
from deltactl.format.header import (
    FORMAT_VERSION,
    HEADER_DIGEST,
    PLACEHOLDER,
    PREFIX,
    TRL_FORMAT,
    check_seal,
    check_version,
    in_order,
    is_ours,
    need_count,
    need_digest,
    seal,
    state_from_json,
    state_to_json,
    table_rows,
    table_text,
    touch_sum_from_json,
    utf8,
)
from deltactl.format.metadata_check import check_fixed, check_strings, check_total

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class AnchorFile:
    """One file of an anchor's directory. Shards have the digest of their header (their tensors have
    their own), other files that of all their bytes."""

    name: str
    nbytes: int
    digest: str
    is_shard: bool


@dataclass(frozen=True, slots=True)
class AnchorHeader:
    """What an anchor's header says. In what TRL wrote there is no state, and no tensor's digest."""

    file: str
    dialect: str
    step: int | None
    result_state: str | None
    total_elements: int
    tensors: tuple[TensorState, ...]
    files: tuple[AnchorFile, ...]
    metadata: dict[str, str]
    sums: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Touch sums over all elements, of the tensors whose rows have one."""


def anchor_metadata(step: int, tensors: tuple[TensorState, ...]) -> dict[str, str]:
    """The metadata of an anchor of these tensors, in order of name; the seal is a placeholder."""
    return {
        "format": TRL_FORMAT,
        "version": "1",
        "sparse": "False",
        "model_version": str(step),
        "total_elements": str(_total_elements(tensors)),
        PREFIX + "format": FORMAT_VERSION,
        PREFIX + "result_state": state_digest(tensors),
        PREFIX + "tensors": table_text(map(state_to_json, tensors)),
        HEADER_DIGEST: PLACEHOLDER,
    }


def anchor_index(
    step: int,
    tensors: tuple[TensorState, ...],
    weight_map: Mapping[str, str],
    files: tuple[AnchorFile, ...],
) -> bytes:
    """The bytes of the index of an anchor's directory, sealed."""
    rows = [
        {"name": f.name, "bytes": f.nbytes, "header" if f.is_shard else "digest": f.digest}
        for f in sorted(files, key=lambda f: utf8(f.name))
    ]
    metadata: dict[str, Any] = {"total_size": sum(tensor.nbytes for tensor in tensors)}
    metadata |= anchor_metadata(step, tensors) | {PREFIX + "files": table_text(rows)}
    ordered = {name: weight_map[name] for name in sorted(weight_map, key=utf8)}
    document = {"metadata": metadata, "weight_map": ordered}
    return seal(json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode())


def _total_elements(tensors: tuple[TensorState, ...]) -> int:
    return sum(tensor.elements for tensor in tensors)


def parse_anchor(header: Header, file: object) -> AnchorHeader:
    """The header of an anchor of one file, ours or TRL's. Raises Malformed, Unsupported."""
    if not is_ours(header.metadata):
        return _parse_trl(header, file)
    anchor = _parse_ours(header.raw, header.metadata, (), file)
    _match_entries(anchor, header, file)
    return anchor


def _match_entries(anchor: AnchorHeader, header: Header, file: object) -> None:
    for tensor in anchor.tensors:
        entry = header.entries.get(tensor.name)
        if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            what = "the tensor table and the file's entries differ"
            raise Malformed(what, file=file, tensor=tensor.name)
    extra = header.entries.keys() - {tensor.name for tensor in anchor.tensors}
    if extra:
        what = "the tensor table does not name this entry"
        raise Malformed(what, file=file, tensor=min(extra))


def _parse_trl(header: Header, file: object) -> AnchorHeader:
    metadata = header.metadata
    if metadata.get("sparse", "False") != "False":
        raise Malformed("the file is a delta, no anchor", file=file)
    tensors = tuple(
        TensorState(e.name, e.dtype, e.shape, "")
        for e in sorted(header.entries.values(), key=lambda e: utf8(e.name))
    )
    step = need_count(metadata, "model_version", file) if "model_version" in metadata else None
    return AnchorHeader(
        file=str(file),
        dialect="trl",
        step=step,
        result_state=None,
        total_elements=_total_elements(tensors),
        tensors=tensors,
        files=(),
        metadata=metadata,
    )


def parse_anchor_index(raw: bytes, file: object) -> AnchorHeader:
    """The index of an anchor's directory, all its bytes. Raises Malformed, Unsupported."""
    metadata, weight_map = parse_index(raw, file, what="the anchor's index")
    strings = {key: value for key, value in metadata.items() if isinstance(value, str)}
    if not is_ours(strings):
        what = "the anchor's index carries no digests"
        raise Malformed(what, file=file, expected="deltactl.* in its metadata")
    files = _parse_files(strings.get(PREFIX + "files", ""), file)
    anchor = _parse_ours(raw, strings, files, file)
    check_strings(metadata, file)
    _check_total_size(metadata.get("total_size"), anchor.tensors, file)
    shards = {f.name for f in files if f.is_shard}
    if weight_map.keys() != {tensor.name for tensor in anchor.tensors}:
        raise Malformed("the index's weight_map and its tensor table differ", file=file)
    if not set(weight_map.values()) <= shards:
        raise Malformed("the index's weight_map names a shard that is not in its files", file=file)
    return anchor


def _check_total_size(said: object, tensors: tuple[TensorState, ...], file: object) -> None:
    size = sum(tensor.nbytes for tensor in tensors)
    if type(said) is not int or said != size:
        what = "the index's total_size is not what its tensors take"
        raise Malformed(what, file=file, expected=size, found=reprlib.repr(said))


def _parse_files(text: str, file: object) -> tuple[AnchorFile, ...]:
    files = tuple(_parse_file(row, file) for row in table_rows(text, file))
    in_order([f.name for f in files], file, what="the anchor's list of files")
    return files


def _parse_file(row: object, file: object) -> AnchorFile:
    if isinstance(row, dict):
        name, size = row.get("name"), row.get("bytes")
        digest = row.get("header", row.get("digest"))
        one = ("header" in row) != ("digest" in row)
        if one and is_plain_path(name) and is_size(size) and is_digest(digest):
            is_shard = "header" in row
            if not is_shard or "/" not in str(name):
                return AnchorFile(str(name), size, str(digest), is_shard)
    raise Malformed("the anchor's list of files is malformed", file=file, found=str(row)[:200])


def _parse_ours(
    raw: bytes, metadata: dict[str, str], files: tuple[AnchorFile, ...], file: object
) -> AnchorHeader:
    check_seal(raw, metadata, file)
    check_version(metadata, file)
    if metadata.get("sparse") != "False":
        raise Malformed("the file is no anchor", file=file, found=metadata.get("sparse"))
    check_fixed(metadata, file)
    rows = table_rows(metadata.get(PREFIX + "tensors", ""), file)
    tensors = tuple(state_from_json(row, file) for row in rows)
    in_order([tensor.name for tensor in tensors], file)
    expected = need_digest(metadata, "result_state", file)
    if state_digest(tensors) != expected:
        what = "the tensor table does not have the state digest that the header names"
        raise Malformed(what, file=file, expected=expected, found=state_digest(tensors))
    total = _total_elements(tensors)
    check_total(metadata, total, file)
    return AnchorHeader(
        file=str(file),
        dialect="deltactl",
        step=need_count(metadata, "model_version", file),
        result_state=expected,
        total_elements=total,
        tensors=tensors,
        files=files,
        metadata=metadata,
        sums={row["name"]: touch_sum_from_json(row, "sum", file) for row in rows if "sum" in row},
    )
