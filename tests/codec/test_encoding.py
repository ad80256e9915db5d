"""Encodings: every change comes back, whatever the bits; and nothing hostile gets through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.codec import DEFAULT, ENCODINGS, encoding_named, integers
from deltactl.codec.absolute import AbsoluteDecoder, NewBits
from deltactl.codec.base import (
    BLOCK,
    Decoder,
    EncodedBlock,
    StoredPart,
    Target,
    block_count,
    touch_sum_of,
    unseen,
)
from deltactl.codec.bits import touch_sum
from deltactl.codec.integers import Reader, Undecodable
from deltactl.core.errors import Malformed, Unsupported, UsageError
from deltactl.files.atomic import Spool
from deltactl.format.delta import open_delta
from deltactl.ops.apply import apply_delta
from deltactl.ops.diff import diff
from tests.support.adversarial import Bits, pairs, small_blocks, special_bits, unsigned, width_of
from tests.support.checkpoints import BITS, read_tensors, write_safetensors
from tests.support.parts import decoded, encoded

FEW = settings(max_examples=20)
ALL = sorted(ENCODINGS)
GOOD_IDX = {"raw": ("I32", "<i4"), "gap_delta": ("U16", "<u2")}


def stored(dtype: str, kind: str, values: Sequence[int]) -> StoredPart:
    """A part of one dimension."""
    data = np.array(values, kind)
    return StoredPart(dtype, data.shape, data.view(np.uint8))


# There and back.


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("encoding", ALL)
@pytest.mark.parametrize("dtype", BITS)
@given(data=st.data())
@FEW
def test_round_trip(encoding: str, dtype: str, data: st.DataObject) -> None:
    block = data.draw(st.sampled_from([1, 8, 64, BLOCK]))
    old, new = data.draw(pairs(dtype, block=min(block, 64)))
    with small_blocks(block, chunk=data.draw(st.sampled_from([1, 5, 1 << 20]))):
        parts = encoded(encoding, dtype, old, new, block)
        decoder = ENCODINGS[encoding].decoder(Target("f", "w", dtype, old.size), parts)
        assert decoder.count == np.count_nonzero(old != new)
        assert np.array_equal(decoded(decoder, old, block), new)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("encoding", ALL)
@pytest.mark.parametrize("dtype", BITS)
@given(data=st.data())
@FEW
def test_new_bits_from_the_old_ones_at_the_changes_alone(
    encoding: str, dtype: str, data: st.DataObject
) -> None:
    block = data.draw(st.sampled_from([1, 8, 64]))
    old, new = data.draw(pairs(dtype, block=block))
    with small_blocks(block):
        decoder = ENCODINGS[encoding].decoder(
            Target("f", "w", dtype, old.size), encoded(encoding, dtype, old, new, block)
        )
        for number in range(block_count(old.size)):
            before, after = (side[number * block : (number + 1) * block] for side in (old, new))
            base = before if decoder.needs_base else unseen(dtype, before.size)
            changes = decoder.block(number, base)
            at = np.flatnonzero(before != after)
            assert np.array_equal(changes.positions, at)
            gathered = before[at]
            assert np.array_equal(changes.new_bits(gathered), after[at])
            assert np.array_equal(gathered, before[at])


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("encoding", ALL)
@pytest.mark.parametrize("dtype", BITS)
def test_every_special_pattern_to_every_other(encoding: str, dtype: str) -> None:
    special = special_bits(dtype)
    old, new = (side.ravel() for side in np.meshgrid(special, special))
    parts = encoded(encoding, dtype, old, new)
    decoder = ENCODINGS[encoding].decoder(Target("f", "w", dtype, old.size), parts)
    assert np.array_equal(decoded(decoder, old), new)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("encoding", ALL)
def test_real_blocks(encoding: str) -> None:
    """Changes on both sides of the borders of blocks of the real size, and a block without any."""
    old = np.zeros(3 * BLOCK + 3, np.uint8)
    new = old.copy()
    new[[0, BLOCK - 1, 2 * BLOCK, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 2]] = 255
    parts = encoded(encoding, "I8", old, new)
    decoder = ENCODINGS[encoding].decoder(Target("f", "w", "I8", old.size), parts)
    found = [decoder.block(n, old[n * BLOCK : (n + 1) * BLOCK]).positions for n in range(4)]
    assert [at.tolist() for at in found] == [[0, BLOCK - 1], [], [0, BLOCK - 1], [0, 2]]
    assert np.array_equal(decoded(decoder, old), new)


@pytest.mark.parametrize("encoding", ["raw", "gap_delta"])
def test_what_is_absolute_needs_no_base(encoding: str) -> None:
    old = np.arange(100, dtype="<u2")
    new = old.copy()
    new[[3, 50]] = 7
    parts = encoded(encoding, "BF16", old, new)
    decoder = ENCODINGS[encoding].decoder(Target("f", "w", "BF16", 100), parts)
    changes = decoder.block(0, np.empty(100, "<u2"))
    assert changes.positions.tolist() == [3, 50]
    changes.put(new, 0)
    assert (new[3], new[50]) == (7, 7)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("encoding", ALL)
@given(data=st.data())
@settings(max_examples=15)
def test_whole_deltas_of_many_small_blocks(
    encoding: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Through files: diff, open, apply; with touch sums that are those of the whole tensors."""
    place = tmp_path_factory.mktemp("deltas")
    old, new = {}, {}
    for dtype in data.draw(st.lists(st.sampled_from(sorted(BITS)), min_size=1, max_size=4)):
        count = 24 * width_of(dtype) * 8 // BITS[dtype]  # whole bytes whatever the dtype
        before, after = data.draw(pairs(dtype, most=24))
        before, after = (np.resize(side, 24) if side.size else side for side in (before, after))
        shape = (count,) if before.size else (0, 3)
        old[dtype] = (dtype, shape, before.tobytes())
        new[dtype] = (dtype, shape, after.tobytes())
    a = write_safetensors(place / "a.safetensors", old)
    b = write_safetensors(place / "b.safetensors", new)
    with small_blocks(data.draw(st.sampled_from([4, 7, 16]))):
        with open_checkpoint(a) as before, open_checkpoint(b) as after:
            report = diff(before, after, place / "delta", encoding=encoding)
        apply_delta(place / "delta", a, place / "out.safetensors")
        assert read_tensors(place / "out.safetensors") == new
    differing = {name for name in old if old[name] != new[name]}
    assert {record.name for record in report.records} == differing
    for record in report.records:
        before, after = (
            np.frombuffer(side[record.name][2], unsigned(str(record.dtype))) for side in (old, new)
        )
        at = np.flatnonzero(before != after)
        assert record.changed == at.size
        if record.kind == "sparse":
            assert record.old_sum == touch_sum(at, before[at])
            assert record.new_sum == touch_sum(at, after[at])
    for path in place.iterdir():
        path.unlink()


