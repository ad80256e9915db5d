"""Input that is not trusted: files opened without surprise, JSON without two meanings."""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from deltactl.core.errors import DeltactlError, Malformed, NotAllowed, NotFound

MAX_SIZE = (1 << 63) - 1
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


def parse_json(
    text: bytes, file: object, *, what: str = "the file", sizes_only: bool = False
) -> dict[str, Any]:
    """The JSON object that ``text`` is: UTF-8, no key twice, no NaN, no lone surrogate.

    With ``sizes_only`` it is a safetensors header: its numbers are integers from 0 to MAX_SIZE, and
    no object stands in it but entries, the metadata, and itself; so a header of millions of others
    is refused when the first few of them are built. Raises Malformed, naming the
    ``file`` and ``what`` the text is in it.
    """

    hooks: dict[str, Any] = {"parse_int": _size, "parse_float": _refuse} if sizes_only else {}
    objects = _of_a_header() if sizes_only else _unique
    try:
        document = json.loads(
            text.decode("utf-8"), object_pairs_hook=objects, parse_constant=_refuse, **hooks
        )
        if b"\\u" in text:  # only so can a lone surrogate be spelled, which is no text
            json.dumps(document, ensure_ascii=False).encode("utf-8")
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
    document = parse_json(raw, file, what=what)
    metadata, weight_map = document.get("metadata"), document.get("weight_map")
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise Malformed(f"{what} lacks its metadata or its weight_map", file=file)
    if not all(isinstance(home, str) for home in weight_map.values()):
        raise Malformed("the index's weight_map is no map of strings", file=file)
    return metadata, weight_map


def parse_json_list(text: str, file: object, *, what: str) -> list[Any]:
    """The JSON list that ``text`` is: no key twice, no NaN. Raises Malformed, as parse_json."""
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


def _of_a_header() -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    left = _STRANGERS

    def built(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal left
        result = _unique(pairs)
        if result.keys() != _ENTRY:
            left -= 1
            if left < 0:
                raise ValueError("more objects than a header has")
        return result

    return built


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


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is one component of a path and nothing else: safe to put after a directory.

    False for "", ".", "..", separators of either kind, and what cannot be printed: NUL and other
    control characters, lone surrogates, marks that turn the direction of text.
    """
    return name not in ("", ".", "..") and name.isprintable() and not {"/", "\\"} & set(name)


def is_text(name: str) -> bool:
    """Whether ``name`` can be written as UTF-8: no lone surrogates in it."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
