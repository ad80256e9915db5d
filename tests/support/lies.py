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


def rewrite(delta: Path, change: Change) -> None:
    """Let ``change`` alter a delta's header and payload, then make both digests fit again."""
    raw = delta.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header: Header = json.loads(raw[8:start])
    payload = bytearray(raw[start:])
    change(header, payload)
    metadata = header["__metadata__"]
    metadata["deltactl.payload_digest"] = blake3(payload).hexdigest()
    metadata[_PLACE] = "0" * 64
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    sealed = len(text).to_bytes(8, "little") + text
    digest = blake3(sealed).hexdigest().encode()
    place = f'"{_PLACE}":"'.encode()
    delta.write_bytes(sealed.replace(place + b"0" * 64, place + digest) + bytes(payload))


def rows(header: Header) -> list[dict[str, Any]]:
    """The tensor table; put it back with ``set_rows``."""
    found: list[dict[str, Any]] = json.loads(header["__metadata__"]["deltactl.tensors"])
    return found


def set_rows(header: Header, table: list[dict[str, Any]]) -> None:
    header["__metadata__"]["deltactl.tensors"] = json.dumps(table, separators=(",", ":"))


def rewrite_index(index: Path, change: Callable[[Header], None]) -> None:
    """Let ``change`` alter an index, then make its digest fit again."""
    document: Header = json.loads(index.read_bytes())
    change(document)
    document["metadata"][_PLACE] = "0" * 64
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    place = f'"{_PLACE}":"'.encode()
    digest = blake3(text).hexdigest().encode()
    index.write_bytes(text.replace(place + b"0" * 64, place + digest))


def table_of(index: Header, key: str) -> list[dict[str, Any]]:
    """A table of an index, "tensors" or "files"; put it back with ``set_table``."""
    found: list[dict[str, Any]] = json.loads(index["metadata"][f"deltactl.{key}"])
    return found


def set_table(index: Header, key: str, table: object) -> None:
    index["metadata"][f"deltactl.{key}"] = json.dumps(table, separators=(",", ":"))
