"""``ulp_ctx``: adversarial content by classes, hostile blocks, and other bases than its own."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltactl.bucket.local import LocalBucket
from deltactl.checkpoint.checkpoint import open_checkpoint
from deltactl.codec import ENCODINGS, classes, golomb, grouping, ulp_ctx
from deltactl.codec.base import StoredPart, Target
from deltactl.codec.bits import split_steps
from deltactl.codec.classes import SEGMENT
from deltactl.codec.golomb import leb128
from deltactl.codec.ulp_ctx import UlpCtx, UlpCtxDecoder
from deltactl.core.dtypes import FLOATS
from deltactl.core.errors import Conflict, Malformed
from deltactl.format.delta import open_delta
from deltactl.ops.apply import apply_delta
from deltactl.ops.pull import pull
from deltactl.ops.push import push
from deltactl.ops.stats import stats_delta, stats_pair
from deltactl.ops.verify import verify_bucket
from tests.golden.make import trained, weights
from tests.support.adversarial import Bits, pairs, small_blocks, special_bits, unsigned
from tests.support.chains import Tensors, content, holds, make_delta, write
from tests.support.checkpoints import BITS, read_tensors, write_safetensors
from tests.support.parts import decoded, encoded

pytestmark = pytest.mark.usefixtures("loops")

CODEC = ENCODINGS["ulp_ctx"]


def decoder_of(dtype: str, size: int, count: int, block: bytes) -> UlpCtxDecoder:
    """The decoder of a tensor of one block with so many elements and changes."""
    data = np.frombuffer(np.array([count, len(block)], "<u4").tobytes() + block, np.uint8)
    part = StoredPart("U8", data.shape, data)
    return UlpCtx().decoder(Target("file", "w", dtype, size), {".ulp_ctx": part})


def by_classes(dtype: str, old: Bits, new: Bits) -> tuple[int, bytes]:
    """How many elements change, and the block by classes, be it the smallest or not."""
    at = np.flatnonzero(old != new)
    steps, _ = split_steps(old[at], new[at], dtype)
    return at.size, ulp_ctx._encode(old, at, old[at], steps, dtype)


def moved(dtype: str, count: int, far: int = 0) -> tuple[Bits, Bits]:
    """Elements that are spread as weights are, before and after a step of training."""
    spec = weights(dtype, count)
    return tuple(np.frombuffer(s[2], unsigned(dtype)) for s in (spec, trained(spec, 1, far)))


@contextmanager
def short_segments(bits: int = 3) -> Iterator[None]:
    """Segments of a few elements, named wherever there are silent ones."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (classes, grouping, ulp_ctx):
            patch.setattr(module, "SEGMENT", 1 << bits)
        for module in (classes, grouping):
            patch.setattr(module, "SEGMENT_BITS", bits)
        # Whatever there is to say costs nothing beside so much.
        patch.setattr(grouping, "set_bits", lambda _, total: total * 1000.0)
        yield


# There and back.


@pytest.mark.parametrize("dtype", FLOATS)
@given(data=st.data())
@settings(max_examples=60)
def test_any_changes_come_back_by_classes(dtype: str, data: st.DataObject) -> None:
    """Whatever the classes and the silent segments are."""
    old, new = data.draw(pairs(dtype))
    if np.array_equal(old, new):
        return
    borders = data.draw(st.sets(st.integers(1, FLOATS[dtype].highest), max_size=255))
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.setattr(ulp_ctx, "choose_borders", lambda *_: tuple(sorted(borders)))
        with short_segments(3 if data.draw(st.booleans()) else 20):
            count, block = by_classes(dtype, old, new)
            assert np.array_equal(decoded(decoder_of(dtype, old.size, count, block), old), new)
            patch.setattr(ulp_ctx, "_FEW", -1)  # class after class, as where very many change
            assert np.array_equal(decoded(decoder_of(dtype, old.size, count, block), old), new)


def test_silent_segments_are_named_in_these_tests() -> None:
    old = np.zeros(100, "<u2")
    new = old.copy()
    new[[17, 40]] = 1
    with short_segments():
        assert by_classes("BF16", old, new)[1][:2] == b"\2\x0b"  # 11 of 13


def special(dtype: str, count: int = 3000) -> Bits:
    """All special patterns, again and again."""
    return np.resize(special_bits(dtype), count)


