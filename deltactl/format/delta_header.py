"""What a delta's header says: parsed and checked, of our deltas and of both of TRL's dialects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from deltactl.codec import encoding_named
from deltactl.codec.base import Encoding
from deltactl.core.errors import Malformed
from deltactl.files.safetensors import Entry, Header
from deltactl.format import trl
from deltactl.format.header import (
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
from deltactl.format.metadata_check import check_counts, check_fixed

DENSE = ".dense"
"""The suffix of a tensor that a delta carries whole."""


@dataclass(frozen=True, slots=True)
class PartFile:
    """One file of a delta of several: its name beside the index, its size, and the digests of its
    header, 8 + L bytes, and of its payload."""

    name: str
    nbytes: int
    header_digest: str
    payload_digest: str


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """What a delta's header says. States and digest are None in what TRL wrote.

    A delta of several files has ``files``, with the digests of their payloads, and none of its own;
    ``homes`` says which of them holds a tensor. ``nbytes``: of all files.
    """

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
    keys: dict[str, dict[str, str]] = field(repr=False)
    files: tuple[PartFile, ...] = ()
    homes: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(record.nbytes for record in self.records.values())

    @property
    def header_bytes(self) -> int:
        """Bytes of all but the entries; of one file, where its payload begins."""
        return self.nbytes - self.payload_bytes

    @property
    def has_digests(self) -> bool:
        """Whether it says what its payload and its states are, as all but TRL's do."""
        return self.result_state is not None

    @property
    def changed_elements(self) -> int:
        """Elements whose bits change, those of added tensors included."""
        return sum(record.changed for record in self.records.values())

    @property
    def sparsity(self) -> float | None:
        """Share of the result's elements that keep their bits; None where it is not known of how
        many; 0.0 where the result has none and something changed."""
        if self.total_elements is None:
            return None
        if not self.total_elements:
            return 0.0 if self.records else 1.0
        return 1 - self.changed_elements / self.total_elements


def says_delta(header: Header) -> bool:
    """Whether a file says that it is a delta, ours or TRL's, or holds nothing but a delta's parts;
    it may be malformed all the same."""
    says_so = header.metadata.get("sparse") == "True" or PREFIX + "base_state" in header.metadata
    return says_so or trl.looks_like_delta(header)


def parse_delta(header: Header, file: object) -> DeltaHeader:
    """Check the header of a delta of one file, which may have come by range.

    Raises Malformed, Unsupported.
    """
    metadata = header.metadata
    if not is_ours(metadata):
        return _parse_trl(header, file)
    found = parse_ours(header.raw, metadata, file)
    check_entries(header, found.records.values(), found.keys, file)
    records = {
        name: replace(record, nbytes=sum(header.entries[key].nbytes for key in keys))
        for name, record in found.records.items()
        for keys in [found.keys[name].values()]
    }
    digest = need_digest(metadata, "payload_digest", file)
    return replace(found, records=records, payload_digest=digest, nbytes=header.file_size)


def parse_ours(raw: bytes, metadata: dict[str, str], file: object) -> DeltaHeader:
    """What a delta's metadata says, whose header, or whose index, is ``raw``; the seal first.

    Of its files and entries nothing is known yet. Raises Malformed, Unsupported.
    """
    check_seal(raw, metadata, file)
    check_version(metadata, file)
    if metadata.get("sparse") != "True":
        raise Malformed("the file is no delta", file=file, found=metadata.get("sparse"))
    check_fixed(metadata, file)
    encoding = encoding_named(metadata.get("encoding", ""), file)
    rows = table_rows(metadata.get(PREFIX + "tensors", ""), file)
    records = [record_from_json(row, file) for row in rows]
    in_order([record.name for record in records], file)
    base_state = need_digest(metadata, "base_state", file)
    result_state = need_digest(metadata, "result_state", file)
    check_counts(metadata, records, base_state, result_state, file)
    step = "model_version" in metadata
    base_step = "prev_model_version" in metadata
    return DeltaHeader(
        file=str(file),
        dialect="deltactl",
        encoding=encoding.name,
        step=need_count(metadata, "model_version", file) if step else None,
        base_step=need_count(metadata, "prev_model_version", file) if base_step else None,
        base_state=base_state,
        result_state=result_state,
        payload_digest=None,
        total_elements=need_count(metadata, "total_elements", file),
        records={record.name: record for record in records},
        metadata=metadata,
        nbytes=len(raw),
        keys={record.name: _keys(record, encoding) for record in records},
    )


def _keys(record: Record, encoding: Encoding) -> dict[str, str]:
    """The keys of a tensor's entries by suffix."""
    suffixes = (DENSE,) if record.whole else encoding.suffixes
    return {suffix: record.name + suffix for suffix in suffixes if record.kind != "removed"}


def check_entries(
    header: Header,
    records: Iterable[Record],
    keys: Mapping[str, Mapping[str, str]],
    file: object,
) -> None:
    """Raise Malformed unless a file's entries are those of these records, no more and no fewer."""
    known: set[str] = set()
    for record in records:
        for key in keys[record.name].values():
            if key not in header.entries:
                raise Malformed(f"the delta lacks {key!r}", file=file, tensor=record.name)
            known.add(key)
        if record.whole:
            _check_whole(header.entries[record.name + DENSE], record, file)
    for key in header.entries:
        if key not in known:
            raise Malformed("the tensor table does not name this entry", file=file, tensor=key)


def _check_whole(entry: Entry, record: Record, file: object) -> None:
    if (entry.dtype, entry.shape) != (record.dtype, record.shape):
        raise Malformed(
            "the tensor carried whole is not of the dtype and shape that the table gives",
            file=file,
            tensor=record.name,
            expected=f"{record.dtype} {list(record.shape or ())}",
            found=f"{entry.dtype} {list(entry.shape)}",
        )


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
        keys=dict(by_name),
    )
