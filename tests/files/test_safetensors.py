"""The safetensors container: what is read, what is refused, and agreement with the library."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from deltactl.core.dtypes import DTYPES, nbytes_of
from deltactl.core.errors import DeltactlError, Malformed, NotAllowed, NotFound, Unsupported
from deltactl.files import safetensors as safetensors_io
from deltactl.files.safetensors import (
    MAX_HEADER,
    Header,
    make_header,
    map_bytes,
    map_file,
    parse_header,
    read_header,
)
from tests.support.checkpoints import (
    BITS,
    Spec,
    pack_safetensors,
    random_tensor,
    raw_safetensors,
    write_safetensors,
)

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
EIGHT = bytes(range(8))

LIBRARY_NAMES = {
    "bool": "BOOL", "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16", "int32": "I32",
    "uint32": "U32", "int64": "I64", "uint64": "U64", "float16": "F16", "float32": "F32",
    "float64": "F64", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0", "complex64": "C64", "float4_e2m1fn_x2": "F4",
}  # fmt: skip
"""What the library's writer calls each dtype that it writes, and the code that it writes."""


def parse(raw: bytes) -> Header:
    return parse_header(raw, len(raw), "x.safetensors")


def library(raw: bytes) -> dict[str, Spec]:
    """What the safetensors library reads from these bytes."""
    found = safetensors.deserialize(raw)
    return {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in found}


def ours(raw: bytes) -> dict[str, Spec]:
    return {e.name: (e.dtype, e.shape, raw[e.start : e.stop]) for e in parse(raw).entries.values()}


def one(**changes: object) -> bytes:
    """A file of one tensor "a" whose entry is changed."""
    return raw_safetensors({"a": F32 | changes}, EIGHT)


def text(header: str, payload: bytes = EIGHT) -> bytes:
    return raw_safetensors(header.encode("utf-8", "surrogatepass"), payload)


ENTRY = json.dumps(F32)
TWO = {"a": F32, "b": F32 | {"data_offsets": [8, 16]}}

MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "the file is empty"),
    "seven bytes": (bytes(7), "too short"),
    "length beyond the limit": ((MAX_HEADER + 1).to_bytes(8, "little") + b"{}", "length is out of"),
    "length of all ones": (b"\xff" * 8 + b"{}", "length is out of"),
    "ends inside the header": (one()[:40], "ends inside its header"),
    "no header": (bytes(8), "does not begin with {"),
    "space before the header": (text(' {"a":' + ENTRY + "}"), "does not begin with {"),
    "byte order mark": (text('\ufeff{"a":' + ENTRY + "}"), "does not begin with {"),
    "array": (text("[1]", b""), "does not begin with {"),
    "number": (text("3", b""), "does not begin with {"),
    "cut JSON": (text('{"a":', b""), "no JSON object"),
    "bytes after the JSON": (text("{} {}", b""), "no JSON object"),
    "NUL as padding": (text("{}\0", b""), "no JSON object"),
    "not UTF-8": (raw_safetensors(b'{"\xff":1}'), "no JSON object"),
    "raw surrogate": (text('{"\ud800":' + ENTRY + "}"), "no JSON object"),
    "escaped surrogate in a name": (text('{"\\ud800":' + ENTRY + "}"), "no JSON object"),
    "escaped surrogate in metadata": (text('{"__metadata__":{"a":"\\udfff"}}', b""), "no JSON"),
    "tensor twice": (text('{"a":' + ENTRY + ',"a":' + ENTRY + "}"), "no JSON object"),
    "dtype twice": (text('{"a":{"dtype":"U8",' + ENTRY[1:] + "}"), "no JSON object"),
    "metadata twice": (text('{"__metadata__":{},"__metadata__":{}}', b""), "no JSON object"),
    "nested deeply": (text('{"a":' + "[" * 100_000, b""), "has more lists than"),
    "NaN": (text('{"a":NaN}', b""), "no JSON object"),
    "Infinity": (text('{"a":-Infinity}', b""), "no JSON object"),
    "number of 5000 digits": (text('{"a":' + "9" * 5000 + "}", b""), "no JSON object"),
    "metadata of numbers": (raw_safetensors({"__metadata__": {"a": 1}}), "no map of strings"),
    "metadata a list": (raw_safetensors({"__metadata__": []}), "no map of strings"),
    "metadata null": (raw_safetensors({"__metadata__": None}), "no map of strings"),
    "entry a list": (raw_safetensors({"a": ["F32", [2], [0, 8]]}, EIGHT), "entry is malformed"),
    "entry null": (raw_safetensors({"a": None}), "entry is malformed"),
    "entry without dtype": (
        raw_safetensors({"a": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT),
        "entry is malformed",
    ),
    "entry with another key": (one(strides=[1]), "entry is malformed"),
    "dtype unknown": (one(dtype="F33"), "unknown dtype"),
    "dtype in lower case": (one(dtype="f32"), "unknown dtype"),
    "dtype a number": (one(dtype=32), "unknown dtype"),
    "dtype a list": (one(dtype=["F32"]), "unknown dtype"),
    "shape a number": (one(shape=2), "shape is malformed"),
    "shape of a bool": (one(shape=[2, True]), "shape is malformed"),
    "shape of a string": (one(shape=["2"]), "shape is malformed"),
    "shape of a fraction": (one(shape=[2.0]), "no JSON object"),
    "shape negative": (one(shape=[-2]), "no JSON object"),
    "shape of minus zero": (text('{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', b""),
                            "no JSON object"),
    "shape beyond 63 bits": (one(shape=[1 << 63]), "no JSON object"),
    "shape whose product overflows": (one(shape=[1 << 32, 1 << 32]), "larger than any file"),
    "shape that overflows before a zero": (one(shape=[1 << 62, 1 << 62, 0]), "larger than any"),
    "shape of many large dims": (one(shape=[1 << 62] * 100_000), "larger than any file"),
    "offsets a number": (one(data_offsets=8), "offsets are malformed"),
    "offsets of one": (one(data_offsets=[8]), "offsets are malformed"),
    "offsets of three": (one(data_offsets=[0, 8, 8]), "offsets are malformed"),
    "offsets of null": (one(data_offsets=[None, 8]), "offsets are malformed"),
    "offsets of bools": (one(data_offsets=[False, 8]), "offsets are malformed"),
    "offsets negative": (one(data_offsets=[-8, 0]), "no JSON object"),
    "offsets beyond 63 bits": (one(data_offsets=[0, 1 << 63]), "no JSON object"),
    "offsets backwards": (one(data_offsets=[8, 0]), "do not fit"),
    "offsets too close": (one(data_offsets=[0, 4]), "do not fit"),
    "three halves of a byte": (one(dtype="F4", shape=[3]), "whole bytes"),
    "a byte and a half of six bits": (one(dtype="F6_E2M3", shape=[2]), "whole bytes"),
    "gap before the first": (raw_safetensors({"a": F32 | {"data_offsets": [1, 9]}}, bytes(9)),
                             "overlap"),
    "gap between": (raw_safetensors(TWO | {"b": F32 | {"data_offsets": [9, 17]}}, bytes(17)),
                    "overlap"),
    "overlap": (raw_safetensors(TWO | {"b": F32 | {"data_offsets": [7, 15]}}, bytes(15)),
                "overlap"),
    "same bytes twice": (raw_safetensors({"a": F32, "b": F32}, EIGHT), "overlap"),
    "empty tensor inside another": (
        raw_safetensors({"a": F32, "b": F32 | {"shape": [0], "data_offsets": [4, 4]}}, EIGHT),
        "overlap",
    ),
    "truncated": (one()[:-1], "truncated"),
    "bytes after the last": (one() + b"\0", "bytes after its last tensor"),
    "bytes and no tensor": (raw_safetensors({}, b"\0"), "bytes after its last tensor"),
    "tensor beyond the end": (
        raw_safetensors({"a": {"dtype": "U8", "shape": [1 << 62], "data_offsets": [0, 1 << 62]}}),
        "truncated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("padding", ["\n\n", "  \t ", "\r   "])
def test_a_header_is_padded_with_spaces_alone(padding: str) -> None:
    """The format's own words; other white space is where two readers may differ."""
    good = text("{}" + " " * len(padding), b"")
    assert parse_header(good, len(good), "x").entries == {}
    bad = text("{}" + padding, b"")
    with pytest.raises(Malformed, match="padded with something else"):
        parse_header(bad, len(bad), "x")


@pytest.mark.parametrize(("raw", "what"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_headers_are_refused(raw: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    for read in (read_header, map_file, lambda _: parse_header(raw, len(raw), path)):
        with pytest.raises(Malformed) as caught:
            read(path)
        assert what in caught.value.what
        assert caught.value.file == str(path)
        assert len(str(caught.value)) < 1000 + len(str(path))


def test_a_fault_names_its_tensor() -> None:
    with pytest.raises(Malformed) as caught:
        parse(raw_safetensors(TWO | {"b": F32 | {"data_offsets": [8, 12]}}, bytes(16)))
    facts = caught.value.facts()
    assert (facts["tensor"], facts["expected"], facts["found"]) == ("b", 8, 4)


@pytest.mark.parametrize("raw", [raw for raw, _ in MALFORMED.values()], ids=MALFORMED)
def test_what_the_library_refuses_we_refuse(raw: bytes) -> None:
    # all of MALFORMED is refused by us; some of it the library takes, which the module says
    try:
        library(raw)
    except (safetensors.SafetensorError, UnicodeDecodeError):
        return
    laxer = {"no JSON object", "does not begin with {", "no map of strings", "entry is malformed"}
    with pytest.raises(Malformed) as caught:
        parse(raw)
    assert any(phrase in caught.value.what for phrase in laxer)


def test_the_parts_of_a_header() -> None:
    raw = pack_safetensors(
        {"b": random_tensor("BF16", (2, 3)), "a": ("F32", (), bytes(4))}, {"k": "v"}
    )
    header = parse(raw)
    start = 8 + int.from_bytes(raw[:8], "little")
    assert header.raw == raw[:start]
    assert header.metadata == {"k": "v"}
    assert header.file_size == len(raw)
    assert list(header.entries) == ["b", "a"]
    entry = header.entries["b"]
    assert (entry.dtype, entry.shape, entry.start, entry.nbytes) == ("BF16", (2, 3), start, 12)


def test_entries_are_in_order_of_offset() -> None:
    raw = raw_safetensors(
        {
            "z": F32 | {"data_offsets": [8, 16]},
            "e": F32 | {"shape": [0], "data_offsets": [8, 8]},
            "a": F32,
        },
        bytes(16),
    )
    assert list(parse(raw).entries) == ["a", "e", "z"]


def test_a_header_that_came_by_range_is_parsed_without_the_payload() -> None:
    raw = pack_safetensors({"a": random_tensor("F32", (100,))})
    start = 8 + int.from_bytes(raw[:8], "little")
    assert parse_header(raw[:start], len(raw), "remote").entries == parse(raw).entries
    with pytest.raises(Malformed, match="ends inside"):
        parse_header(raw[: start - 1], len(raw), "remote")


def test_names_may_be_any_text() -> None:
    names = ("", " ", "a/../b", "\0", "層.0", "😀", "\u202e")
    tensors: dict[str, Spec] = dict.fromkeys(names, ("U8", (1,), b"x"))
    assert ours(pack_safetensors(tensors)) == tensors


def test_the_table_of_dtypes_is_the_librarys() -> None:
    assert {code: row.bits for code, row in DTYPES.items()} == dict(BITS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (8,), (2, 4, 3)], ids=str)
def test_every_dtype_and_shape_is_read_as_the_library_reads_it(
    dtype: str, shape: tuple[int, ...]
) -> None:
    if shape == () and BITS[dtype] < 8:
        with pytest.raises(ValueError, match="whole bytes"):
            nbytes_of(dtype, shape)
        return
    spec = random_tensor(dtype, shape)
    raw = make_header([("a", dtype, shape)], {}) + spec[2]
    assert ours(raw) == library(raw) == {"a": spec}


@pytest.mark.parametrize(("name", "code"), LIBRARY_NAMES.items(), ids=LIBRARY_NAMES)
def test_what_the_library_writes_we_read(name: str, code: str) -> None:
    units = {"a": (4, 6), "empty": (0, 4)}  # a unit of the packed type holds two elements
    width = 8 if code == "F4" else BITS[code]
    data = {key: random_tensor("U8", (n * m * width // 8,))[2] for key, (n, m) in units.items()}
    arrays = {key: np.frombuffer(value or b"\0", np.uint8) for key, value in data.items()}
    specs = {
        key: safetensors.TensorSpec(
            dtype=name,
            shape=list(units[key]),
            data_ptr=arrays[key].ctypes.data,
            data_len=len(data[key]),
        )
        for key in units
    }
    raw = bytes(safetensors.serialize(specs, {"format": "pt"}))
    factor = 2 if code == "F4" else 1
    expected = {key: (code, (n, m * factor), data[key]) for key, (n, m) in units.items()}
    assert ours(raw) == library(raw) == expected
    assert parse(raw).metadata == {"format": "pt"}


def test_safe_open_opens_what_we_write(tmp_path: Path) -> None:
    tensors = {
        "m": random_tensor("I32", (3, 5)),
        "s": random_tensor("U8", ()),
        "e": ("F32", (0,), b""),
    }
    path = tmp_path / "x.safetensors"
    layout = [(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()]
    payload = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(make_header(layout, {"b": "2", "a": "é"}) + payload)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"a": "é", "b": "2"}
        assert {name: file.get_tensor(name).tobytes() for name in file.keys()} == {  # noqa: SIM118
            name: data for name, (_, _, data) in tensors.items()
        }


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of whole bytes."""
    layout = draw(
        st.dictionaries(NAMES, st.tuples(st.sampled_from(list(BITS)), SHAPES), max_size=6)
    )
    return {
        name: (dtype, shape if BITS[dtype] >= 8 else (*shape, 4))
        for name, (dtype, shape) in layout.items()
    }


@settings(max_examples=150)
@given(layouts(), st.dictionaries(NAMES, NAMES, max_size=3), st.randoms(use_true_random=False))
def test_what_is_made_is_read_back_by_us_and_by_the_library(layout, metadata, random) -> None:
    sizes = {name: nbytes_of(dtype, shape) for name, (dtype, shape) in layout.items()}
    tensors = {name: (*layout[name], random.randbytes(size)) for name, size in sizes.items()}
    header = make_header([(name, *spec) for name, spec in layout.items()], metadata)
    assert len(header) % 8 == 0
    raw = header + b"".join(data for _, _, data in tensors.values())
    assert ours(raw) == library(raw) == tensors
    parsed = parse(raw)
    assert parsed.metadata == metadata
    assert parsed.raw == header
    assert sorted(parsed.entries) == sorted(layout)


def test_make_header_is_deterministic() -> None:
    entries = [("b", "U8", (3,)), ("a", "BF16", (2, 2))]
    assert make_header(entries, {"y": "1", "x": "2"}) == make_header(
        iter(entries), {"x": "2", "y": "1"}
    )


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ([("a", "U8", (1,)), ("a", "U8", (1,))], "is taken"),
        ([("__metadata__", "U8", (1,))], "is taken"),
        ([("\ud800", "U8", (1,))], "surrogates"),
        ([("a", "X8", (1,))], "unknown dtype"),
        ([("a", "F4", (3,))], "whole bytes"),
        ([("a", "U8", (1 << 63,))], "larger than any file"),
        ([("a", "U8", (1 << 62,)), ("b", "U8", (1 << 62,))], "too many or too large"),
    ],
    ids=["name twice", "metadata's name", "surrogate", "dtype", "half a byte", "huge", "huge sum"],
)
def test_make_header_refuses_what_no_reader_takes(entries, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make_header(entries, {})


def test_make_header_refuses_a_header_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_io, "MAX_HEADER", 100)
    with pytest.raises(ValueError, match="too many"):
        make_header([("a" * 100, "U8", (1,))], {})


SMALL = pack_safetensors(
    {"a.w": random_tensor("BF16", (2, 3)), "b": random_tensor("F4", (4,))}, {"v": "1"}
)
SMALL_HEADER = 8 + int.from_bytes(SMALL[:8], "little")


def parses_or_is_malformed(raw: bytes) -> bool:
    """Whether it parses; and then the library has to read the same tensors."""
    try:
        parse(raw)
    except (Malformed, Unsupported) as error:
        json.dumps([str(error), error.facts()])  # what is said about it can be printed
        return False
    assert ours(raw) == library(raw)
    return True


@pytest.mark.parametrize("part", range(8))
def test_any_byte_of_a_header_may_be_any_other(part: int) -> None:
    parsed = 0
    for at in range(part, SMALL_HEADER, 8):
        for value in range(256):
            parsed += parses_or_is_malformed(SMALL[:at] + bytes([value]) + SMALL[at + 1 :])
    assert parsed  # a name may change, and the byte may be itself


def test_every_truncation_is_malformed() -> None:
    assert not any(parses_or_is_malformed(SMALL[:length]) for length in range(len(SMALL)))


@settings(max_examples=200)
@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes_are_malformed_or_parse(data: bytes, framed: bool) -> None:
    parses_or_is_malformed(raw_safetensors(b"{" + data) if framed else data)


def test_mapped_bytes_are_the_files_and_read_only(tmp_path: Path) -> None:
    tensors = {"a": random_tensor("BF16", (50,))}
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    header, data = map_file(path)
    assert header == read_header(path)
    assert data.tobytes() == map_bytes(path).tobytes() == path.read_bytes()
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


def test_mapped_bytes_outlive_the_file(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", {"a": random_tensor("U8", (50,))})
    data, content = map_bytes(path), path.read_bytes()
    path.unlink()
    assert data.tobytes() == content


def test_an_empty_file_maps_to_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert map_bytes(tmp_path / "empty").size == 0


def test_ten_thousand_tensors(tmp_path: Path) -> None:
    layout = [(f"model.layers.{n}.mlp.experts.weight", "BF16", (2, 4)) for n in range(10_000)]
    path = tmp_path / "x.safetensors"
    path.write_bytes(make_header(layout, {}) + bytes(16 * len(layout)))
    header = read_header(path)
    assert len(header.raw) > 800_000
    assert [(e.name, e.dtype, e.shape) for e in header.entries.values()] == layout


READERS = [read_header, map_bytes, map_file]


def refusal(read: Callable[[Path], object], path: Path) -> DeltactlError:
    with pytest.raises(DeltactlError) as caught:
        read(path)
    assert caught.value.file == str(path)
    return caught.value


@pytest.mark.parametrize("read", READERS)
class TestPaths:
    def test_missing(self, read, tmp_path: Path) -> None:
        assert type(refusal(read, tmp_path / "nothing")) is NotFound

    def test_below_a_file(self, read, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert type(refusal(read, tmp_path / "file" / "x")) is NotFound

    def test_directory(self, read, tmp_path: Path) -> None:
        error = refusal(read, tmp_path)
        assert type(error) is Malformed
        assert "a directory" in error.what

    def test_pipe_is_not_waited_for(self, read, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        error = refusal(read, tmp_path / "pipe")
        assert type(error) is Malformed
        assert "pipe" in error.what

    def test_device(self, read) -> None:
        assert type(refusal(read, Path("/dev/zero"))) is Malformed

    def test_loop_of_links(self, read, tmp_path: Path) -> None:
        (tmp_path / "loop").symlink_to("loop")
        assert "symbolic links" in refusal(read, tmp_path / "loop").what

    def test_no_permission(self, read, tmp_path: Path, unprivileged) -> None:
        path = write_safetensors(tmp_path / "x", {})
        path.chmod(0)
        with unprivileged:
            assert type(refusal(read, path)) is NotAllowed
