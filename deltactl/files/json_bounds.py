"""How much a JSON text would build, counted before anything of it is built.

Two bytes of text can become an object of a hundred: 20 MB of nested lists took 600. What a text may
hold follows from what it is, as a header's objects are its entries. Counting looks at the marks
outside of strings alone, so that a table within a string costs nothing here, and is counted when
its own turn comes. Up to the first wrong character of a text the counts are true, and beyond that
no parser comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from deltactl.core.errors import Malformed

MAX_TENSORS = 300_000
"""Entries of one safetensors file that a reader accepts. The largest models have about as many
tensors in all their files together."""

_PIECE = 1 << 18  # bytes of text looked at together
_SLACK = 1 << 16  # of anything: some megabytes at most
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPEN_LIST, _OPEN_OBJECT = b"[{"

_Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Counts:
    """Of a JSON text: its objects, its lists, the keys of all objects, and the commas."""

    objects: int
    lists: int
    keys: int
    commas: int


def count(text: bytes | memoryview | str) -> Counts:
    """Count; in a few megabytes of memory, however long the text is."""
    marks = np.frombuffer(bytes([_OPEN_OBJECT, _OPEN_LIST, _COLON, _COMMA]), np.uint8)
    found = np.zeros(marks.size, np.int64)
    within, slashes = False, 0
    for piece in _pieces(text):
        data = np.frombuffer(piece, np.uint8)
        quotes, slashes = _quotes(data, slashes)
        inside = np.logical_xor.accumulate(quotes) ^ within
        within = bool(inside[-1])
        outside = data[~inside]
        found += [np.count_nonzero(outside == mark) for mark in marks]
    return Counts(*found.tolist())


def _pieces(text: bytes | memoryview | str) -> Iterator[bytes | memoryview]:
    for at in range(0, len(text), _PIECE):
        piece = text[at : at + _PIECE]
        yield piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece


def _quotes(data: npt.NDArray[np.uint8], slashes: int) -> tuple[_Marks, int]:
    """Which bytes begin or end a string, and how many backslashes are the last bytes.

    ``slashes``: how many came just before. After an odd number of them a quote is one of the text.
    """
    quotes = data == _QUOTE
    slash = data == _BACKSLASH
    if not slashes and not slash.any():
        return quotes, 0
    at = np.arange(data.size, dtype=np.int32)
    last_other = np.maximum.accumulate(np.where(slash, np.int32(-1 - slashes), at))
    before = at - last_other  # backslashes that end here
    quotes[1:] &= before[:-1] % 2 == 0
    quotes[0] &= slashes % 2 == 0
    return quotes, int(before[-1])


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that a kind of text may hold. Lists, keys and commas: so many for each object, and
    some more; keys moreover not closer than so many bytes of text for each."""

    objects: int
    lists: tuple[int, int]
    keys: tuple[int, int]
    commas: tuple[int, int]
    bytes_a_key: int = 1

    def check(self, text: bytes | memoryview | str, file: object, what: str) -> Counts:
        """Count what ``what`` of the ``file`` holds. Raises Malformed where it is too much."""
        found = count(text)
        most = Counts(
            self.objects,
            *(more + each * found.objects for more, each in (self.lists, self.keys, self.commas)),
        )
        keys = min(most.keys, _SLACK + len(text) // self.bytes_a_key)
        most = Counts(most.objects, most.lists, keys, most.commas)
        names = ("objects", "lists", "keys", "commas")
        for name, number, limit in zip(names, astuple(found), astuple(most), strict=True):
            if number > limit:
                fault = f"{what} has more {name} than one of its kind can have"
                raise Malformed(fault, file=file, expected=f"<= {limit}", found=number)
        return found


HEADER = Bounds(MAX_TENSORS + 16, (16, 2), (_SLACK, 4), (4 * _SLACK, 12))
"""Of a safetensors file: an object, two lists and four keys an entry; then the metadata's keys."""

TABLE = Bounds(4 * MAX_TENSORS, (_SLACK, 2), (_SLACK, 16), (_SLACK, 24), bytes_a_key=10)
"""Of a link's tensors or files: one or two objects a row. Rows may have keys that are not known."""

NAMES = Bounds(0, (1, 0), (0, 0), (2 * MAX_TENSORS, 0))
"""A list of names."""

INDEX = Bounds(_SLACK, (_SLACK, 0), (2 * MAX_TENSORS, 0), (2 * MAX_TENSORS + _SLACK, 0))
"""Of several files: a key for each tensor of all."""

MODEL_CONFIG = Bounds(_SLACK, (_SLACK, 0), (4 * _SLACK, 0), (4 * _SLACK, 0))
"""A model's: of those with 20,000 labels the largest, some 40,000 keys."""