# Streams of integers.


def integers_of(reader: Reader, count: int) -> Bits:
    """The next stream's values, whatever they are."""
    values = np.empty(count, np.uint64)
    integers.decode(reader, values)
    return values


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("kind", ["<u1", "<u2", "<u4", "<u8"])
@given(data=st.data())
@settings(max_examples=60)
def test_integers_come_back(kind: str, data: st.DataObject) -> None:
    """Few or many, small or as large as they can be, and both in one stream."""
    bits = 8 * np.dtype(kind).itemsize
    numbers = st.integers(0, bits).flatmap(lambda n: st.integers(0, (1 << n) - 1))
    values = np.array(data.draw(st.lists(numbers, max_size=30)), kind)
    values = np.tile(values, data.draw(st.sampled_from([1, 1, 100])))
    coded = integers.encode(values)
    reader = integers.Reader(memoryview(coded + b"more"))
    found = integers_of(reader, values.size)
    assert reader.at == len(coded)
    assert np.array_equal(found, values.astype("<u8"))
    same = np.empty_like(values)  # as wide as they need be
    integers.decode(integers.Reader(memoryview(coded)), same, 1 << bits)
    assert np.array_equal(same, values)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 255, 256, (1 << 32) - 1, (1 << 64) - 1])
def test_deep_down_nothing_is_left_for_a_stream_within(value: int) -> None:
    """However large what is left over is there: else a writer could go deeper than a reader."""
    coded = integers.encode(np.array([value], np.uint64), integers._CAREFUL)
    assert coded[0] == max(0, value.bit_length() - 7)
    assert len(coded) == 1 + coded[0] + 4 + 1  # k, a plane for each bit, the length, one high byte


