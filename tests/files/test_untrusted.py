"""Untrusted input: text, JSON."""

from __future__ import annotations

import pytest

from deltactl.core.errors import Malformed
from deltactl.files.untrusted import is_text, parse_header_json, parse_json


def test_text() -> None:
    assert is_text("é\0\u202e")
    assert not is_text("\udc80")


def test_json_of_any_numbers() -> None:
    text = b'{"a": [-1, 2.5, 99999999999999999999], "b": "\\ud83d\\ude00"}'
    assert parse_json(text, "x") == {"a": [-1, 2.5, 99999999999999999999], "b": "😀"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"", "Expecting value"),
        (b"[]", "list"),
        (b'{"a": 1, "a": 1}', "a key stands twice"),
        (b'{"a": NaN}', "'NaN' is not allowed"),
        (b'{"a": "\\ud800"}', "a lone surrogate"),
        (b'{"a": "\xff"}', "can't decode"),
        (b"[" * 10_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "limit"),
    ],
    ids=["empty", "list", "key twice", "NaN", "surrogate", "not UTF-8", "deep", "long number"],
)
def test_what_is_no_json_object(text: bytes, found: str) -> None:
    with pytest.raises(Malformed, match="the index is no JSON object") as caught:
        parse_json(text, "x", what="the index")
    assert found in str(caught.value.found)


@pytest.mark.parametrize("number", ["-1", "-0", "1.0", "1e3", str(1 << 63), "9" * 100])
def test_numbers_that_are_no_sizes(number: str) -> None:
    with pytest.raises(Malformed):
        parse_header_json(memoryview(f'{{"a": {number}}}'.encode()), "x")


def test_the_largest_size() -> None:
    top = (1 << 63) - 1
    text = f'{{"a": [0, {top}]}}'.encode()
    assert parse_header_json(memoryview(text), "x") == {"a": [0, top]}
