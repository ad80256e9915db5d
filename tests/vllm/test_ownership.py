"""Who owns what: every element of a tensor once, or the tensor is unmapped."""

from __future__ import annotations

import pickle
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deltactl.vllm.layout.ownership import Summary, box, overlap, owners
from deltactl.vllm.layout.regions import Part


def run(first: int, end: int) -> Part:
    return first, (end - first,), (1,)


def held(*parts: Part, shape: tuple[int, ...] = (10,), name: str = "t") -> Summary:
    return Summary({name: (shape, parts)}, (), {})


NOTHING = Summary({}, ("t",), {})


def test_of_equal_parts_the_lowest_rank_owns_the_first() -> None:
    whole = run(0, 10)
    found = owners([NOTHING, held(whole, whole), held(whole)])
    assert found.owned == ({}, {"t": (3, 0)}, {"t": (0,)})
    assert not found.unmapped
    assert not found.ignored


def test_slices_are_owned_by_who_has_them_and_shared_ones_once() -> None:
    left, right = run(0, 4), run(4, 10)
    found = owners([held(left), held(left), held(right), held(right)])
    assert [rank["t"] for rank in found.owned] == [(2,), (0,), (2,), (0,)]


def test_columns_are_slices_too() -> None:
    left, right = (0, (5, 1), (2, 1)), (1, (5, 1), (2, 1))
    assert not owners([held(left, shape=(5, 2)), held(right, shape=(5, 2))]).unmapped
    assert "overlap" in owners([held(left, (0, (5, 2), (2, 1)), shape=(5, 2))]).unmapped["t"]


def test_parts_that_overlap_or_leave_out_unmap_the_tensor() -> None:
    assert owners([held(run(0, 6)), held(run(5, 10))]).unmapped == {
        "t": "parts of it overlap, on one rank or on two"
    }
    assert owners([held(run(0, 5)), held(run(6, 10))]).unmapped == {
        "t": "the loader leaves 1 of its 10 elements out"
    }
    odd = (0, (5,), (2,))
    assert "no slices" in owners([held(odd, run(1, 2))]).unmapped["t"]
    assert (
        "other shapes" in owners([held(run(0, 10)), held(run(0, 10), shape=(5, 2))]).unmapped["t"]
    )


def test_unmapped_on_one_rank_is_unmapped_on_all_and_ignored_needs_all() -> None:
    broken = Summary({}, (), {"t": "cast"})
    assert owners([held(run(0, 10)), broken]).unmapped == {"t": "cast (rank 1)"}
    assert owners([broken]).unmapped == {"t": "cast"}
    assert owners([NOTHING, broken]).ignored == ()
    assert owners([NOTHING, NOTHING]).ignored == ("t",)
    assert owners([NOTHING, held(run(0, 10))]).owned == ({}, {"t": (1,)})


def test_scalars() -> None:
    one = (0, (1,), (1,))
    assert owners([held(one, shape=()), held(one, shape=())]).owned == (
        {"t": (2,)},
        {"t": (0,)},
    )


def test_a_summary_can_be_sent() -> None:
    sent = held(run(0, 10))
    assert pickle.loads(pickle.dumps(sent)) == sent


@settings(max_examples=200)
@given(data=st.data())
def test_a_box_is_the_slice_that_the_part_is(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    bounds = []
    for size in shape:
        first = data.draw(st.integers(0, size - 1))
        bounds.append((first, data.draw(st.integers(first + 1, size))))
    part = _part(shape, bounds)
    assert box(part, shape) == tuple(bounds)


def _part(shape: tuple[int, ...], bounds: list[tuple[int, int]]) -> Part:
    """The slice as a region would give it: dimensions that are one run are joined."""
    units = [prod(shape[at + 1 :]) for at in range(len(shape))]
    offset = sum(first * unit for (first, _), unit in zip(bounds, units, strict=True))
    axes: list[tuple[int, int]] = []
    for (first, end), unit in zip(bounds, units, strict=True):
        if end - first == 1:
            continue
        if axes and axes[-1][1] == (end - first) * unit:
            axes[-1] = axes[-1][0] * (end - first), unit
        else:
            axes.append((end - first, unit))
    axes = axes or [(1, 1)]
    return offset, tuple(n for n, _ in axes), tuple(s for _, s in axes)


@settings(max_examples=200)
@given(
    boxes=st.lists(
        st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 3))] * 2), min_size=0, max_size=6
    ),
    rows=st.integers(1, 4),
)
def test_overlap_is_what_a_count_says(
    boxes: list[tuple[tuple[int, int], tuple[int, int]]], rows: int
) -> None:
    found = [tuple((first, first + size) for first, size in one) for one in boxes]
    count = np.zeros((8, 8), int)
    for (a, b), (c, d) in found:
        count[a:b, c:d] += 1
    assert overlap(found, rows) is bool((count > 1).any())
