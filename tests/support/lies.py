"""Links that say of themselves that they are sound, and are not what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

Header = dict[str, Any]
Change = Callable[[Header, bytearray], None]

_PLACE = "deltactl.header_digest"
_PAYLOAD = "deltactl.payload_digest"
_ZEROS = "0" * 64


def rewrite(delta: Path, change: Change) -> None:
    """Let ``change`` alter a link's header and payload, then make the digests fit again that it
    has not altered itself."""
    raw = delta.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header: Header = json.loads(raw[8:start])
    payload = bytearray(raw[start:])
    before = dict(header["__metadata__"])
    change(header, payload)
    metadata = header["__metadata__"]
    if (digest := metadata.get(_PAYLOAD)) is not None and digest == before[_PAYLOAD]:
        metadata[_PAYLOAD] = blake3(payload).hexdigest()
    altered = metadata.get(_PLACE) != before[_PLACE]
    if not altered:
        metadata[_PLACE] = _ZEROS
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    delta.write_bytes((raw if altered else _sealed(raw)) + bytes(payload))


def _sealed(raw: bytes) -> bytes:
    place = f'"{_PLACE}":"'.encode()
    digest = blake3(raw).hexdigest().encode()
    return raw.replace(place + _ZEROS.encode(), place + digest)


def rows(header: Header) -> list[dict[str, Any]]:
    """The tensor table; put it back with ``set_rows``."""
    found: list[dict[str, Any]] = json.loads(header["__metadata__"]["deltactl.tensors"])
    return found


def set_rows(header: Header, table: list[dict[str, Any]]) -> None:
    header["__metadata__"]["deltactl.tensors"] = json.dumps(table, separators=(",", ":"))


def rewrite_index(index: Path, change: Callable[[Header], None]) -> None:
    """Let ``change`` alter an index, then make its digest fit again unless that is altered."""
    document: Header = json.loads(index.read_bytes())
    before = document["metadata"][_PLACE]
    change(document)
    altered = document["metadata"].get(_PLACE) != before
    if not altered:
        document["metadata"][_PLACE] = _ZEROS
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    index.write_bytes(text if altered else _sealed(text))


def table_of(index: Header, key: str) -> list[dict[str, Any]]:
    """A table of an index, "tensors" or "files"; put it back with ``set_table``."""
    found: list[dict[str, Any]] = json.loads(index["metadata"][f"deltactl.{key}"])
    return found


def set_table(index: Header, key: str, table: object) -> None:
    index["metadata"][f"deltactl.{key}"] = json.dumps(table, separators=(",", ":"))
