"""Input that is not trusted: files opened without surprise, JSON without two meanings."""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

from deltactl.core.dtypes import MAX_SIZE
from deltactl.core.errors import DeltactlError, Malformed, NotAllowed, NotFound
from deltactl.files.json_bounds import HEADER, INDEX, TABLE, Bounds

"""The largest length, offset or number of bytes: what a file offset can hold."""


def is_size(value: object) -> TypeGuard[int]:
    """Whether a value out of JSON is a number of bytes."""
    return type(value) is int and 0 <= value <= MAX_SIZE


@contextmanager
def os_errors(
    path: object, missing: str = "no such file", hint: str | None = None
) -> Iterator[None]:
    """Turn an OSError about ``path`` into NotFound, NotAllowed, Malformed or DeltactlError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(missing, file=path, hint=hint) from None
    except PermissionError:
        raise NotAllowed("permission denied", file=path) from None
    except IsADirectoryError:
        raise Malformed("a directory where a file was expected", file=path) from None
    except OSError as error:
        raise DeltactlError(error.strerror or str(error), file=path) from error


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read; a pipe or device is Malformed, and never waited for.

    Raises NotFound, NotAllowed, Malformed.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # a pipe would wait for its writer

    with os_errors(path), open(path, "rb", opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Malformed("a pipe or device where a file was expected", file=path)
        yield file


class RawEntry(NamedTuple):
    """An entry of a safetensors header as it stands there, small: there are many, in hostile
    files more. Neither ``dtype`` nor the numbers were looked at."""

    dtype: Any
    shape: Any
    start: Any
    stop: Any


def parse_json(
    text: bytes, file: object, *, what: str = "the file", bounds: Bounds | None = None
) -> dict[str, Any]:
    """The JSON object that ``text`` is: UTF-8, no key twice, no NaN, no lone surrogate.

    ``bounds``: what it may hold at most. Raises Malformed, naming the ``file`` and ``what`` the
    text is in it.
    """
    if bounds is not None:
        bounds.check(text, file, what)
    return _document(text, file, what, object_pairs_hook=_unique)


def parse_header_json(text: memoryview, file: object) -> dict[str, Any]:
    """The JSON object of a safetensors header: as parse_json, and its numbers are integers from 0
    to MAX_SIZE.

    No object stands in it but entries, as RawEntry, the metadata, and itself: a header of millions
    of others is refused when the first few of them are built. Raises Malformed.
    """
    what = "the header"
    objects = _HeaderObjects(HEADER.check(text, file, what).keys)
    return _document(
        text, file, what, objects, object_hook=objects, parse_int=_size, parse_float=_refuse
    )


def _document(
    text: bytes | memoryview,
    file: object,
    what: str,
    objects: _HeaderObjects | None = None,
    **hooks: Any,
) -> dict[str, Any]:
    try:
        characters = str(text, "utf-8")
        document = json.loads(characters, parse_constant=_refuse, **hooks)
        if objects is not None:
            objects.check()
        if "\\u" in characters:  # only so can a lone surrogate be spelled, which is no text
            _check_text(document)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{what} is no JSON object", file=file, found=_reason(error)) from None
    if not isinstance(document, dict):
        raise Malformed(f"{what} is no JSON object", file=file, found=type(document).__name__)
    return document


MAX_INDEX = 100_000_000
"""Bytes of an index that a reader accepts; as of a header."""


def read_index(path: Path) -> bytes:
    """All bytes of an index. Raises NotFound, NotAllowed, Malformed."""
    with open_regular(path) as file:
        raw = file.read(MAX_INDEX + 1)
    if len(raw) > MAX_INDEX:
        raise Malformed("the index is too long", file=path, expected=f"<= {MAX_INDEX} bytes")
    return raw


def parse_index(raw: bytes, file: object, *, what: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The metadata and the weight_map of an index, which is a map of strings. Raises Malformed."""
    document = parse_json(raw, file, what=what, bounds=INDEX)
    metadata, weight_map = document.get("metadata"), document.get("weight_map")
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise Malformed(f"{what} lacks its metadata or its weight_map", file=file)
    if not all(isinstance(home, str) for home in weight_map.values()):
        raise Malformed("the index's weight_map is no map of strings", file=file)
    return metadata, weight_map


def parse_json_list(text: str, file: object, *, what: str, bounds: Bounds = TABLE) -> list[Any]:
    """The JSON list that ``text`` is: no key twice, no NaN. Raises Malformed, as parse_json."""
    bounds.check(text, file, what)
    try:
        rows = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{what} is no JSON list", file=file, found=_reason(error)) from None
    if not isinstance(rows, list):
        raise Malformed(f"{what} is no JSON list", file=file, found=type(rows).__name__)
    return rows


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


_ENTRY = {"dtype", "shape", "data_offsets"}
_STRANGERS = 16  # objects of other keys that are built, to say what is wrong with one by its name
_SHARED = 1 << 12  # dtypes and shapes that are held once: models have few


class _HeaderObjects:
    """Makes small what json.loads builds of a header, object by object; ``keys``: the keys in all
    of it, as counted in the text. Where fewer are left one stood twice."""

    def __init__(self, keys: int) -> None:
        self._keys = keys
        self._strangers = 0
        self._shared: dict[Any, Any] = {}

    def __call__(self, found: dict[str, Any]) -> dict[str, Any] | RawEntry:
        self._keys -= len(found)
        if found.keys() == _ENTRY:
            dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
            if isinstance(offsets, list) and len(offsets) == 2 and isinstance(dtype, str):
                return RawEntry(self._share(dtype), self._share(_as_tuple(shape)), *offsets)
        self._strangers += 1
        if self._strangers > _STRANGERS:
            raise ValueError("more objects than a header has")
        return found

    def _share(self, value: Any) -> Any:
        if len(self._shared) < _SHARED and isinstance(value, str | tuple):
            return self._shared.setdefault(repr(value), value)
        return self._shared.get(repr(value), value)

    def check(self) -> None:
        """Raise ValueError where a key stood twice."""
        if self._keys:
            raise ValueError("a key stands twice")


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _check_text(document: object) -> None:
    """Raise ValueError for a string that is no text."""
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, str):
            value.encode("utf-8")
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            left += [item for item in value if not isinstance(item, int)]


def _size(digits: str) -> int:
    if digits.startswith("-") or len(digits) > 19 or int(digits) > MAX_SIZE:
        raise ValueError(f"the number {reprlib.repr(digits)} is no size")
    return int(digits)


def _refuse(number: str) -> float:
    raise ValueError(f"the number {reprlib.repr(number)} is not allowed")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a lone surrogate" if isinstance(error, UnicodeEncodeError) else str(error)


def is_text(name: str) -> bool:
    """Whether ``name`` can be written as UTF-8: no lone surrogates in it."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
