"""Bit patterns: order, steps, changed positions, touch sums; against Python's integers."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltactl.codec.bits import (
    _PIECE,
    elements,
    mix64,
    positions_of,
    steps_between,
    take_steps,
    touch_sum,
    touch_sum_of_all,
)
from deltactl.core.dtypes import FLOATS, element_bytes
from tests.support.adversarial import LAYOUTS, Bits, pairs, special_bits, unsigned
from tests.support.checkpoints import BITS

MASK = (1 << 64) - 1
FEW = settings(max_examples=30)


def order(bits: int, dtype: str) -> int:
    """A number that rises with the value, by the book."""
    width = 8 * element_bytes(dtype)
    top = 1 << (width - 1)
    if dtype not in LAYOUTS:
        return bits
    return bits ^ (2 * top - 1) if bits & top else bits | top


def mixed(position: int, bits: int) -> int:
    z = (position * 0x9E3779B97F4A7C15 + bits) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


# Elements.


@pytest.mark.parametrize("dtype", BITS)
def test_elements_are_as_wide_as_the_dtype_and_bytes_below_that(dtype: str) -> None:
    assert element_bytes(dtype) == max(BITS[dtype] // 8, 1)
    data = np.arange(24, dtype=np.uint8)
    found = elements(data, dtype)
    assert found.dtype == unsigned(dtype)
    assert int(found[0]) == int.from_bytes(bytes(range(found.itemsize)), "little")
    assert np.shares_memory(found, data)


def test_elements_of_unaligned_bytes() -> None:
    data = np.arange(17, dtype=np.uint8)[1:]
    assert elements(data, "F64").tolist() == list(struct.unpack("<2Q", bytes(range(1, 17))))


# Steps.


def test_floats_with_a_sign_are_those_with_a_layout() -> None:
    assert LAYOUTS.keys() == FLOATS.keys()


@pytest.mark.parametrize("dtype", BITS)
def test_steps_between_special_bits_are_differences_in_order(dtype: str) -> None:
    special = special_bits(dtype)
    width = 8 * special.itemsize
    old, new = (side.ravel() for side in np.meshgrid(special, special))
    steps = steps_between(old, new, dtype)
    assert steps.dtype == np.dtype(f"<i{special.itemsize}")
    for a, b, step in zip(old.tolist(), new.tolist(), steps.tolist(), strict=True):
        assert (order(b, dtype) - order(a, dtype) - step) % (1 << width) == 0
    assert np.array_equal(take_steps(old, steps, dtype), new)


@pytest.mark.parametrize("dtype", BITS)
@given(data=st.data())
@FEW
def test_steps_lead_back(dtype: str, data: st.DataObject) -> None:
    old, new = data.draw(pairs(dtype))
    steps = steps_between(old, new, dtype)
    assert np.array_equal(take_steps(old, steps, dtype), new)
    assert np.array_equal(steps != 0, old != new)


@pytest.mark.parametrize("dtype", sorted(d for d in LAYOUTS if BITS[d] <= 16))
def test_every_value_is_one_step_from_the_next(dtype: str) -> None:
    """All bit patterns, from the most negative NaN to the most positive, each one step up."""
    kind = unsigned(dtype)
    top = 1 << (BITS[dtype] - 1)
    negative = np.arange(2 * top - 1, top - 1, -1)
    every = np.concatenate([negative, np.arange(top)]).astype(kind)
    assert set(steps_between(every[:-1], every[1:], dtype).tolist()) == {1}


@pytest.mark.parametrize(("dtype", "code"), [("F16", "e"), ("F32", "f"), ("F64", "d")])
def test_steps_up_rise_in_value(dtype: str, code: str) -> None:
    values = [float("-inf"), -1e4, -1.0, -6e-8, 0.0, 6e-8, 1.0, 1.5, 2.0, 1e4, float("inf")]
    bits = np.frombuffer(struct.pack(f"<{len(values)}{code}", *values), unsigned(dtype))
    orders = [order(b, dtype) for b in bits.tolist()]
    assert all(a < b for a, b in pairwise(orders))
    one = np.ones(bits.size, f"<i{bits.itemsize}")
    assert [order(b, dtype) for b in take_steps(bits, one, dtype).tolist()] == [
        number + 1 for number in orders
    ]


def test_zeros_are_neighbours() -> None:
    zeros = np.array([0x8000, 0x0000], np.uint16)
    assert steps_between(zeros[:1], zeros[1:], "BF16").tolist() == [1]
    assert steps_between(zeros[:1], zeros[1:], "U16").tolist() == [-0x8000]


# Changed positions.


@given(
    st.integers(0, 600),
    st.sampled_from([0.0, 0.002, 0.02, 0.3, 1.0]),
    st.integers(0, 1 << 32),
)
@settings(max_examples=300)
def test_positions_are_those_of_true_bools(size: int, share: float, seed: int) -> None:
    mask = np.random.default_rng(seed).random(size) < share
    found = positions_of(mask)
    assert found.dtype == np.int64
    assert np.array_equal(found, np.flatnonzero(mask))


@pytest.mark.parametrize("size", [1, 7, 8, 63, 64, 65, 511, 512, 513, 4096])
def test_single_positions_are_found_everywhere(size: int) -> None:
    mask = np.zeros(size, np.bool_)
    for at in {0, size // 2, size - 1}:
        mask[at] = True
        assert positions_of(mask).tolist() == [at]
        mask[at] = False


# Touch sums.


@pytest.mark.parametrize("kind", ["<u1", "<u2", "<u4", "<u8"])
@given(data=st.data())
@FEW
def test_touch_sums_are_sums_of_mixed_pairs(kind: str, data: st.DataObject) -> None:
    positions, bits = data.draw(touched(kind))
    expected = sum(map(mixed, positions.tolist(), bits.tolist())) & MASK
    assert touch_sum(positions, bits) == expected


def test_touch_sums_of_many_pairs() -> None:
    """More than are mixed at a time."""
    count = 3 * (1 << 13) + 5
    positions = np.arange(count) * 3
    bits = np.random.default_rng(1).integers(0, 1 << 16, count).astype("<u2")
    expected = sum(map(mixed, positions.tolist(), bits.tolist())) & MASK
    assert touch_sum(positions, bits) == expected


@pytest.mark.parametrize("size", [0, 1, _PIECE, 2 * _PIECE + 3])
@pytest.mark.parametrize("kind", ["<u1", "<u2", "<u4", "<u8"])
def test_touch_sums_of_all_elements(kind: str, size: int) -> None:
    bits = np.random.default_rng(size).integers(0, 256, size).astype(kind)
    for index in (0, 1 << 40):
        assert touch_sum_of_all(bits, index) == touch_sum(np.arange(size) + index, bits)


def test_touch_sums_that_are_known() -> None:
    positions = np.array([0, 1, 2, 1 << 40])
    assert touch_sum(positions[:0], np.array([], "<u2")) == 0
    assert touch_sum(positions[:1], np.array([0], "<u2")) == 0
    assert (
        touch_sum(positions[1:2], np.array([0], "<u8")) == 0xE220A8397B1DCDAF
    )  # SplitMix64's first
    assert touch_sum(positions[2:3], np.array([0], "<u8")) == 0x6E789E6AA1B965F4  # and its second
    assert touch_sum(positions, np.array([1, 2, 3, (1 << 64) - 1], "<u8")) == 0x848F19E4280AA8E7


@given(data=st.data())
@FEW
def test_touch_sums_have_no_order_and_add_up(data: st.DataObject) -> None:
    positions, bits = data.draw(touched("<u2"))
    shuffled = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(positions.size)
    whole = touch_sum(positions, bits)
    assert touch_sum(positions[shuffled].copy(), bits[shuffled].copy()) == whole
    cut = data.draw(st.integers(0, positions.size))
    parts = touch_sum(positions[:cut], bits[:cut]) + touch_sum(positions[cut:], bits[cut:])
    assert parts & MASK == whole


@given(data=st.data())
@FEW
def test_touch_sums_see_swaps_and_single_bits(data: st.DataObject) -> None:
    positions, bits = data.draw(touched("<u4", least=2))
    whole = touch_sum(positions, bits)
    a, b = data.draw(st.permutations(range(min(positions.size, 9))))[:2]
    swapped = bits.copy()
    swapped[[a, b]] = swapped[[b, a]]
    assert (touch_sum(positions, swapped) == whole) == (bits[a] == bits[b])
    flipped = bits.copy()
    flipped[a] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert touch_sum(positions, flipped) != whole
    moved = positions.copy()
    moved[-1] += 1
    assert touch_sum(moved, bits) != whole


def test_mixing_is_one_to_one_in_the_bits() -> None:
    bits = np.arange(1 << 16, dtype="<u2")
    found = mix64(np.full(bits.size, 12345, np.uint64), bits)
    assert np.unique(found).size == bits.size


@st.composite
def touched(draw: st.DrawFn, kind: str, least: int = 0) -> tuple[np.ndarray, Bits]:
    """Positions, rising, up to 2^50, and bits of that kind."""
    numbers = draw(st.sets(st.integers(0, 1 << 50), min_size=least, max_size=40))
    positions = np.array(sorted(numbers), np.int64)
    most = (1 << (8 * np.dtype(kind).itemsize)) - 1
    values = draw(st.lists(st.integers(0, most), min_size=len(numbers), max_size=len(numbers)))
    return positions, np.array(values, kind)