def test_the_touch_sum_of_changes_wraps_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pieces are added up."""
    at, bits = np.arange(0, 64, 2), np.arange(32, dtype="<u2")
    block = np.zeros(64, "<u2")
    block[at] = bits
    monkeypatch.setattr("deltactl.codec.base._PIECE", 4)
    for index in range(20):  # of any sum of some pieces a half fits without
        assert touch_sum_of(NewBits(at, bits), block, index) == touch_sum(at, bits, index)


# Which encoding.


def test_names() -> None:
    assert set(ENCODINGS) == {"raw", "gap_delta", "ulp", "ulp_ctx"}
    assert all(encoding_named(name).name == name for name in ENCODINGS)
    assert DEFAULT == "ulp"


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(UsageError):
        encoding_named("ulp_next")
    with pytest.raises(Unsupported):
        encoding_named("ulp_next", "file")


@pytest.mark.parametrize(
    ("encoding", "kind"), [("ulp", "dense"), ("raw", "sparse"), ("gap_delta", "sparse")]
)
def test_trls_encodings_never_carry_a_tensor_whole(
    encoding: str, kind: str, tmp_path: Path
) -> None:
    """TRL's readers would pass over it in silence."""
    random = Random(1)
    a = write_safetensors(tmp_path / "a", {"w": ("BF16", (99,), random.randbytes(198))})
    b = write_safetensors(tmp_path / "b", {"w": ("BF16", (99,), random.randbytes(198))})
    with open_checkpoint(a) as before, open_checkpoint(b) as after:
        report = diff(before, after, tmp_path / "delta", encoding=encoding)
    assert [record.kind for record in report.records] == [kind]


# Tensors larger than any memory: by arithmetic.


