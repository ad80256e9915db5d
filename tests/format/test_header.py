"""Rows of the tables and the header's seal: sound ones come back, all others are malformed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltactl.core.digest import TensorState, hasher
from deltactl.core.errors import Malformed, Unsupported
from deltactl.format.anchor import AnchorFile, anchor_index, parse_anchor_index
from deltactl.format.header import (
    HEADER_DIGEST,
    PLACEHOLDER,
    Record,
    check_seal,
    check_version,
    in_order,
    record_from_json,
    record_to_json,
    seal,
    state_from_json,
    state_to_json,
    table_rows,
    table_text,
)

DIGEST = "0123456789abcdef" * 4
RECORDS = [
    Record("w", "sparse", "BF16", (4, 8), 3, DIGEST, 0, (1 << 64) - 1),
    Record("w", "dense", "BF16", (4, 8), 32, DIGEST),
    Record("w", "dense", "F32", (), 1, DIGEST, base_dtype="F4", base_shape=(2, 0)),
    Record('ü "', "added", "F4", (8,), 4, DIGEST),
    Record("", "removed", "F6_E2M3", (0,), 0),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
LIKELY = st.sampled_from(
    [
        "sparse",
        "dense",
        "removed",
        "BF16",
        "F4",
        DIGEST,
        "0" * 16,
        10**15,
        -1,
        1 << 70,
        True,
        [],
        {},
    ]
)


# Rows.


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.kind} {record.dtype}")
def test_records_come_back(record: Record) -> None:
    (row,) = table_rows(table_text([record_to_json(record)]), "file")
    assert record_from_json(row, "file") == record
    assert record_from_json(row | {"later": [1]}, "file") == record


def test_rows_are_compact_and_in_the_pages_order() -> None:
    text = table_text([record_to_json(RECORDS[0]), record_to_json(RECORDS[2])])
    assert text == (
        '[{"name":"w","kind":"sparse","dtype":"BF16","shape":[4,8],"changed":3,'
        f'"digest":"{DIGEST}","old":"0000000000000000","new":"ffffffffffffffff"}},'
        '{"name":"w","kind":"dense","dtype":"F32","shape":[],"changed":1,'
        f'"digest":"{DIGEST}","base":{{"dtype":"F4","shape":[2,0]}}}}]'
    )


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.kind} {record.dtype}")
@given(data=st.data())
@settings(max_examples=100)
def test_other_rows_are_malformed_or_still_sound(record: Record, data: st.DataObject) -> None:
    row: dict[str, Any] = record_to_json(record)
    key = data.draw(st.sampled_from([*row, "base"]))
    if data.draw(st.booleans()):
        row.pop(key, None)
    else:
        row[key] = data.draw(LIKELY | JSON)
    try:
        found = record_from_json(row, "file")
    except Malformed:
        return
    assert record_from_json(json.loads(json.dumps(record_to_json(found))), "file") == found


@given(LIKELY | JSON)
def test_what_is_no_row(row: object) -> None:
    for read in (record_from_json, state_from_json):
        with pytest.raises(Malformed):
            read(row, "file")


def test_states_come_back() -> None:
    tensor = TensorState("w", "BF16", (2, 3), DIGEST)
    assert state_from_json(state_to_json(tensor) | {"sum": "0" * 16}, "file") == tensor


@pytest.mark.parametrize("text", ["", "{}", "null", "[", "[1e999999999]x", "[" * 100_000, "\ud800"])
def test_what_is_no_table(text: str) -> None:
    with pytest.raises(Malformed):
        table_rows(text, "file")


@pytest.mark.parametrize("names", [["b", "a"], ["a", "a"], ["\U0001f600", "\uff5e"], ["\ud800"]])
def test_tables_out_of_order(names: list[str]) -> None:
    with pytest.raises(Malformed):
        in_order(names, "file")


def test_tables_in_order() -> None:
    in_order([], "file")
    in_order(["", "B", "a", "a.b", "\uff5e", "\U0001f600"], "file")


# The seal.


def sealed(**others: str) -> tuple[bytes, dict[str, str]]:
    metadata = {**others, HEADER_DIGEST: PLACEHOLDER}
    raw = seal(json.dumps({"__metadata__": metadata}, separators=(",", ":")).encode())
    return raw, json.loads(raw)["__metadata__"]


def test_a_seal_is_the_digest_of_the_header_with_zeros_in_its_place() -> None:
    raw, metadata = sealed(a="b")
    digest = metadata[HEADER_DIGEST]
    assert hasher().update(raw.replace(digest.encode(), b"0" * 64)).hexdigest() == digest
    check_seal(raw, metadata, "file")


def test_every_flipped_bit_of_a_header_is_seen() -> None:
    raw, _ = sealed(a="b")
    for bit in range(8 * len(raw)):
        torn = bytearray(raw)
        torn[bit // 8] ^= 1 << bit % 8
        try:
            metadata = json.loads(torn)["__metadata__"]
        except (ValueError, KeyError):
            continue
        with pytest.raises(Malformed):
            check_seal(bytes(torn), metadata, "file")


def test_a_digest_that_stands_twice_or_with_space_is_none() -> None:
    raw, metadata = sealed()
    text = f'"{HEADER_DIGEST}":"{metadata[HEADER_DIGEST]}"'.encode()
    for other in (text + b"," + text, text.replace(b":", b": "), b""):
        with pytest.raises(Malformed):
            check_seal(raw.replace(text, other), metadata, "file")


def test_a_digest_in_a_string_is_not_in_the_way() -> None:
    raw, metadata = sealed(name=f'"{HEADER_DIGEST}":"{PLACEHOLDER}"')
    check_seal(raw, metadata, "file")


def test_only_what_has_a_place_is_sealed() -> None:
    for raw in (b"{}", f'{{"{HEADER_DIGEST}":"{DIGEST}"}}'.encode()):
        with pytest.raises(ValueError, match="no place"):
            seal(raw)


@pytest.mark.parametrize("version", ["2", "10", "999999"])
def test_later_formats_are_refused(version: str) -> None:
    with pytest.raises(Unsupported):
        check_version({"deltactl.format": version}, "file")


@pytest.mark.parametrize("version", ["", "0", "01", "1.0", "x", "-1", "1 ", "1000000000", None])
def test_what_is_no_format(version: str | None) -> None:
    with pytest.raises(Malformed):
        check_version({} if version is None else {"deltactl.format": version}, "file")


# The table of files.


def index(name: str, is_shard: bool = False) -> bytes:
    files = (AnchorFile("s.safetensors", 1, DIGEST, True), AnchorFile(name, 1, DIGEST, is_shard))
    tensors = (TensorState("w", "U8", (1,), DIGEST),)
    return anchor_index(7, tensors, {"w": "s.safetensors"}, files)


@pytest.mark.parametrize("name", ["a", "a/b.json", "a b", "ü", "..a", "a.."])
def test_plain_paths_are_taken(name: str) -> None:
    found = parse_anchor_index(index(name), "file")
    assert [file.name for file in found.files if not file.is_shard] == [name]
    assert found.step == 7


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/a", "a/", "a//b", "a/../b", "./a", "../a", "a\\b", "a\nb", "a\0"]
)
def test_paths_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(Malformed):
        parse_anchor_index(index(name), "file")


def test_shards_lie_beside_the_index() -> None:
    with pytest.raises(Malformed):
        parse_anchor_index(index("a/b.safetensors", is_shard=True), "file")