CONTENT: dict[str, Callable[[str], tuple[Bits, Bits]]] = {
    "as trained": lambda dtype: moved(dtype, 3000),
    "steps of many units": lambda dtype: moved(dtype, 3000, far=9),
    "nothing": lambda dtype: (special(dtype), special(dtype)),
    "one": lambda dtype: differing(special(dtype), [1234]),
    "the first and the last": lambda dtype: differing(special(dtype), [0, -1]),
    "every one": lambda dtype: differing(special(dtype), range(3000)),
    "all but one": lambda dtype: differing(special(dtype), [n for n in range(3000) if n != 7]),
    "a run": lambda dtype: differing(special(dtype), range(1000, 1500)),
    "to the next special pattern": lambda dtype: (special(dtype), np.roll(special(dtype), 1)),
    "signs": lambda dtype: (special(dtype), special(dtype) ^ top(dtype)),
    "0 to -0": lambda dtype: (zeros(dtype), zeros(dtype) ^ top(dtype)),
    "some 0 to the smallest": lambda dtype: differing(zeros(dtype), range(0, 3000, 9)),
    "denormals to 0": lambda dtype: (denormals(dtype), denormals(dtype) & top(dtype)),
    "infinities to NaN": lambda dtype: (infinities(dtype), ~zeros(dtype)),
    "over an exponent's border": lambda dtype: (border(dtype), border(dtype) - border(dtype) % 2),
    "to zero": lambda dtype: (moved(dtype, 3000)[0], zeros(dtype)),
}


def differing(old: Bits, at: object) -> tuple[Bits, Bits]:
    """Elements, and the same with the lowest bit of some flipped."""
    new = old.copy()
    new[np.array(at)] ^= old.dtype.type(1)
    return old, new


def zeros(dtype: str) -> Bits:
    return np.zeros(3000, unsigned(dtype))


def top(dtype: str) -> np.unsignedinteger:
    kind = unsigned(dtype)
    return kind.type(1 << (8 * kind.itemsize - 1))


def denormals(dtype: str) -> Bits:
    found = np.arange(3000).astype(unsigned(dtype)) % (1 << FLOATS[dtype].mantissa)
    return found | np.where(np.arange(3000) % 2, top(dtype), 0).astype(found.dtype)


def infinities(dtype: str) -> Bits:
    infinity = FLOATS[dtype].highest << FLOATS[dtype].mantissa
    return np.resize(np.array([infinity, infinity | int(top(dtype))], unsigned(dtype)), 3000)


