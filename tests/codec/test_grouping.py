"""Which classes and silent segments a block gets: borders where they pay, and only there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltactl.codec.bits import split_steps
from deltactl.codec.classes import MOST_CLASSES, SEGMENT
from deltactl.codec.grouping import choose_borders, silent_segments
from deltactl.codec.ulp_ctx import UlpCtx
from deltactl.core.dtypes import FLOATS
from tests.support.adversarial import Bits, pairs, unsigned

Mask = npt.NDArray[np.bool_]


def elements(dtype: str, exponents: npt.NDArray[np.int64], seed: int = 1) -> Bits:
    """Elements with these exponents, and random signs and mantissas."""
    kind, shift, mask = unsigned(dtype), FLOATS[dtype].mantissa, FLOATS[dtype].highest
    noise = np.random.default_rng(seed).bytes(exponents.size * kind.itemsize)
    clear = kind.type(((1 << (8 * kind.itemsize)) - 1) ^ (mask << shift))
    return (np.frombuffer(noise, kind) & clear) | (exponents.astype(kind) << kind.type(shift))


def borders(dtype: str, base: Bits, changes: Mask, units: int = 1) -> tuple[int, ...]:
    """The borders of a block whose elements change where the mask says, by so many units."""
    before = base[changes]
    steps, _ = split_steps(before, before + before.dtype.type(units), dtype)
    found = choose_borders(base, before, steps, dtype)
    assert all(type(border) is int for border in found)
    return found


# Borders.


@pytest.mark.parametrize("dtype", FLOATS)
@given(data=st.data())
@settings(max_examples=30)
def test_borders_rise_and_are_exponents(dtype: str, data: st.DataObject) -> None:
    old, new = data.draw(pairs(dtype))
    at = np.flatnonzero(old != new)
    if not at.size:
        return
    steps, _ = split_steps(old[at], new[at], dtype)
    found = choose_borders(old, old[at], steps, dtype)
    assert list(found) == sorted(set(found))
    assert all(0 < border <= FLOATS[dtype].highest for border in found)
    assert len(found) < MOST_CLASSES


@pytest.mark.parametrize("dtype", FLOATS)
def test_two_exponents_that_behave_differently_are_told_apart(dtype: str) -> None:
    low, high = 1, FLOATS[dtype].highest
    random = np.random.default_rng(5)
    exponents = np.where(random.random(20_000) < 0.5, low, high)
    base = elements(dtype, exponents)
    changes = random.random(20_000) < np.where(exponents == low, 0.4, 0.01)
    (border,) = borders(dtype, base, changes)
    assert low < border <= high


@pytest.mark.parametrize("dtype", FLOATS)
def test_exponents_that_behave_alike_are_one_class(dtype: str) -> None:
    random = np.random.default_rng(6)
    exponents = random.integers(1, min(FLOATS[dtype].highest, 30), 20_000)
    assert borders(dtype, elements(dtype, exponents), random.random(20_000) < 0.1) == ()


def test_exponents_whose_steps_differ_are_told_apart() -> None:
    random = np.random.default_rng(7)
    exponents = random.integers(100, 102, 20_000)
    base = elements("F32", exponents)
    changes = random.random(20_000) < 0.2
    before = base[changes]
    far = np.where(exponents[changes] == 100, 900, 1).astype("<u4")
    steps, _ = split_steps(before, before + far, "F32")
    assert choose_borders(base, before, steps, "F32") == (101,)


def test_a_border_that_saves_less_than_a_class_costs_is_not_made() -> None:
    """A hundred elements cannot save what it takes to say that they are a class."""
    exponents = np.full(20_000, 120)
    exponents[:100] = 121
    changes = np.random.default_rng(8).random(20_000) < 0.1
    changes[:100] = np.arange(100) < 20
    assert borders("BF16", elements("BF16", exponents), changes) == ()


def test_an_exponent_that_the_sample_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltactl.codec.grouping._SAMPLE", 16)
    exponents = np.full(4096, 100)
    exponents[1::2] = 110  # of every 256th element none
    changes = exponents == 110
    assert borders("BF16", elements("BF16", exponents), changes) == (110,)


def test_more_exponents_than_there_can_be_classes() -> None:
    """F64 has 2048; here eight of them change in every other element, the next eight never."""
    random = np.random.default_rng(9)
    exponents = random.integers(0, 2048, 1 << 19)
    base = elements("F64", exponents)
    changes = ((exponents // 8) % 2 == 0) & (random.random(1 << 19) < 0.5)
    assert borders("F64", base, changes) == tuple(range(8, 2048, 8))
    at = np.flatnonzero(changes)
    (block,) = UlpCtx().encode(base, at, base[at], base[at] ^ np.uint64(1), "F64")
    assert block[:3] == b"\1\xff\1"


def test_every_exponent_of_many_in_its_own_way() -> None:
    """More than 256 classes would pay, if there could be as many."""
    exponents = np.random.default_rng(12).integers(0, 2048, 1 << 19)
    exponents[exponents > 1500] &= ~1
    base = elements("F64", exponents)
    changes = exponents % 2 == 0
    assert len(borders("F64", base, changes)) < MOST_CLASSES


def test_as_many_classes_as_there_can_be() -> None:
    """And a block of them comes back."""
    random = np.random.default_rng(10)
    exponents = random.integers(0, 256, 1 << 17)
    base = elements("BF16", exponents)
    changes = exponents % 2 == 0
    assert borders("BF16", base, changes) == tuple(range(1, 256))
    at = np.flatnonzero(changes)
    (block,) = UlpCtx().encode(base, at, base[at], base[at] ^ 1, "BF16")
    assert block[:3] == b"\1\xff\1"


# Silent segments.


def named(positions: npt.ArrayLike, length: int) -> list[int]:
    return silent_segments(np.asarray(positions, np.int64), length).tolist()


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("every", [2, 10])
def test_rows_without_changes_are_named_and_the_block_is_smaller(
    share: float, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(11)
    length = 100 * SEGMENT
    is_silent = np.arange(100) % every != 1
    changes = (random.random(length) < share) & ~np.repeat(is_silent, SEGMENT)
    changes[SEGMENT :: every * SEGMENT] = True
    at = np.flatnonzero(changes)
    assert named(at, length) == np.flatnonzero(is_silent).tolist()
    base = elements("BF16", np.full(length, 120))
    (small,) = UlpCtx().encode(base, at, base[at], base[at] ^ 1, "BF16")
    assert small[0] == 2
    monkeypatch.setattr("deltactl.codec.ulp_ctx.silent_segments", lambda at, _: at[:0])
    (large,) = UlpCtx().encode(base, at, base[at], base[at] ^ 1, "BF16")
    assert len(small) < len(large)


@pytest.mark.parametrize(
    ("positions", "length"),
    [
        ([0], 1),
        ([5], SEGMENT),
        (range(0, 9 * SEGMENT, 40), 9 * SEGMENT),  # there is none
        (range(0, 60 * SEGMENT, SEGMENT * 3 // 2), 60 * SEGMENT),  # by chance
        (range(0, 9 * SEGMENT, 20), 9 * SEGMENT + 3),  # three elements
        ([0, SEGMENT * 3], 4 * SEGMENT),  # too few to matter
    ],
)
def test_segments_are_not_named_where_it_does_not_pay(positions: list[int], length: int) -> None:
    assert named(positions, length) == []


@given(
    share=st.floats(0.0001, 0.5),
    silent=st.floats(0, 1),
    segments=st.integers(1, 60),
    more=st.integers(1, SEGMENT),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60)
def test_what_is_named_is_what_is_silent(
    share: float, silent: float, segments: int, more: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    length = (segments - 1) * SEGMENT + more
    quiet = np.repeat(random.random(segments) < silent, SEGMENT)[:length]
    at = np.flatnonzero((random.random(length) < share) & ~quiet)
    found = named(at, length)
    assert found in ([], [n for n in range(segments) if n not in at // SEGMENT])