def at_indices(encoding: str, elements: int, indices: Sequence[int]) -> dict[str, StoredPart]:
    """The parts of a tensor of which these elements change, made block by block."""
    codec = ENCODINGS[encoding]
    with Spool() as spool:
        blocks = []
        for number in sorted({index // BLOCK for index in indices}):
            at = np.array([i - number * BLOCK for i in indices if i // BLOCK == number], np.int64)
            old, new = np.zeros(at.size, "<u2"), np.ones(at.size, "<u2")
            streams = codec.encode(np.zeros(BLOCK, "<u2"), at, old, new, "BF16")
            segments = tuple(map(spool.append, streams))
            blocks.append(EncodedBlock(number, at.size, segments))
        parts = codec.parts(Target("", "w", "BF16", elements), blocks, spool)
        return {
            part.suffix: StoredPart(
                part.dtype, part.shape, np.frombuffer(b"".join(part.pieces), np.uint8)
            )
            for part in parts
        }


def found_in(decoder: Decoder, indices: Sequence[int]) -> list[int]:
    """What the decoder finds in the blocks of these indices, as indices into the tensor."""
    found: list[int] = []
    for number in sorted({index // BLOCK for index in indices}):
        base = np.zeros(BLOCK, "<u2")
        found += (decoder.block(number, base).positions + number * BLOCK).tolist()
    return found


EDGE = 1 << 31


@pytest.mark.parametrize(
    ("elements", "dtype"),
    [(1, "I32"), (EDGE - 1, "I32"), (EDGE, "I64"), (EDGE + 1, "I64"), (1 << 40, "I64")],
)
def test_raw_takes_wide_indices_where_the_tensor_needs_them(elements: int, dtype: str) -> None:
    indices = sorted({0, elements // 2, elements - 1})
    parts = at_indices("raw", elements, indices)
    assert parts[".idx"].dtype == dtype
    decoder = ENCODINGS["raw"].decoder(Target("f", "w", "BF16", elements), parts)
    assert decoder.count == len(indices)
    assert found_in(decoder, indices) == indices


@pytest.mark.parametrize(
    ("gap", "dtype"),
    [
        (0, "U16"),
        ((1 << 16) - 1, "U16"),
        (1 << 16, "U32"),
        ((1 << 32) - 1, "U32"),
        (1 << 32, "U64"),
        (1 << 45, "U64"),
    ],
)
@pytest.mark.parametrize("first", [0, 5])
def test_gaps_are_as_wide_as_the_widest(gap: int, dtype: str, first: int) -> None:
    indices = [gap] if not first else [first, first + 1, first + 2 + gap, first + 4 + gap]
    elements = indices[-1] + 1
    parts = at_indices("gap_delta", elements, indices)
    assert parts[".idx"].dtype == dtype
    decoder = ENCODINGS["gap_delta"].decoder(Target("f", "w", "BF16", elements), parts)
    assert decoder.count == len(indices)
    assert found_in(decoder, indices) == indices
    with pytest.raises(Malformed):
        ENCODINGS["gap_delta"].decoder(Target("f", "w", "BF16", elements - 1), parts)


def test_ulp_has_a_directory_of_every_block() -> None:
    elements = EDGE + 1
    indices = [0, EDGE - 1, EDGE]
    parts = at_indices("ulp", elements, indices)
    directory = parts[".ulp"].data[: 8 * block_count(elements)].view("<u4").reshape(-1, 2)
    assert np.flatnonzero(directory[:, 0]).tolist() == sorted({i // BLOCK for i in indices})
    decoder = ENCODINGS["ulp"].decoder(Target("f", "w", "BF16", elements), parts)
    assert decoder.count == 3
    assert found_in(decoder, indices) == indices


@pytest.mark.parametrize("gaps", [False, True])
def test_a_claim_of_a_huge_tensor_costs_its_reader_nothing(gaps: bool) -> None:
    """A header may say 2^60 elements, whatever is in the file."""
    elements = 1 << 60
    indices = [0, 1 << 40, elements - 1]
    values = [index - before - 1 for before, index in zip([-1, *indices], indices, strict=False)]
    index = stored("U64", "<u8", values) if gaps else stored("I64", "<i8", indices)
    value = stored("BF16", "<u2", [1, 2, 3])
    decoder = AbsoluteDecoder(Target("f", "w", "BF16", elements), index, value, gaps=gaps)
    assert found_in(decoder, indices) == indices
    last = (elements - 1) // BLOCK
    block = np.zeros(BLOCK, "<u2")
    decoder.block(last, block).put(block, 0)
    assert (np.flatnonzero(block).tolist(), block[-1]) == ([BLOCK - 1], 3)
    assert decoder.block(last - 1, block).positions.size == 0


# Hostile parts of the absolute encodings.

HOSTILE_INDICES = {
    "unsorted": ("raw", "I32", "<i4", [5, 3]),
    "duplicate": ("raw", "I32", "<i4", [3, 3]),
    "negative": ("raw", "I32", "<i4", [-1, 3]),
    "negative later": ("raw", "I32", "<i4", [1, -3]),
    "most negative": ("raw", "I64", "<i8", [-(1 << 63), 3]),
    "out of range by one": ("raw", "I32", "<i4", [3, 100]),
    "far out of range": ("raw", "I64", "<i8", [3, (1 << 63) - 1]),
    "out of range, not last": ("raw", "I32", "<i4", [100, 3]),
    "of an unsigned dtype": ("raw", "U32", "<u4", [3, 5]),
    "gaps of a signed dtype": ("gap_delta", "I32", "<i4", [3, 5]),
    "gaps of bytes": ("gap_delta", "U8", "<u1", [3, 5]),
    "gaps past the end by one": ("gap_delta", "U16", "<u2", [50, 49]),
    "a gap past the end": ("gap_delta", "U16", "<u2", [100, 0]),
    "a gap of all bits": ("gap_delta", "U64", "<u8", [(1 << 64) - 1, 0]),
    "gaps whose sum is 2^64": ("gap_delta", "U64", "<u8", [(1 << 63), (1 << 63) - 2]),
    "a gap of 2^63": ("gap_delta", "U64", "<u8", [1 << 63, 1]),
}


@pytest.mark.parametrize("case", HOSTILE_INDICES)
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_hostile_indices(case: str, chunk: int) -> None:
    encoding, dtype, kind, indices = HOSTILE_INDICES[case]
    parts = {".idx": stored(dtype, kind, indices), ".val": stored("BF16", "<u2", [1, 2])}
    with small_blocks(BLOCK, chunk), pytest.raises(Malformed) as error:
        ENCODINGS[encoding].decoder(Target("file", "w", "BF16", 100), parts)
    assert (error.value.file, error.value.tensor) == ("file", "w")


def test_sums_of_gaps_that_wrap_around() -> None:
    """Each within the tensor, their sum past 2^63 and, wrapped, within it again."""
    gap = (1 << 62) - 2
    parts = {".idx": stored("U64", "<u8", [gap] * 5), ".val": stored("U8", "<u1", [0] * 5)}
    with pytest.raises(Malformed):
        ENCODINGS["gap_delta"].decoder(Target("f", "w", "U8", (1 << 62) - 1), parts)


@pytest.mark.parametrize("encoding", ["raw", "gap_delta"])
@pytest.mark.parametrize(
    "value",
    [
        stored("BF16", "<u2", [1]),
        stored("BF16", "<u2", [1, 2, 3]),
        stored("BF16", "<u2", []),
        stored("F16", "<u2", [1, 2]),
        stored("F32", "<u4", [1, 2]),
        StoredPart("BF16", (2, 1), np.zeros(4, np.uint8)),
        StoredPart("BF16", (), np.zeros(2, np.uint8)),
    ],
)
def test_values_that_do_not_fit_their_indices(encoding: str, value: StoredPart) -> None:
    parts = {".idx": stored(*GOOD_IDX[encoding], [3, 5]), ".val": value}
    with pytest.raises(Malformed):
        ENCODINGS[encoding].decoder(Target("f", "w", "BF16", 100), parts)


@pytest.mark.parametrize("encoding", ["raw", "gap_delta"])
def test_indices_of_another_rank(encoding: str) -> None:
    dtype, kind = GOOD_IDX[encoding]
    for shape in ((1, 2), (2, 1)):
        index = StoredPart(dtype, shape, np.array([3, 5], kind).view(np.uint8))
        value = StoredPart("BF16", shape, np.zeros(4, np.uint8))
        with pytest.raises(Malformed):
            ENCODINGS[encoding].decoder(
                Target("f", "w", "BF16", 100), {".idx": index, ".val": value}
            )


@pytest.mark.parametrize("encoding", ["raw", "gap_delta"])
def test_values_of_packed_types_are_bytes(encoding: str) -> None:
    index = stored(*GOOD_IDX[encoding], [3, 5])
    for dtype in ("F4", "F6_E2M3"):
        target = Target("f", "w", dtype, 100)
        good = {".idx": index, ".val": stored("U8", "<u1", [1, 2])}
        assert ENCODINGS[encoding].decoder(target, good).count == 2
        bad = {".idx": index, ".val": StoredPart(dtype, (2,), np.zeros(2, np.uint8))}
        with pytest.raises(Malformed):
            ENCODINGS[encoding].decoder(target, bad)


@pytest.mark.parametrize("encoding", ["raw", "gap_delta"])
@given(st.lists(st.integers(0, (1 << 64) - 1) | st.integers(0, 130), max_size=5), st.data())
@settings(max_examples=100)
def test_any_indices_are_right_or_malformed(
    encoding: str, values: list[int], data: st.DataObject
) -> None:
    kinds = {"I32": "<i4", "I64": "<i8", "U16": "<u2", "U32": "<u4", "U64": "<u8"}
    dtype = data.draw(st.sampled_from(sorted(kinds)))
    raw = np.array(values, "<u8").astype(kinds[dtype])
    parts = {
        ".idx": stored(dtype, kinds[dtype], raw),
        ".val": stored("U8", "<u1", [9] * len(values)),
    }
    elements = data.draw(st.sampled_from([0, 1, 100, 1 << 33, 1 << 62]))
    indices = [int(value) for value in raw]
    if encoding == "gap_delta":
        indices = [sum(indices[: k + 1]) + k for k in range(len(indices))]
    fits = dtype.startswith("I") == (encoding == "raw")
    rising = all(a < b for a, b in zip([-1, *indices], indices, strict=False))
    good = fits and rising and all(index < elements for index in indices)
    target = Target("f", "w", "U8", elements)
    if not good:
        with pytest.raises(Malformed):
            ENCODINGS[encoding].decoder(target, parts)
        return
    assert found_in(ENCODINGS[encoding].decoder(target, parts), indices) == indices


# Hostile parts of ulp.

SMALL = 64


def small_ulp(dtype: str, seed: int, size: int = 5 * SMALL + 3) -> tuple[Bits, bytearray]:
    """A tensor of six small blocks, the third without changes, and its part."""
    random = np.random.default_rng(seed)
    kind = unsigned(dtype)
    old = np.frombuffer(random.bytes(size * kind.itemsize), kind)
    new = old.copy()
    at = np.flatnonzero(random.random(size) < 0.2)
    at = at[at // SMALL != 2]
    new[at] += random.integers(-3, 4, at.size).astype(f"<i{kind.itemsize}").view(kind)
    return old, bytearray(encoded("ulp", dtype, old, new, SMALL)[".ulp"].data.tobytes())


def decode_ulp(dtype: str, old: Bits, data: bytes) -> Bits:
    part = StoredPart("U8", (len(data),), np.frombuffer(data, np.uint8))
    decoder = ENCODINGS["ulp"].decoder(Target("file", "w", dtype, old.size), {".ulp": part})
    return decoded(decoder, old, SMALL)


def refused(dtype: str, old: Bits, data: bytes) -> bool:
    """Whether the part is malformed; any other exception comes through."""
    try:
        decode_ulp(dtype, old, data)
    except Malformed as error:
        return error.tensor == "w"
    return False


HEAD = 8 * 6


def with_directory(data: bytes, entries: Mapping[tuple[int, int], int]) -> bytes:
    """Other numbers in the directory: {(block, column): number}."""
    changed = bytearray(data)
    for (block, column), number in entries.items():
        at = 8 * block + 4 * column
        changed[at : at + 4] = number.to_bytes(4, "little")
    return bytes(changed)


def directory_of(data: bytes) -> list[list[int]]:
    return np.frombuffer(data, "<u4", 12).reshape(6, 2).tolist()


def test_hostile_directories() -> None:
    with small_blocks(SMALL):
        old, good = small_ulp("BF16", 1)
        (count, size), (_, next_size), nothing, *_ = directory_of(good)
        assert nothing == [0, 0]
        hostile = {
            "empty": b"",
            "cut in the directory": bytes(good[: HEAD - 1]),
            "the directory alone": bytes(good[:HEAD]),
            "a byte less": bytes(good[:-1]),
            "a byte more": bytes(good + b"\0"),
            "a change more": with_directory(good, {(0, 0): count + 1}),
            "a change less": with_directory(good, {(0, 0): count - 1}),
            "no change, but bytes": with_directory(good, {(0, 0): 0}),
            "changes without bytes": with_directory(good, {(2, 0): 3}),
            "more changes than elements": with_directory(good, {(0, 0): SMALL + 1}),
            "more changes than memory": with_directory(good, {(0, 0): (1 << 32) - 1}),
            "a longer block": with_directory(good, {(0, 1): size + 1}),
            "a block past the end": with_directory(good, {(5, 1): (1 << 32) - 1}),
            "a longer and a shorter": with_directory(
                good, {(0, 1): size + 1, (1, 1): next_size - 1}
            ),
            "a shorter and a longer": with_directory(
                good, {(0, 1): size - 1, (1, 1): next_size + 1}
            ),
        }
        for case, data in hostile.items():
            assert refused("BF16", old, data), case
        assert not refused("BF16", old, bytes(good))


def one_block(count: int, *pieces: bytes) -> bytes:
    """The part of a tensor of one block."""
    data = b"".join(pieces)
    return count.to_bytes(4, "little") + len(data).to_bytes(4, "little") + data


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def stream(*values: int) -> bytes:
    """A stream of numbers below 255, none of whose bits are low."""
    return b"\0" + u32(len(values)) + bytes(values)


def wide(k: int, value: int) -> bytes:
    """A stream of one number, ``value << k``, with its low bits in planes."""
    return bytes([k]) + bytes(k) + u32(1) + bytes([value])


def bomb(claimed: int) -> bytes:
    """A stream whose zstd frame claims to hold that many zeros, and does."""
    frame = zstandard.ZstdCompressor().compress(bytes(claimed))
    return b"\0" + u32(len(frame)) + frame


HOSTILE_BLOCKS = {
    "a position past the end": one_block(1, stream(SMALL), b"\0", u32(0)),
    "a sum of gaps past the end": one_block(2, stream(SMALL - 1, 0), b"\0", u32(0)),
    "a gap of 2^63": one_block(1, wide(63, 1), b"\0", u32(0)),
    "gaps whose sum is 2^64": one_block(
        2, bytes([63]) + bytes(2 * 63) + u32(2) + b"\1\1", b"\0", u32(0)
    ),
    "too many low bits": one_block(1, wide(64, 0), b"\0", u32(0)),
    "no signs": one_block(1, stream(3)),
    "no count of longer steps": one_block(1, stream(3), b"\0"),
    "a torn count of longer steps": one_block(1, stream(3), b"\0", b"\0\0\0"),
    "more longer steps than steps": one_block(1, stream(3), b"\0", u32(2), stream(0, 0)),
    "more longer steps than memory": one_block(1, stream(3), b"\0", u32((1 << 32) - 1)),
    "a longer step that is not there": one_block(1, stream(3), b"\0", u32(1), stream(1)),
    "no lengths": one_block(1, stream(3), b"\0", u32(1), stream(0)),
    "a step of more than the width": one_block(
        1, stream(3), b"\0", u32(1), stream(0), wide(8, 128)
    ),
    "a byte after the last stream": one_block(1, stream(3), b"\0", u32(0), b"\0"),
    "a coded length past the end": one_block(1, b"\0" + u32(99) + b"\3", b"\0", u32(0)),
    "a frame of more than its values": one_block(1, bomb(1 << 20), b"\0", u32(0)),
    "a frame of fewer": one_block(30, bomb(29), bytes(4), u32(0)),
    "no frame": one_block(9, b"\0" + u32(8) + bytes(8), b"\0\0", u32(0)),
    "signs that are padded with ones": one_block(1, stream(3), b"\2", u32(0)),
    "escapes without end": one_block(1, stream(255) * 40, b"\0", u32(0)),
}


def frame(held: int, *, says: bool = True) -> bytes:
    """A frame that holds so many zeros, and says so or not."""
    return zstandard.ZstdCompressor(write_content_size=says).compress(bytes(held))


@pytest.mark.parametrize(
    "coded",
    [frame(1000, says=False), frame(999), frame(1001), frame(1 << 20), b"", frame(1000)[:5]],
    ids=["says nothing", "a byte less", "a byte more", "a bomb", "empty", "cut"],
)
def test_a_frame_is_refused_by_what_it_says_before_it_is_opened(
    coded: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one without its size that holds just as many: nothing bounds what another would take."""
    sound = b"\0" + u32(len(frame(1000))) + frame(1000)
    assert not integers_of(Reader(memoryview(sound)), 1000).any()
    monkeypatch.setattr(integers._coder, "decompress", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(Undecodable):
        integers_of(Reader(memoryview(b"\0" + u32(len(coded)) + coded)), 1000)


@pytest.mark.parametrize("more", [b"\0", frame(0), frame(1000)])
def test_bytes_after_a_frame_are_refused(more: bytes) -> None:
    coded = frame(1000) + more
    with pytest.raises(Undecodable):
        integers_of(Reader(memoryview(b"\0" + u32(len(coded)) + coded)), 1000)


def test_a_frame_that_holds_another_number_than_it_says_is_refused() -> None:
    sound = frame(1000)
    at = sound.index((1000 - 256).to_bytes(2, "little"))
    lies = sound[:at] + (1001 - 256).to_bytes(2, "little") + sound[at + 2 :]
    assert zstandard.frame_content_size(lies) == 1001
    with pytest.raises(Undecodable):
        integers_of(Reader(memoryview(b"\0" + u32(len(lies)) + lies)), 1001)


PADDED = {
    "of the planes": (9, bytes([1]) + b"\0\0" + u32(9) + bytes(9)),
    "of the last plane": (9, bytes([2]) + bytes(4) + u32(9) + bytes(9)),
}


@pytest.mark.parametrize(("count", "good"), PADDED.values(), ids=PADDED)
def test_bits_that_fill_up_a_plane_are_zero(count: int, good: bytes) -> None:
    assert not integers_of(Reader(memoryview(good)), count).any()
    at = 2 * good[0]  # the last plane's second byte holds one bit
    for bit in range(1, 8):
        bad = bytearray(good)
        bad[at] |= 1 << bit
        with pytest.raises(Undecodable, match="padding"):
            integers_of(Reader(memoryview(bytes(bad))), count)


@pytest.mark.parametrize("case", HOSTILE_BLOCKS)
def test_hostile_blocks(case: str) -> None:
    with small_blocks(SMALL):
        assert refused("BF16", np.zeros(SMALL, "<u2"), HOSTILE_BLOCKS[case])


def test_a_block_by_hand() -> None:
    """One up, one down, one up by 2 and one down by 2^15, the furthest."""
    data = one_block(
        4,
        stream(0, 0, 3, SMALL - 7),
        bytes([0b1010]),
        u32(2),
        stream(2, 0),
        # Lengths less two: 0, and 2^15 - 2, which is 254 in 8 low bits and 127 above them.
        bytes([8, 0] + 7 * [2]) + u32(2) + bytes([0, 127]),
    )
    with small_blocks(SMALL):
        found = decode_ulp("I16", np.full(SMALL, 7, "<u2"), data)
    changed = {0: 8, 1: 6, 5: 9, SMALL - 1: (7 - (1 << 15)) % (1 << 16)}
    assert {int(at): int(found[at]) for at in np.flatnonzero(found != 7)} == changed


def test_ulp_of_another_dtype() -> None:
    for dtype in ("I8", "BF16", "U32"):
        part = StoredPart(dtype, (3,), np.zeros(12, np.uint8))
        with pytest.raises(Malformed):
            ENCODINGS["ulp"].decoder(Target("f", "w", "BF16", 64), {".ulp": part})


def test_positions_past_the_end_of_a_short_block() -> None:
    """A delta of a longer tensor: all of it is sound, but for where it points."""
    with small_blocks(SMALL):
        old, new = np.zeros(SMALL, "<u2"), np.zeros(SMALL, "<u2")
        new[[1, 60]] = 1
        data = encoded("ulp", "BF16", old, new, SMALL)[".ulp"].data.tobytes()
        assert np.array_equal(decode_ulp("BF16", old, data), new)
        with pytest.raises(Malformed):
            decode_ulp("BF16", old[:60], data)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("seed", range(8))
def test_mutated_parts_are_decoded_or_malformed(seed: int) -> None:
    """Flipped, cut, doubled, zeroed and random bytes: no other exception, none out of range."""
    random = Random(seed)
    dtype = ("I8", "BF16", "F32", "I64")[seed % 4]
    with small_blocks(SMALL):
        old, good = small_ulp(dtype, seed)
        count = sum(refused(dtype, old, mutated(good, random)) for _ in range(500))
        assert 100 < count < 500


def mutated(good: bytearray, random: Random) -> bytes:
    """One to three faults; most leave the directory as it is, or nothing else would be reached."""
    data = bytearray(good)
    for _ in range(random.randint(1, 3)):
        low = 0 if random.random() < 0.2 else min(HEAD, len(data) - 1)
        at = random.randrange(low, len(data))
        size = random.choice([1, 2, 8, 40])
        stop = min(at + size, len(data))
        fault = random.choice(["flip", "flip", "flip", "zero", "random", "move", "cut", "double"])
        if fault == "flip":
            data[at] ^= 1 << random.randrange(8)
        elif fault == "zero":
            data[at:stop] = bytes(stop - at)
        elif fault == "random":
            data[at:stop] = random.randbytes(stop - at)
        elif fault == "move":
            data[at:stop] = data[at:stop][::-1]
        elif fault == "cut" and random.random() < 0.2:
            del data[at:stop]
        elif fault == "double" and random.random() < 0.2:
            data[at:at] = data[at:stop]
    return bytes(data)


@pytest.mark.parametrize("dtype", ["I8", "BF16", "F32", "I64"])
def test_random_bytes_for_blocks(dtype: str) -> None:
    """The directory is right, and the rest is noise, or begins as a stream and ends as noise."""
    random = Random(7)
    with small_blocks(SMALL):
        old, good = small_ulp(dtype, 9)
        for _ in range(300):
            kept = random.choice([0, 0, 1, 5, 30])
            data = good[: HEAD + kept] + random.randbytes(len(good) - HEAD - kept)
            assert refused(dtype, old, bytes(data))


def test_a_whole_delta_of_noise_is_malformed(tmp_path: Path) -> None:
    """The payload's digest is checked before anything is decoded."""
    random = Random(5)
    old = {"w": ("BF16", (4000,), random.randbytes(8000))}
    data = bytearray(old["w"][2])
    data[10] ^= 1
    a = write_safetensors(tmp_path / "a.safetensors", old)
    b = write_safetensors(tmp_path / "b.safetensors", {"w": ("BF16", (4000,), bytes(data))})
    with open_checkpoint(a) as before, open_checkpoint(b) as after:
        diff(before, after, tmp_path / "delta")
    raw = (tmp_path / "delta").read_bytes()
    payload = open_delta(tmp_path / "delta").payload_bytes
    (tmp_path / "delta").write_bytes(raw[:-payload] + random.randbytes(payload))
    with pytest.raises(Malformed, match="payload"):
        apply_delta(tmp_path / "delta", a, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
