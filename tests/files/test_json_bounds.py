"""What a JSON text would build is counted right, and what is sound is within the bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltactl.core.errors import Malformed
from deltactl.files import json_bounds
from deltactl.files.json_bounds import HEADER, INDEX, MAX_TENSORS, Counts, count
from deltactl.files.safetensors import make_header, parse_header

MARKS = st.text(alphabet='"\\,:[]{}é\n a', max_size=9)
VALUES = st.recursive(
    MARKS | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(MARKS, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> list[int]:
    """Objects, lists, keys and commas, by the value that is built."""
    if not isinstance(value, dict | list):
        return [0, 0, 0, 0]
    is_object = isinstance(value, dict)
    inner = list(value.values()) if is_object else value
    own = [int(is_object), int(not is_object), len(inner) * is_object, max(0, len(inner) - 1)]
    return [sum(column) for column in zip(own, *map(counted, inner), strict=True)]


@given(VALUES, st.integers(1, 40), st.booleans())
def test_counts_are_those_of_the_value(value: Any, piece: int, ascii_only: bool) -> None:
    """However the text falls into pieces: a quote's backslash may be in the one before."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "_PIECE", piece)
        expected = Counts(*counted(value))
        assert count(text) == expected
        assert count(text.encode()) == count(memoryview(text.encode())) == expected


def test_a_header_of_all_tensors_of_the_largest_models_is_read() -> None:
    names = (
        f"model.layers.{n // 3000}.mlp.experts.{n}.gate_up_proj.weight" for n in range(200_000)
    )
    raw = make_header([(name, "BF16", (0, 7168, 2048)) for name in names], {"a": "[{]" * 1_000_000})
    assert len(raw) > 25_000_000
    header = parse_header(raw, len(raw), "x")
    assert len(header.entries) == 200_000
    assert {entry.shape for entry in header.entries.values()} == {(0, 7168, 2048)}


def test_no_header_is_made_that_is_not_read() -> None:
    entries = [(f"{n}", "U8", (0,)) for n in range(MAX_TENSORS + 1)]
    raw = make_header(entries[:-1], {})
    assert len(parse_header(raw, len(raw), "x").entries) == MAX_TENSORS
    with pytest.raises(ValueError, match="too many or too large"):
        make_header(entries, {})


def test_the_error_has_what_there_was_and_what_there_may_be() -> None:
    with pytest.raises(Malformed) as caught:
        HEADER.check(b'{"a":{"shape":[' + b"[]," * 100, "x.safetensors", "the header")
    facts = caught.value.facts()
    assert facts["what"] == "the header has more lists than one of its kind can have"
    assert (facts["file"], facts["expected"], facts["found"]) == ("x.safetensors", "<= 20", 101)


def test_an_index_of_more_tensors_than_a_file() -> None:
    pairs = ",".join(f'"{n}":"a"' for n in range(2 * MAX_TENSORS - 3))
    text = b'{"metadata":{"total_size":0},"weight_map":{%b}}' % pairs.encode()
    assert INDEX.check(text, "x", "the index").keys == 2 * MAX_TENSORS
