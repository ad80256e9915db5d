"""Classes of a block's elements: ranks as they are defined, and back, with both kinds of loops."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltactl.codec import classes as module
from deltactl.codec.classes import Classes, exponents
from deltactl.core.dtypes import FLOATS
from tests.support.adversarial import LAYOUTS, Bits, pairs, special_bits

pytestmark = pytest.mark.usefixtures("loops")

SEGMENT_BITS = 3  # short segments, so that small blocks have many


@pytest.fixture(scope="module", autouse=True)
def _short_segments() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SEGMENT_BITS", SEGMENT_BITS)
        patch.setattr(module, "SEGMENT", 1 << SEGMENT_BITS)
        yield


@st.composite
def blocks(draw: st.DrawFn, dtype: str) -> tuple[Classes, Bits, npt.NDArray[np.int64]]:
    """Classes, elements, and changed positions, all in active segments."""
    old, new = draw(pairs(dtype))
    active = draw(st.lists(st.booleans(), min_size=40, max_size=40))
    segments = np.array(active[: -(-old.size >> SEGMENT_BITS)] or [], np.uint8)
    highest = FLOATS[dtype].highest
    borders = draw(st.sets(st.integers(1, highest), max_size=min(255, highest)))
    at = np.flatnonzero(old != new)
    at = at[segments[at >> SEGMENT_BITS] != 0] if segments.size else at[:0]
    return Classes(dtype, tuple(sorted(borders)), segments), old, at


def class_of(classes: Classes, element: int) -> int:
    """The class of an element, from the layout of its dtype."""
    exponent, mantissa = LAYOUTS[classes.dtype]
    value = (element >> mantissa) % (1 << exponent)
    return sum(border <= value for border in classes.borders)


@pytest.mark.parametrize("dtype", FLOATS)
@given(data=st.data())
@settings(max_examples=30)
def test_ranks_are_what_they_are_defined_to_be_and_lead_back(
    dtype: str, data: st.DataObject
) -> None:
    classes, bits, at = data.draw(blocks(dtype))
    members: list[list[int]] = [[] for _ in range(classes.count)]
    for position, element in enumerate(bits.tolist()):
        if classes.active[position >> SEGMENT_BITS]:
            members[class_of(classes, element)].append(position)
    changed = set(at.tolist())
    expected = [[r for r, p in enumerate(m) if p in changed] for m in members]

    ranks, order, counts, totals = classes.ranks(bits, at)
    assert ranks.dtype == np.uint32
    assert ranks.tolist() == [rank for of_class in expected for rank in of_class]
    assert counts.tolist() == [len(of_class) for of_class in expected]
    assert totals.tolist() == [len(m) for m in members]
    of_each = [m[r] for m, of_class in zip(members, expected, strict=True) for r in of_class]
    assert at[order].tolist() == of_each

    assert classes.select(bits, ranks, counts) == at.size
    assert np.array_equal(ranks, at[order])


@pytest.mark.parametrize("dtype", FLOATS)
@given(data=st.data())
@settings(max_examples=20)
def test_ranks_that_are_not_there_are_not_found(dtype: str, data: st.DataObject) -> None:
    """Whatever another base holds: what is found is in active segments, and rises in its class."""
    classes, bits, _ = data.draw(blocks(dtype))
    numbers = st.sets(st.integers(0, 250) | st.sampled_from([(1 << 31) - 1, 1 << 23]), max_size=20)
    chosen = [sorted(data.draw(numbers)) for _ in range(min(classes.count, 4))]
    chosen += [[]] * (classes.count - len(chosen))
    ranks = np.array([rank for of_class in chosen for rank in of_class], np.uint32)
    counts = np.array([len(of_class) for of_class in chosen])
    totals = classes.ranks(bits, np.empty(0, np.int64))[3]
    there = [sum(r < t for r in of_class) for of_class, t in zip(chosen, totals, strict=True)]
    assert classes.select(bits, ranks, counts) == sum(there)
    for of_class, number in zip(np.split(ranks, np.cumsum(counts)[:-1]), there, strict=True):
        positions = of_class[:number].astype(np.int64)
        assert np.all(np.diff(positions) > 0)
        assert np.all(positions < bits.size)
        assert np.all(classes.active[positions >> SEGMENT_BITS] != 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_exponents_are_those_of_the_layout(dtype: str) -> None:
    exponent, mantissa = LAYOUTS[dtype]
    assert FLOATS[dtype][:2] == (exponent, mantissa)
    special = special_bits(dtype)
    expected = [(element >> mantissa) % (1 << exponent) for element in special.tolist()]
    assert exponents(special, dtype).tolist() == expected


def test_a_class_for_every_exponent() -> None:
    every = np.arange(1 << 16).astype("<u2")
    active = np.ones(every.size >> SEGMENT_BITS, np.uint8)
    classes = Classes("BF16", tuple(range(1, 256)), active)
    at = np.arange(0, every.size, 7)
    ranks, _, counts, totals = classes.ranks(every, at)
    assert totals.tolist() == [256] * 256
    assert counts.sum() == ranks.size == at.size
    assert classes.select(every, ranks, counts) == at.size
    assert np.array_equal(np.sort(ranks), at)
