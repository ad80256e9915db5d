"""The links that TRL's experimental delta sync wrote: two dialects, neither with digests of ours.

First dialect (huggingface/trl pull request 5417): ``{name}.indices`` int32 and ``{name}.values``,
with ``changed_params`` and ``prev_model_version`` in the metadata. Second (5932, 5937):
``{name}.idx`` and ``{name}.val`` with ``encoding`` raw or gap_delta. Neither gives a tensor's
shape; ``checksum_sha256`` of the first is of the result's bytes alone, without names and shapes,
and is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deltactl.core.errors import Malformed, Unsupported
from deltactl.files.json_bounds import NAMES
from deltactl.files.safetensors import Entry, Header
from deltactl.files.untrusted import parse_json_list
from deltactl.format.header import TRL_FORMAT, Record, need_count, utf8

_DIALECTS = {
    "trl-1": {".indices": ".idx", ".values": ".val"},
    "trl-2": {".idx": ".idx", ".val": ".val"},
}


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """A delta's header in either dialect; ``keys`` maps (tensor, our suffix) to the entry's key."""

    dialect: str
    encoding: str
    step: int | None
    base_step: int | None
    total_elements: int | None
    records: tuple[Record, ...]
    keys: dict[tuple[str, str], str]


def _optional_count(metadata: Mapping[str, str], key: str, file: object) -> int | None:
    if metadata.get(key, "-1") == "-1":
        return None
    return need_count(metadata, key, file)


def dialect_of(header: Header) -> str:
    """``trl-1`` or ``trl-2``: by the encoding, which the second alone names, or the suffixes."""
    if "encoding" in header.metadata:
        return "trl-2"
    if any(key.endswith((".idx", ".val")) for key in header.entries):
        return "trl-2"
    return "trl-1"


def looks_like_delta(header: Header) -> bool:
    """Whether a file that does not say what it is holds the parts of TRL's deltas and no others."""
    suffixes = tuple(suffix for dialect in _DIALECTS.values() for suffix in dialect)
    is_theirs = header.metadata.get("format") == TRL_FORMAT and "sparse" not in header.metadata
    return is_theirs and bool(header.entries) and all(k.endswith(suffixes) for k in header.entries)


def parse_delta(header: Header, file: object) -> ParsedDelta:
    """Read a delta's header. Raises Malformed, Unsupported."""
    metadata = header.metadata
    if metadata.get("format") != TRL_FORMAT:
        raise Malformed(
            "the file is neither deltactl's nor TRL's delta",
            file=file,
            expected=f"format {TRL_FORMAT}",
            found=metadata.get("format"),
        )
    if metadata.get("sparse", "True") != "True":
        raise Malformed("the file is an anchor, no delta", file=file)
    dialect = dialect_of(header)
    encoding = metadata.get("encoding", "raw")
    if encoding not in ("raw", "gap_delta"):
        what = "the delta's encoding can only be read where it was made"
        raise Unsupported(what, file=file, expected="raw or gap_delta", found=encoding)
    keys = _keys(header, dialect, file)
    names = sorted({name for name, _ in keys}, key=utf8)
    records = tuple(_record(header, name, keys) for name in names)
    _check_counts(metadata, records, file)
    return ParsedDelta(
        dialect=dialect,
        encoding=encoding,
        step=_optional_count(metadata, "model_version", file),
        base_step=_optional_count(metadata, "prev_model_version", file),
        total_elements=_optional_count(metadata, "total_elements", file),
        records=records,
        keys=keys,
    )


def _keys(header: Header, dialect: str, file: object) -> dict[tuple[str, str], str]:
    suffixes = _DIALECTS[dialect]
    keys = {}
    for key in header.entries:
        theirs = next((suffix for suffix in suffixes if key.endswith(suffix)), None)
        if theirs is None:
            what = "the entry is no part of a sparse tensor"
            raise Malformed(what, file=file, tensor=key, expected=" or ".join(suffixes))
        keys[key.removesuffix(theirs), suffixes[theirs]] = key
    for name, suffix in keys:
        other = ".val" if suffix == ".idx" else ".idx"
        if (name, other) not in keys:
            raise Malformed("the tensor lacks its indices or its values", file=file, tensor=name)
    return keys


def _check_counts(metadata: Mapping[str, str], records: tuple[Record, ...], file: object) -> None:
    """Compare what the header says that the delta holds with its entries. Raises Malformed.

    TRL's readers go by the first dialect's list of names. A count of 0 is what a writer leaves that
    counts nothing.
    """
    names = {record.name for record in records}
    if "changed_params" in metadata:
        listed = _listed(metadata["changed_params"], file)
        for name in sorted(listed ^ names):
            what = "the header's list of changed tensors and the entries differ"
            raise Malformed(what, file=file, tensor=name, found=_where(name in listed))
    counts = {
        "num_changed_params": len(records),
        "total_changed_elements": sum(record.changed for record in records),
    }
    for key, count in counts.items():
        said = _optional_count(metadata, key, file)
        if said not in (None, 0, count):
            what = f"the header's {key} is not what its entries hold"
            raise Malformed(what, file=file, expected=said, found=count)


def _where(listed: bool) -> str:
    return "in the list alone" if listed else "among the entries alone"


def _listed(text: str, file: object) -> set[str]:
    names = parse_json_list(text, file, what="the header's changed_params", bounds=NAMES)
    if not all(isinstance(name, str) for name in names):
        raise Malformed("the header's changed_params is no list of names", file=file)
    return set(names)


def _record(header: Header, name: str, keys: Mapping[tuple[str, str], str]) -> Record:
    index: Entry = header.entries[keys[name, ".idx"]]
    value: Entry = header.entries[keys[name, ".val"]]
    count = index.shape[0] if len(index.shape) == 1 else 0
    size = index.nbytes + value.nbytes
    return Record(name, "sparse", value.dtype, None, count, nbytes=size)
