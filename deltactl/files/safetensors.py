"""The safetensors container: headers parsed strictly, headers made, bytes mapped.

Our own reader, because the library's gives no offsets, no sub-byte or future dtypes in numpy, and
no way to look at a header that came by range. Format: 8 bytes little-endian header length, a JSON
header, then the tensors' bytes without gaps (https://github.com/huggingface/safetensors).

Stricter than the library, never laxer: a key that stands twice, an unknown key of an entry, and
white space before the header are refused here. The library writes none of these, and each lets two
readers see two different files.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltactl.core.dtypes import DTYPES, MAX_SIZE, nbytes_of
from deltactl.core.errors import Malformed
from deltactl.files.json_bounds import MAX_TENSORS
from deltactl.files.mapped import map_bytes, sound_sources
from deltactl.files.signatures import SAMPLE, foreign
from deltactl.files.untrusted import RawEntry, open_regular, parse_header_json

MAX_HEADER = 100_000_000
"""Bytes of header that a reader accepts; the safetensors library has the same limit."""

METADATA = "__metadata__"
"""The one key of a header that names no tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a container: ``start`` and ``stop`` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header: entries in order of offset, metadata, raw ``8 + N`` bytes, whole size."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    raw: bytes
    file_size: int


def header_length(prefix: bytes, file: object) -> int:
    """The number of bytes before the data section (8 + N), from the first 8 bytes of a file.

    Raises Malformed; Unsupported for a file of another kind, told by as much as ``prefix`` has.
    """
    if len(prefix) < 8:
        raise foreign(prefix, file) or Malformed(
            "too short for a safetensors file", file=file, expected="8 bytes", found=len(prefix)
        )
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER:
        raise foreign(prefix, file) or Malformed(
            "the header length is out of range",
            file=file,
            expected=f"<= {MAX_HEADER}",
            found=length,
        )
    return 8 + length


def parse_header(raw: bytes, file_size: int, file: object) -> Header:
    """Parse the first ``8 + N`` bytes of a safetensors file of ``file_size`` bytes.

    Raises Malformed, naming ``file``, unless every entry is in bounds and of the size that its
    dtype and shape give, and the entries fill the data section without gap or overlap.
    """
    start = header_length(raw, file)
    if start > file_size or len(raw) < start:
        raise Malformed(
            "the file ends inside its header",
            file=file,
            expected=f"{start} bytes or more",
            found=min(file_size, len(raw)),
        )
    if raw[8:9] != b"{":
        what = "the header does not begin with {"
        raise Malformed(what, file=file, expected="{", found=reprlib.repr(bytes(raw[8:9])))
    document = parse_header_json(memoryview(raw)[8:start], file)
    if not _ends_the_object(raw, start):
        what = "the header is padded with something else than spaces"
        raise Malformed(what, file=file, found=reprlib.repr(bytes(raw[start - 8 : start])))
    metadata = _metadata(document.pop(METADATA, {}), file)
    for name, value in document.items():  # each in the place of what it is made of
        document[name] = _entry(name, value, start, file)
    entries = list(document.values())
    document.clear()
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    at = start
    for entry in entries:
        if entry.start != at:
            what = "the tensor's bytes overlap its neighbour's or leave a gap"
            raise Malformed(what, file=file, tensor=entry.name, expected=at, found=entry.start)
        at = entry.stop
    if at != file_size:
        raise Malformed(
            "the file is truncated or has bytes after its last tensor",
            file=file,
            expected=f"{at} bytes",
            found=file_size,
        )
    return Header({entry.name: entry for entry in entries}, metadata, bytes(raw[:start]), file_size)


def _ends_the_object(raw: bytes, end: int) -> bool:
    """Whether nothing but spaces stands between the last brace and the ``end``."""
    after = raw.rfind(b"}", 0, end) + 1
    return raw.count(b" ", after, end) == end - after


def _metadata(value: object, file: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise Malformed(f"{METADATA} is no map of strings", file=file, found=reprlib.repr(value))
    return value


def _is_sizes(value: object) -> bool:
    # bool is a subclass of int; the range of the integers was checked when they were parsed
    return isinstance(value, tuple) and all(type(item) is int for item in value)


def _entry(name: str, value: object, base: int, file: object) -> Entry:
    def wrong(what: str, found: object, expected: object = None) -> Malformed:
        return Malformed(what, file=file, tensor=name, expected=expected, found=found)

    if not isinstance(value, RawEntry):
        found = value if isinstance(value, dict) else {}
        if found.keys() != {"dtype", "shape", "data_offsets"}:
            expected = "dtype, shape, data_offsets"
            raise wrong("the header's entry is malformed", reprlib.repr(value), expected)
        if not isinstance(found["dtype"], str):
            raise wrong("unknown dtype", reprlib.repr(found["dtype"]))
        raise wrong("the offsets are malformed", reprlib.repr(found["data_offsets"]))
    dtype, shape, start, stop = value
    if dtype not in DTYPES:
        raise wrong("unknown dtype", reprlib.repr(dtype))
    if not _is_sizes(shape):
        raise wrong("the shape is malformed", reprlib.repr(shape))
    if not _is_sizes((start, stop)):
        raise wrong("the offsets are malformed", reprlib.repr([start, stop]))
    try:
        size = nbytes_of(dtype, shape)
    except ValueError as error:
        raise wrong(str(error), f"{dtype} {reprlib.repr(shape)}") from None
    if stop - start != size:
        raise wrong("the tensor's bytes do not fit its dtype and shape", stop - start, size)
    return Entry(name, dtype, shape, base + start, base + stop)


def read_header(path: Path) -> Header:
    """The header of the file at ``path``. Raises NotFound, NotAllowed, Malformed."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(SAMPLE)
        length = header_length(prefix, path)
        raw = prefix + file.read(max(0, min(length, size) - len(prefix)))
        return parse_header(raw[:length], size, path)


def make_header(
    entries: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """The first ``8 + N`` bytes of a file of ``entries`` (name, dtype, shape) in this order.

    Deterministic: metadata in order of key, padded with spaces to a multiple of 8. Raises
    ValueError for what no reader takes: a name twice or not text, a bad dtype or size, too long a
    header.
    """
    document: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))}
    at = 0
    for name, dtype, shape in entries:
        if name in document:
            raise ValueError(f"the name {name!r} is taken")
        size = nbytes_of(dtype, shape)
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    if not metadata:
        del document[METADATA]
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER or at > MAX_SIZE or len(document) > MAX_TENSORS:
        raise ValueError("too many or too large tensors for one file")
    return len(text).to_bytes(8, "little") + text


def map_file(path: Path) -> tuple[Header, npt.NDArray[np.uint8]]:
    """Header and mapped bytes of one file, from one opening: no rename can come in between.

    Raises NotFound, NotAllowed, Malformed.
    """
    data = map_bytes(path)
    with sound_sources(data):
        length = header_length(data[:SAMPLE].tobytes(), path)
        return parse_header(data[:length].tobytes(), data.size, path), data
