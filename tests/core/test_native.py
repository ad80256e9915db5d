"""The compiled inner loops: the same as numpy, bit for bit, wherever the arrays lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from deltactl.codec import bits, integers
from deltactl.codec.bits import (
    Runs,
    SplitSteps,
    changes_between,
    split_steps,
    take_split_steps,
    touch_sum,
)
from deltactl.codec.classes import Classes
from deltactl.codec.ulp import gaps_of
from deltactl.core import native
from deltactl.core.dtypes import FLOATS
from tests.support.adversarial import Bits, special_bits, unsigned
from tests.support.checkpoints import BITS
from tests.support.tools import REQUIRED, need_kernel

LENGTHS = (0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000)
DTYPES = ("I8", "F8_E4M3", "I16", "BF16", "I32", "F32", "I64", "F64")
"""Of every width one with a sign and one without."""

Array = npt.NDArray[Any]


@pytest.fixture(scope="module", autouse=True)
def _needs_the_kernel() -> None:
    need_kernel()


def both(monkeypatch: pytest.MonkeyPatch, call: Any) -> tuple[Any, Any]:
    """What the kernel gives, and what numpy gives."""
    by_kernel = call()
    with monkeypatch.context() as patch:
        patch.setattr(native, "KERNEL", None)
        return by_kernel, call()


def same(a: Any, b: Any) -> bool:
    """Whether two results are the same, down to the dtype of arrays."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)


def unaligned(values: Array) -> Array:
    """The same values an odd number of bytes into memory, as tensors lie in mapped files."""
    memory = np.empty(values.nbytes + 1, np.uint8)
    moved = memory[1:].view(values.dtype)
    moved[:] = values
    assert moved.itemsize == 1 or not moved.size or not moved.flags.aligned
    return moved


def elements(dtype: str, size: int, seed: int = 0) -> Bits:
    """Random bits, and half of them special ones."""
    random = np.random.default_rng([seed, size])
    found = np.frombuffer(random.bytes(size * unsigned(dtype).itemsize), unsigned(dtype)).copy()
    special = random.random(size) < 0.5
    found[special] = random.choice(special_bits(dtype), int(special.sum()))
    return found


def pair(dtype: str, size: int, share: float) -> tuple[Bits, Bits]:
    """Old and new elements, of which about that share differs."""
    old, new = elements(dtype, size), elements(dtype, size, seed=1)
    return old, np.where(np.random.default_rng(size).random(size) < share, new, old)


def changed(dtype: str, size: int, share: float = 0.3) -> tuple[Bits, Bits, Array]:
    """Old and new elements, and where they differ."""
    old, new = pair(dtype, size, share)
    return old, new, np.flatnonzero(old != new)


# That it is there.


def test_the_kernel_is_there() -> None:
    """Where tools are required, as in CI, this fails without it."""
    assert isinstance(need_kernel(), native.Kernel)
    assert need_kernel() is native.KERNEL


def test_a_missing_kernel_fails_where_tools_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "KERNEL", None)
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="kernel"):
        need_kernel()
    monkeypatch.delenv(REQUIRED)
    with pytest.raises(pytest.skip.Exception, match="kernel"):
        need_kernel()


def test_what_cannot_be_loaded_is_as_good_as_missing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    assert native._load() is None
    (tmp_path / native.LIBRARY).write_bytes(b"of another processor")
    assert native._load() is None


def test_a_kernel_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_VERSION", native._VERSION + 1)
    assert native._load() is None