def border(dtype: str) -> Bits:
    """The first element of an exponent, and the last of the one before."""
    first = (FLOATS[dtype].highest // 2) << FLOATS[dtype].mantissa
    return np.resize(np.array([first, first - 1], unsigned(dtype)), 3000)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", CONTENT)
def test_adversarial_content(dtype: str, case: str) -> None:
    old, new = CONTENT[case](dtype)
    assert old.dtype == new.dtype == unsigned(dtype)
    parts = encoded("ulp_ctx", dtype, old, new)
    decoder = CODEC.decoder(Target("f", "w", dtype, old.size), parts)
    assert decoder.count == np.count_nonzero(old != new)
    assert np.array_equal(decoded(decoder, old), new)
    if decoder.count:
        count, block = by_classes(dtype, old, new)
        assert np.array_equal(decoded(decoder_of(dtype, old.size, count, block), old), new)


@pytest.mark.parametrize("dtype", FLOATS)
def test_steps_are_known_without_the_base(dtype: str) -> None:
    """Which they are, if not whose."""
    old, new = moved(dtype, 3000, far=9)
    at = np.flatnonzero(old != new)
    expected, _ = split_steps(old[at], new[at], dtype)
    decoder = decoder_of(dtype, 3000, *by_classes(dtype, old, new))
    found = decoder.steps(0, 3000)
    joined = [np.concatenate(list(steps.pieces())) for steps in (found, expected)]
    assert sorted(joined[0].tolist()) == sorted(joined[1].tolist())
    assert np.abs(joined[0].astype(np.int64)).max() > 1


# How large it is.


@pytest.mark.parametrize("dtype", BITS)
@given(data=st.data())
@settings(max_examples=20)
def test_never_larger_than_ulp_but_for_a_byte_a_block(dtype: str, data: st.DataObject) -> None:
    block = data.draw(st.sampled_from([8, 64]))
    old, new = data.draw(pairs(dtype, block=block))
    with small_blocks(block):
        size = encoded("ulp_ctx", dtype, old, new, block)[".ulp_ctx"].data.size
        as_ulp = encoded("ulp", dtype, old, new, block)[".ulp"].data.size
    assert size <= as_ulp + -(-old.size // block)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_smaller_than_ulp_upon_weights(dtype: str) -> None:
    old, new = moved(dtype, 30_000)
    size = encoded("ulp_ctx", dtype, old, new)[".ulp_ctx"].data.size
    assert size < 0.85 * encoded("ulp", dtype, old, new)[".ulp"].data.size


@pytest.mark.parametrize("dtype", sorted(BITS.keys() - FLOATS.keys()))
def test_without_exponents_there_are_no_classes(dtype: str) -> None:
    old = np.zeros(4000, unsigned(dtype))
    new = old.copy()
    new[::3] = 1
    data = encoded("ulp_ctx", dtype, old, new)[".ulp_ctx"].data
    assert data[8] == 0
    assert data[9:].tobytes() == encoded("ulp", dtype, old, new)[".ulp"].data[8:].tobytes()
    count, block = by_classes("BF16", old.astype("<u2"), new.astype("<u2"))
    assert malformed(dtype, old, count, block)


# Hostile blocks.


def malformed(dtype: str, old: Bits, count: int, block: bytes) -> bool:
    """Whether a block is Malformed; if not, it says nothing that is out of bounds.

    Any other exception comes through. Steps alone are asked for too.
    """
    decoder = decoder_of(dtype, old.size, count, block)
    try:
        steps = decoder.steps(0, old.size)
    except Malformed:  # what cannot be decoded without the base cannot be with it
        with pytest.raises(Malformed) as caught:
            decoder.block(0, old)
        assert (caught.value.file, caught.value.tensor) == ("file", "w")
        return True
    assert steps.beyond.size == count
    try:
        changes = decoder.block(0, old)
    except Malformed:
        return True
    assert changes.positions.size == count
    assert np.all(np.diff(changes.positions, prepend=-1) > 0)
    assert np.all(changes.positions < old.size)
    changes.put(old.copy(), 0)
    return False


def hostile_blocks(dtype: str, form: int) -> tuple[Bits, int, bytes]:
    """A base, how many elements change, and a block by two classes, with or without silent
    segments, some of whose steps are longer than one."""
    old, new = moved(dtype, 600, far=9)
    if form == 2:
        new = np.where(np.arange(600) // 64 % 3 == 1, new, old)
    with short_segments(6 if form == 2 else 20), pytest.MonkeyPatch.context() as patch:
        middle = FLOATS[dtype].highest // 2 - 1
        patch.setattr(ulp_ctx, "choose_borders", lambda *_: (middle,))
        count, block = by_classes(dtype, old, new)
    assert block[0] == form
    return old, count, block


CASES = [(dtype, form) for dtype in ("F8_E4M3", "BF16", "F64") for form in (1, 2)]


@pytest.mark.parametrize(("dtype", "form"), CASES)
def test_every_truncation_is_malformed(dtype: str, form: int) -> None:
    old, count, block = hostile_blocks(dtype, form)
    with short_segments(6):
        assert not malformed(dtype, old, count, block)
        assert all(malformed(dtype, old, count, block[:size]) for size in range(len(block)))
        assert malformed(dtype, old, count, block + b"\0")


@pytest.mark.parametrize(("dtype", "form"), CASES)
def test_every_flipped_bit_is_in_bounds_or_malformed(dtype: str, form: int) -> None:
    old, count, block = hostile_blocks(dtype, form)
    refused = 0
    tracemalloc.start()
    try:
        with short_segments(6):
            for bit in range(8 * len(block)):
                bad = bytearray(block)
                bad[bit // 8] ^= 1 << bit % 8
                refused += malformed(dtype, old, count, bytes(bad))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused > len(block)
    assert peak < 1 << 20


@pytest.mark.parametrize(("dtype", "form"), CASES)
def test_other_counts_are_in_bounds_or_malformed(dtype: str, form: int) -> None:
    old, count, block = hostile_blocks(dtype, form)
    with short_segments(6):
        others = [*range(count), *range(count + 1, 700), (1 << 32) - 1]
        assert all(malformed(dtype, old, other, block) for other in others if other)


@given(st.binary(max_size=80), st.integers(1, 40), st.sampled_from(sorted(BITS)))
@settings(max_examples=300)
def test_any_bytes_are_in_bounds_or_malformed(data: bytes, count: int, dtype: str) -> None:
    for form in (b"\0", b"\1", b"\2"):
        malformed(dtype, np.resize(special_bits(dtype), 2500), count, form + data)


def block(*pieces: int | bytes) -> bytes:
    """A block of numbers, and bytes as they are."""
    return b"".join(piece if isinstance(piece, bytes) else leb128(piece) for piece in pieces)


def numbers(*values: int) -> bytes:
    """A Golomb stream."""
    return golomb.encode(np.array(values, np.uint64))


LAST = 2 * SEGMENT + 1
"""Elements of a base of two segments and one element: zeros, but for the last one, 1.0."""

HOSTILE: Mapping[str, tuple[int, bytes]] = {
    "no form": (1, b""),
    "an unknown form": (1, block(b"\3", 0, b"\0", 0, numbers(5))),
    "ulp that is none": (1, block(b"\0", 0, b"\0", 0, numbers(5))),
    "no borders": (1, block(b"\1")),
    "256 borders": (1, block(b"\1", 256, *range(1, 257))),
    "2^62 borders": (1, block(b"\1", 1 << 62)),
    "a border of 0": (1, block(b"\1", 1, 0, 0, 0, b"\0", 0, numbers(5))),
    "a border twice": (1, block(b"\1", 2, 9, 9, 0, 0, 0, 0, b"\0", 0, numbers(5))),
    "borders that fall": (1, block(b"\1", 2, 9, 8, 0, 0, 0, 0, b"\0", 0, numbers(5))),
    "a border past the exponents": (1, block(b"\1", 1, 256, LAST, 1, b"\0", 0, numbers(5))),
    "a border of 2^62": (1, block(b"\1", 1, 1 << 62, LAST, 1, b"\0", 0, numbers(5))),
    "a number of ten bytes": (1, block(b"\1", b"\x80" * 9 + b"\0", b"\0", 0, numbers(5))),
    "more elements than there are": (1, block(b"\1", 1, 9, LAST + 1, 1, b"\0", 0, numbers(5))),
    "2^62 elements": (1, block(b"\1", 1, 9, 1 << 62, 1, b"\0", 0, numbers(5))),
    "more changes than there are": (1, block(b"\1", 1, 9, LAST - 1, 2, b"\0", 0, numbers(5, 0))),
    "more changes than elements": (3, block(b"\1", 1, 9, 2, 3, b"\0", 0, numbers(0, 0, 0))),
    "more in the last class": (3, block(b"\1", 1, 9, LAST - 1, 1, b"\0", 0, numbers(5), 0)),
    "other elements than the base": (1, block(b"\1", 1, 9, 1, 0, b"\0", 0, numbers(2000))),
    "no signs": (1, block(b"\1", 0)),
    "more longer steps than steps": (1, block(b"\1", 0, b"\0", 2, numbers(5))),
    "2^62 longer steps": (1, block(b"\1", 0, b"\0", 1 << 62, numbers(5))),
    "a step of more than the width": (
        1,
        block(b"\1", 0, b"\0", 1, numbers((1 << 15) - 1), numbers(5)),
    ),
    "no positions": (1, block(b"\1", 0, b"\0", 0)),
    "a position past the end": (1, block(b"\1", 0, b"\0", 0, numbers(LAST))),
    "a sum of gaps past the end": (2, block(b"\1", 0, b"\0", 0, numbers(LAST - 2, 1))),
    "a byte after the last set": (1, block(b"\1", 0, b"\0", 0, numbers(5), b"\0")),
    "no silent segments": (1, block(b"\2")),
    "more silent segments than there are": (1, block(b"\2", 4, 0, b"\0", 0, numbers(5))),
    "2^62 silent segments": (1, block(b"\2", 1 << 62)),
    "nothing but silent segments": (1, block(b"\2", 3, 0, b"\0", 0, numbers(5))),
    "a silent segment past the end": (1, block(b"\2", 1, numbers(3), 0, b"\0", 0, numbers(5))),
    "more changes than are not silent": (
        2,
        block(b"\2", 2, numbers(2), 0, b"\0", 0, numbers()),
    ),
}


def base_of_hostile_blocks() -> Bits:
    base = np.zeros(LAST, "<u2")
    base[-1] = 0x3F80
    return base


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_blocks(case: str) -> None:
    assert malformed("BF16", base_of_hostile_blocks(), *HOSTILE[case])


def test_blocks_by_hand() -> None:
    """As the hostile ones, without what is hostile in them."""
    base = base_of_hostile_blocks()
    good = [
        ([5], block(b"\1", 0, b"\0", 0, numbers(5))),
        ([LAST - 1], block(b"\1", 1, 9, LAST - 1, 0, b"\0", 0)),
        ([7, LAST - 1], block(b"\1", 1, 127, LAST - 1, 1, b"\0", 0, 0, numbers(7))),
        (
            [SEGMENT, LAST - 1],
            block(b"\2", 1, numbers(0), 1, 127, SEGMENT, 1, b"\0", 0, 0, numbers(0)),
        ),
        # Two of three segments are silent, so the other one is named; it has one element.
        ([LAST - 1], block(b"\2", 2, numbers(2), 0, b"\0", 0)),
    ]
    for positions, data in good:
        changes = decoder_of("BF16", LAST, len(positions), data).block(0, base)
        assert changes.positions.tolist() == positions
        new = base.copy()
        changes.put(new, 0)
        assert np.array_equal(new - base, np.isin(np.arange(LAST), positions))


# Another base.


def states(steps: int = 4) -> list[Tensors]:
    """Weights that are trained, one of which has rows that are silent, and integers."""
    found = [
        {
            "a.small": weights("BF16", 2000),
            "b.rows": weights("F8_E4M3", 24 * SEGMENT),
            "c.large": weights("BF16", 30_000),
            "d.master": weights("F32", 3000),
            "e.steps": ("I64", (2,), bytes(16)),
        }
    ]
    while len(found) < steps:
        seed, last = len(found), found[-1]
        after = {n: trained(s, seed, 5) if s[0] != "I64" else s for n, s in last.items()}
        dtype, shape, data = last["b.rows"]
        after["b.rows"] = (dtype, shape, after["b.rows"][2][: 2 * SEGMENT] + data[2 * SEGMENT :])
        after["e.steps"] = ("I64", (2,), seed.to_bytes(16, "little"))
        found.append(after)
    return found


@pytest.fixture(scope="module")
def chain() -> list[Tensors]:
    return states()


def test_these_deltas_have_blocks_by_classes(tmp_path: Path, chain: list[Tensors]) -> None:
    delta = make_delta(tmp_path / "delta", chain[0], chain[1], encoding="ulp_ctx")
    blocks = {n: data for n, (_, _, data) in read_tensors(delta).items() if "ulp_ctx" in n}
    assert {data[8] for data in blocks.values()} == {1, 2}
    assert len(blocks) == 4


def base_at(directory: Path, state: Tensors, shards: int) -> Path:
    """A file or a directory that can be changed in place."""
    return write(directory / ("base" if shards else "base.safetensors"), state, shards=shards)


@pytest.mark.parametrize("layout", ["file", "directory", "file in place", "directory in place"])
@pytest.mark.parametrize("other", ["an older step", "a later step", "one element"])
def test_another_base_is_a_conflict(
    tmp_path: Path, chain: list[Tensors], layout: str, other: str
) -> None:
    delta = make_delta(tmp_path / "delta", chain[1], chain[2], encoding="ulp_ctx")
    dtype, shape, data = chain[1]["c.large"]
    wrong = {
        "an older step": chain[0],
        "a later step": chain[3],
        "one element": {**chain[1], "c.large": (dtype, shape, data[:-1] + b"\0")},
    }[other]
    base = base_at(tmp_path, wrong, shards=0 if layout.startswith("file") else 2)
    out = None if layout.endswith("in place") else tmp_path / "out"
    was = content(tmp_path)
    with pytest.raises(Conflict, match="wrong base") as caught:
        apply_delta(delta, base, out)
    assert caught.value.file == str(delta)
    assert content(tmp_path) == was
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shards", [0, 2])
def test_another_base_that_shows_late_is_a_conflict(
    tmp_path: Path, chain: list[Tensors], shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors that are looked at are the base's; upon the last one nothing can be decoded."""
    monkeypatch.setattr("deltactl.ops.apply._ENOUGH", 1)
    delta = make_delta(tmp_path / "delta", chain[1], chain[2], encoding="ulp_ctx")
    wrong = {**chain[1], "c.large": ("BF16", (30_000,), b"\x80\x3f" * 30_000)}
    base = base_at(tmp_path, wrong, shards)
    was = content(tmp_path)
    for out in (tmp_path / "out", None):
        with pytest.raises(Conflict, match="wrong base"):
            apply_delta(delta, base, out)
    assert content(tmp_path) == was


@pytest.mark.parametrize("shards", [0, 2])
def test_applying_twice_is_a_no_op_that_says_so(
    tmp_path: Path, chain: list[Tensors], shards: int
) -> None:
    delta = make_delta(tmp_path / "delta", chain[0], chain[1], encoding="ulp_ctx")
    base = base_at(tmp_path, chain[0], shards)
    first = apply_delta(delta, base, tmp_path / "out")
    assert (first.written, first.proven) == (True, True)
    assert holds(tmp_path / "out", chain[1])
    assert not apply_delta(delta, base, tmp_path / "out").written
    assert apply_delta(delta, base, None).written
    assert holds(base, chain[1])
    was = content(tmp_path)
    again = apply_delta(delta, base, None)
    assert not again.written
    assert again.state == first.state
    assert not apply_delta(delta, base, tmp_path / "out").written
    assert content(tmp_path) == was
    assert apply_delta(delta, base, tmp_path / "copy").written
    assert holds(tmp_path / "copy", chain[1])


# Several deltas.


@pytest.fixture(params=[("ulp_ctx",) * 3, ("ulp", "ulp_ctx", "ulp_ctx"), ("ulp_ctx", "raw", "ulp")])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, chain: list[Tensors]) -> LocalBucket:
    """A chain of an anchor and three deltas in these encodings."""
    bucket = LocalBucket(tmp_path / "bucket")
    for step, (state, encoding) in enumerate(
        zip(chain, ("raw", *request.param), strict=True), start=1
    ):
        source = write_safetensors(tmp_path / f"{step}.safetensors", state)
        push(source, bucket, step=step, anchor_every=0, encoding=encoding)
    return bucket


def test_every_step_is_rebuilt(bucket: LocalBucket, tmp_path: Path, chain: list[Tensors]) -> None:
    for step, state in enumerate(chain, start=1):
        pull(bucket, tmp_path / f"step_{step}", step=step)
        assert holds(tmp_path / f"step_{step}", state)
    report = pull(bucket, tmp_path / "step_2")
    assert (report.from_step, report.proven) == (2, True)
    assert holds(tmp_path / "step_2", chain[-1])


def test_the_chain_is_verified(bucket: LocalBucket, tmp_path: Path, chain: list[Tensors]) -> None:
    good = write_safetensors(tmp_path / "good.safetensors", chain[-1])
    assert verify_bucket(bucket, level="rebuild", against=good).ok
    bad = write_safetensors(tmp_path / "bad.safetensors", chain[-2])
    assert not verify_bucket(bucket, level="links", against=bad).ok


def test_a_torn_anchor_is_to_blame(bucket: LocalBucket, tmp_path: Path) -> None:
    """Not the delta that cannot be decoded upon it."""
    anchor = tmp_path / "bucket/anchors/step_000001.safetensors"
    data = bytearray(anchor.read_bytes())
    half = len(data) // 4 * 2
    data[half:] = b"\x80\x3f" * ((len(data) - half) // 2)  # all of one exponent
    anchor.write_bytes(data)
    with pytest.raises(Malformed, match="anchor") as caught:
        pull(bucket, tmp_path / "out", step=3)
    assert "anchors/" in str(caught.value.file)
    assert not (tmp_path / "out").exists()


# Statistics.


def test_stats_of_a_delta_are_those_of_its_pair(tmp_path: Path, chain: list[Tensors]) -> None:
    path = make_delta(tmp_path / "delta", chain[0], chain[1], encoding="ulp_ctx")
    stats = stats_delta(open_delta(path))
    a, b = (write_safetensors(tmp_path / n, t) for n, t in (("a", chain[0]), ("b", chain[1])))
    with open_checkpoint(a) as before, open_checkpoint(b) as after:
        of_pair = stats_pair(before, after)
    assert stats.steps is not None
    assert of_pair.steps is not None
    assert stats.steps.facts()["bins"] == of_pair.steps.facts()["bins"]
    assert stats.changed_elements == of_pair.changed_elements
    assert stats.sizes["raw"] == of_pair.sizes["raw"]
    assert stats.sizes["ulp_ctx"] == open_delta(path).payload_bytes
    assert stats.sizes["gap_delta"] is None