# Loops over elements.


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0, 0.02, 0.5, 1])
def test_compare(dtype: str, size: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = pair(dtype, size, share)
    for place in (np.array, unaligned):
        a, b = place(old), place(new)
        for first, index in ((0, 0), (5, 1 << 40)):
            by_kernel, by_numpy = both(
                monkeypatch, lambda a=a, b=b, f=first, i=index: changes_between(a, b, f, i)
            )
            for name in ("positions", "before", "after", "old_sum", "new_sum"):
                assert same(getattr(by_kernel, name), getattr(by_numpy, name)), name
            assert by_kernel.positions.tolist() == (np.flatnonzero(old != new) + first).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_compare_sees_every_single_change(dtype: str) -> None:
    old = np.zeros(130, unsigned(dtype))
    for at in range(130):
        for bit in range(8 * old.itemsize):
            new = old.copy()
            new[at] = 1 << bit
            assert need_kernel().compare(old, new, 0, 0)[0].tolist() == [at]


@pytest.mark.parametrize("size", [*LENGTHS, bits._PIECE + 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_touch_sum(dtype: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = unaligned(elements(dtype, size))
    at = np.cumsum(np.random.default_rng(size).integers(1, 99, size))
    for index in (0, 1 << 50):
        assert same(*both(monkeypatch, lambda index=index: touch_sum(at, found, index)))


def steps_of(before: Bits, after: Bits, dtype: str) -> tuple[Array, Array, Array]:
    """What ``split_steps`` gives, as one tuple."""
    steps, longer = split_steps(before, after, dtype)
    return steps.down, steps.beyond, longer


@pytest.mark.parametrize("dtype", BITS)
def test_steps(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in LENGTHS:
        old, new, at = changed(dtype, size, 0.7)
        sides = unaligned(old[at]), unaligned(new[at])
        assert same(*both(monkeypatch, lambda sides=sides: steps_of(*sides, dtype)))


@pytest.mark.parametrize("dtype", BITS)
def test_steps_between_every_two_special_patterns(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (side.ravel() for side in np.meshgrid(*[special_bits(dtype)] * 2))
    before, after = a[a != b], b[a != b]
    assert same(*both(monkeypatch, lambda: steps_of(before, after, dtype)))
    steps, _ = split_steps(before, after, dtype)
    assert np.array_equal(moved(before, 0, np.arange(before.size), steps, dtype), after)


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("dtype", BITS)
def test_take_steps(dtype: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, at = changed(dtype, size)
    steps, _ = split_steps(old[at], new[at], dtype)
    for start, stop in ((0, size), (size // 3, size), (size // 2, size // 2)):
        expected = old[start:stop].copy()
        inside = at[(at >= start) & (at < stop)] - start
        expected[inside] = new[start:stop][inside]
        for place in (np.array, unaligned):
            found = both(
                monkeypatch,
                lambda place=place, s=start, e=stop: moved(place(old[s:e]), s, at, steps, dtype),
            )
            assert same(found[0], found[1])
            assert np.array_equal(found[0], expected)


def moved(part: Bits, start: int, at: Array, steps: SplitSteps, dtype: str) -> Bits:
    """A part of a tensor, from ``start`` on, after the steps that lie in it."""
    take_split_steps(part, start, Runs.one(at.astype(np.uint32)), steps, dtype)
    return part


# Gaps and streams.


@pytest.mark.parametrize("size", LENGTHS)
def test_gaps(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(size)
    for widest in (1, 2, 300, (1 << 31) // (size + 1) - 1):
        at = np.cumsum(random.integers(1, widest + 1, size)) - 1
        found = both(monkeypatch, lambda at=at: gaps_of(at))
        assert same(*found)
        assert np.array_equal(np.cumsum(found[0].astype(np.int64) + 1) - 1, at)


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("k", [0, 1, 7, 8, 9, 24, 31])
def test_split_and_join(size: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng([size, k])
    values = random.integers(0, 1 << random.integers(1, 33, size)).astype(np.uint32)
    values[: size // 3] = 0xFFFFFFFF
    assert same(*both(monkeypatch, lambda: integers._split(values, k)))
    planes, high, escapes = need_kernel().split(values, k)
    assert escapes == np.count_nonzero(high == 255)
    by_kernel, by_numpy = both(monkeypatch, lambda: integers._join(planes, high, k))
    assert same(by_kernel, by_numpy)
    small = high < 255
    assert np.array_equal(by_kernel[small], values[small].astype(np.uint64))


@pytest.mark.parametrize("k", [0, 1, 33, 56, 63])
def test_join_of_wide_values(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(k)
    for size in LENGTHS:
        planes = np.frombuffer(random.bytes(k * -(-size // 8) + 1), np.uint8)[1:]
        high = random.integers(0, 256, size).astype(np.uint8)
        assert same(*both(monkeypatch, lambda p=planes, h=high: integers._join(p, h, k)))


# Classes.


@pytest.mark.parametrize("size", [*LENGTHS, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_ranks_and_select(dtype: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltactl.codec.classes._PIECE", 2048)
    random = np.random.default_rng(size)
    found = unaligned(elements(dtype, size))
    active = (random.random(-(-size // 1024)) < 0.7).astype(np.uint8)
    highest = FLOATS[dtype].highest
    for count in (0, 1, 5, min(highest, 255)):
        borders = sorted((1 + random.choice(highest, min(count, highest), replace=False)).tolist())
        classes = Classes(dtype, tuple(borders), active)
        for share in (0.0, 0.05, 1.0):
            is_active = np.repeat(active, 1024)[:size] != 0
            at = np.flatnonzero((random.random(size) < share) & is_active)
            ours, theirs = both(monkeypatch, lambda c=classes, at=at: c.ranks(found, at))
            assert all(map(np.array_equal, ours, theirs))
            ranks, order, counts, totals = ours
            assert np.all(counts <= totals)
            assert totals.sum() == is_active.sum()
            again = both(monkeypatch, lambda c=classes, r=ranks, n=counts: places(c, found, r, n))
            assert same(*again)
            assert np.array_equal(again[0][0], at[order])
            assert np.array_equal(again[0][0][again[0][1]], at)


def places(classes: Classes, bits: Bits, ranks: Array, counts: Array) -> tuple[Array, Array]:
    """What ``select`` makes of a copy of ranks, all of which are there; and their order."""
    found, order = ranks.copy(), np.empty_like(ranks)
    assert classes.select(bits, found, counts, order) == ranks.size
    again = ranks.copy()
    assert classes.select(bits, again, counts) == ranks.size
    assert np.array_equal(found, again)
    return found, order


# Live weights.


def rows_of(elements: Array, positions: Array, values: Array) -> Array:
    """One row of the kernel, as Kernel.holds describes it."""
    at = [array.ctypes.data for array in (elements, positions, values)]
    return np.array([[*at, positions.size, elements.itemsize, positions.itemsize]], np.int64)


@pytest.mark.parametrize("place", [np.array, unaligned])
@pytest.mark.parametrize("wide", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", ["I8", "BF16", "F32", "I64"])
def test_holds_put_and_take(dtype: str, wide: Any, place: Any) -> None:
    kernel, random = need_kernel(), np.random.default_rng(0)
    for size in (1, 9, 1000, 5000):
        live, at = place(elements(dtype, size)), random.permutation(size).astype(wide)
        at = np.ascontiguousarray(at[: max(1, size // 2)])
        before, found = live.copy(), place(np.zeros(at.size, live.dtype))
        kernel.take(rows_of(live, at, found))
        assert np.array_equal(found, before[at])
        assert kernel.holds(rows_of(live, at, found))
        new = place(~found)
        assert not kernel.holds(rows_of(live, at, new))
        kernel.put(rows_of(live, at, new))
        assert kernel.holds(rows_of(live, at, new))
        before[at] = new
        assert np.array_equal(live, before)


def test_holds_sees_one_bit_in_any_place_of_any_row() -> None:
    kernel = need_kernel()
    live = elements("BF16", 3000)
    at = np.arange(0, 3000, 2)
    same, expected = live[at].copy(), live[at].copy()
    rows = np.concatenate([rows_of(live, at, side) for side in (same, expected, same)])
    assert kernel.holds(rows)
    for i in range(at.size):
        expected[i] ^= 1 << (i % 16)
        assert not kernel.holds(rows)
        expected[i] ^= 1 << (i % 16)
    assert kernel.holds(rows)
    assert kernel.holds(rows[:0])


@pytest.mark.parametrize("place", [np.array, unaligned])
@pytest.mark.parametrize("wide", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", ["I8", "BF16", "F32", "I64"])
def test_replace(dtype: str, wide: Any, place: Any) -> None:
    """All of it, or up to a place before the first element that is another."""
    kernel, random = need_kernel(), np.random.default_rng(0)
    for size in (1, 9, 1000, 5000):
        live, at = place(elements(dtype, size)), random.permutation(size).astype(wide)
        at = np.ascontiguousarray(at[: max(1, size // 2)])
        start, old = live.copy(), place(live[at])
        new = place(~old)
        half = at.size // 2
        parts = [slice(0, half), slice(half, at.size)]
        before = np.concatenate([rows_of(live, at[part], old[part]) for part in parts])
        after = np.concatenate([rows_of(live, at[part], new[part]) for part in parts])
        for wrong in {0, half, at.size - 1, int(random.integers(at.size))}:
            live[at[wrong]] ^= 1
            expected = live.copy()
            done = kernel.replace(before, after)
            assert 0 <= done <= wrong
            expected[at[:done]] = new[:done]
            assert np.array_equal(live, expected)
            live[:] = start
        assert kernel.replace(before, after) == at.size
        start[at] = new
        assert np.array_equal(live, start)
        assert kernel.replace(before[:0], after[:0]) == 0


def test_replace_tells_of_a_write_that_is_lost() -> None:
    """Of two writes to one element the second is one to it."""
    kernel, live = need_kernel(), np.zeros(4, np.uint16)
    at = np.array([1, 2, 2], np.int64)
    old, new = np.zeros(3, np.uint16), np.array([5, 6, 7], np.uint16)
    assert kernel.replace(rows_of(live, at, old), rows_of(live, at, new)) == -1


@pytest.mark.parametrize("dtype", ["I8", "BF16", "F32", "I64"])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 1, 4, 3), (1,) * 15 + (2,)])
def test_rectangle(dtype: str, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(len(shape))
    found = unaligned(elements(dtype, 5000))
    for _ in range(5):
        strides, steps = random.integers(1, 300, (2, len(shape)))
        places = np.indices(shape).reshape(len(shape), -1).T
        at, index = places @ strides, places @ steps
        axes = np.array([shape, strides, steps], np.int64)
        start, first = int(random.integers(0, 9)), int(random.integers(0, 1 << 40))
        expected = int(bits.mix64((index + first).astype(np.uint64), found[start + at]).sum())
        assert need_kernel().rectangle(found[start:], axes, first) == expected % (1 << 64)
