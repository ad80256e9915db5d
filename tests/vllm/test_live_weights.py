"""Operations on live bits: the kernel and torch's operations, the same bits and sums."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltactl.codec import bits as codec_bits
from deltactl.core import native
from deltactl.core.errors import DeltactlError
from deltactl.vllm.layout.regions import MappedTensor, Region, TensorSpec, pieces, region
from deltactl.vllm.layout.weight_map import Storage
from deltactl.vllm.staging import live_weights
from deltactl.vllm.staging.live_weights import Patch, Patches
from tests.support.tools import need_kernel

DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once by the kernel, in several shares, and once as on a device that is no CPU."""
    if request.param == "kernel":
        need_kernel()
        monkeypatch.setattr(live_weights, "_LEAST", 3)
        monkeypatch.setattr(live_weights, "_threads", lambda: 3)
    else:
        monkeypatch.setattr(native, "KERNEL", None)
        monkeypatch.setattr(live_weights, "_PIECE", 5)
    return str(request.param)


def storage(width: int, count: int, seed: int = 0, name: str = "p") -> Storage:
    draw = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (count * width,), dtype=torch.uint8, generator=draw)
    return Storage(name, data.view(DTYPES[width]))


def bits(held: Storage) -> Any:
    return held.bits.numpy().view(f"<u{held.bits.itemsize}")


def some(count: int, k: int, seed: int = 0) -> Any:
    """``k`` positions below ``count`` in any order, no two the same."""
    return np.random.default_rng(seed).permutation(count)[:k].astype(np.int64)


CASES = pytest.mark.parametrize(
    ("width", "count", "k"),
    [(w, n, k) for w in DTYPES for n, k in ((1, 1), (40, 0), (40, 7), (500, 499), (500, 500))],
)


@CASES
@pytest.mark.parametrize("wide", [False, True])
def test_gather_scatter_and_equal(width: int, count: int, k: int, wide: bool, way: str) -> None:
    held, at = storage(width, count), some(count, k)
    positions = torch.from_numpy(at) if wide else live_weights.positions_in(held, at)
    assert positions.dtype is (torch.int64 if wide else torch.int32)
    expected = bits(held).copy()
    old = live_weights.gather(held, positions)
    assert np.array_equal(live_weights._numpy(old), expected[at])
    assert live_weights.equal(held, positions, old)
    new = ~old
    live_weights.scatter(held, positions, new)
    expected[at] = ~expected[at]
    assert np.array_equal(bits(held), expected)
    assert live_weights.equal(held, positions, new)
    assert live_weights.equal(held, positions, old) is (k == 0)


@pytest.mark.parametrize("width", DTYPES)
def test_equal_sees_any_single_bit(width: int, way: str) -> None:
    held = storage(width, 50)
    at = np.arange(0, 50, 3)
    positions = live_weights.positions_in(held, at)
    old = live_weights.to_device(held, bits(held)[at])
    patches = Patches([Patch(held, positions, old, ~old)])
    for element in at:
        for bit in range(8 * width):
            bits(held)[element] ^= bits(held).dtype.type(1 << bit)
            assert not live_weights.equal(held, positions, old)
            assert not patches.is_old()
            bits(held)[element] ^= bits(held).dtype.type(1 << bit)
    assert patches.is_old()


@settings(max_examples=60)
@given(data=st.data())
def test_patches_over_many_storages(data: st.DataObject) -> None:
    """Whatever the storages and however they are shared out: all is written, and all taken back."""
    ways = [True, False] if native.KERNEL is not None else [False]
    seed = data.draw(st.integers(0, 1 << 20))
    sizes = data.draw(st.lists(st.tuples(st.sampled_from(list(DTYPES)), st.integers(1, 300))))
    share, threads = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 4))
    wide = data.draw(st.booleans())
    for by_kernel in ways:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live_weights, "_LEAST", share)
            patch.setattr(live_weights, "_threads", lambda: threads)
            if not by_kernel:
                patch.setattr(native, "KERNEL", None)
            _write_and_take_back([storage(w, n, seed + n) for w, n in sizes], seed, wide)


def _write_and_take_back(held: list[Storage], seed: int, wide: bool) -> None:
    random = np.random.default_rng(seed)
    before = [bits(one).copy() for one in held]
    patches, after = [], [one.copy() for one in before]
    for one, expected in zip(held, after, strict=True):
        at = some(expected.size, random.integers(0, expected.size + 1), seed)
        new = expected[at] ^ random.integers(1, 256, at.size).astype(expected.dtype)
        positions = torch.from_numpy(at) if wide else live_weights.positions_in(one, at)
        old = live_weights.gather(one, positions)
        patches.append(Patch(one, positions, old, live_weights.to_device(one, new)))
        expected[at] = new
    made = Patches(patches)
    some_change = any(len(patch.positions) for patch in patches)
    assert made.elements == sum(len(patch.positions) for patch in patches)
    assert made.is_old()
    assert made.is_new() is not some_change
    assert made.replace()
    assert all(map(np.array_equal, map(bits, held), after))
    assert made.is_new()
    assert made.is_old() is not some_change
    made.write_old()
    assert all(map(np.array_equal, map(bits, held), before))
    assert made.is_old()


@pytest.mark.parametrize("share", [1, 3, 1 << 14])
@pytest.mark.parametrize("wrong", range(3000, 5000, 401))
def test_where_one_bit_is_another_all_stays_as_it_is(
    wrong: int, share: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what was replaced before that was seen, by whichever thread."""
    monkeypatch.setattr(live_weights, "_LEAST", share)
    monkeypatch.setattr(live_weights, "_threads", lambda: 3)
    held = [storage(2, 9000, 1), storage(4, 3000, 2)]
    made = []
    for one in held:
        at = live_weights.positions_in(one, np.arange(0, len(bits(one)), 2))
        old = live_weights.gather(one, at)
        made.append(Patch(one, at, old, ~old))
    patches = Patches(made)
    bits(held[0])[2 * (wrong // 2)] ^= 1
    before = [bits(one).copy() for one in held]
    assert not patches.replace()
    assert all(map(np.array_equal, map(bits, held), before))
    bits(held[0])[2 * (wrong // 2)] ^= 1
    assert patches.replace()
    assert patches.is_new()


def test_a_write_that_is_lost_is_told(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = storage(2, 20)
    at = live_weights.positions_in(held, np.arange(0, 20, 4))
    old = live_weights.gather(held, at)
    patches = Patches([Patch(held, at, old, ~old)])
    monkeypatch.setattr(native.Kernel, "replace", lambda *_: -1)
    monkeypatch.setattr(Patches, "_put", lambda *_: None)
    with pytest.raises(DeltactlError, match="did not read back"):
        patches.replace()


def test_what_is_held_for_patches_is_counted(way: str) -> None:
    held = storage(2, 100)
    at = live_weights.positions_in(held, np.arange(10))
    old = live_weights.gather(held, at)
    assert Patches([Patch(held, at, old, old)]).nbytes == 10 * (4 + 2 + 2)


def _patch_with(held: Storage, **other: torch.Tensor) -> Patch:
    at = torch.tensor([1, 2], dtype=torch.int32)
    parts = {"positions": at, "old": held.bits[:2].clone(), "new": held.bits[:2].clone(), **other}
    return Patch(held, **parts)


UNFIT: dict[str, dict[str, torch.Tensor]] = {
    "outside": {"positions": torch.tensor([1, 10], dtype=torch.int32)},
    "below": {"positions": torch.tensor([-1, 2])},
    "short": {"new": torch.zeros(1, dtype=torch.int16)},
    "other width": {"old": torch.zeros(2, dtype=torch.int32)},
    "float": {"new": torch.zeros(2, dtype=torch.bfloat16)},
    "short positions": {"positions": torch.tensor([1, 2], dtype=torch.int16)},
    "apart": {"old": torch.zeros(4, dtype=torch.int16)[::2]},
    "positions apart": {"positions": torch.tensor([1, 0, 2, 0])[::2]},
    "elsewhere": {"new": torch.zeros(2, dtype=torch.int16, device="meta")},
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_refused_before_anything_is_read_or_written(
    case: str, way: str
) -> None:
    held = storage(2, 10)
    before = bits(held).copy()
    with pytest.raises(ValueError, match=r"^p: "):
        Patches([_patch_with(held), _patch_with(held, **UNFIT[case])])
    one = _patch_with(held, **UNFIT[case])
    sides = (one.new,) if "new" in UNFIT[case] else (one.old,)
    calls: list[Callable[[], object]] = []
    calls.append(lambda: live_weights.scatter(held, one.positions, sides[0]))
    calls.append(lambda: live_weights.equal(held, one.positions, sides[0]))
    if "positions" in UNFIT[case]:
        calls.append(lambda: live_weights.gather(held, one.positions))
    for call in calls:
        with pytest.raises(ValueError, match=r"^p: "):
            call()
    assert np.array_equal(bits(held), before)


def test_positions_are_int32_where_the_storage_allows() -> None:
    held = Storage("p", torch.empty(1, dtype=torch.uint8).expand(1 << 31))
    assert live_weights.positions_in(held, np.array([0])).dtype is torch.int64
    held = Storage("p", torch.empty(1, dtype=torch.uint8).expand((1 << 31) - 1))
    assert live_weights.positions_in(held, np.array([0])).dtype is torch.int32


# Sums.


@pytest.mark.parametrize("width", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 1000])
def test_touch_sum_is_the_cores(width: int, count: int, way: str) -> None:
    found = storage(width, count).bits
    at = np.sort(some(5000, count)) * ((1 << 40) if width == 8 else 1)
    expected = codec_bits.touch_sum(at, live_weights._numpy(found))
    assert live_weights.touch_sum(torch.from_numpy(at), found) == expected
    if width < 8:
        assert live_weights.touch_sum(torch.from_numpy(at.astype(np.int32)), found) == expected


def rectangles() -> st.SearchStrategy[tuple[Region, int, int]]:
    """A region, and how many elements the storage and the checkpoint tensor have."""

    @st.composite
    def make(draw: st.DrawFn) -> tuple[Region, int, int]:
        shape = draw(st.lists(st.integers(1, 6), min_size=0, max_size=4))
        source, target = (_strides(draw, shape) for _ in range(2))
        starts = draw(st.integers(0, 9)), draw(st.integers(0, 9))
        made = region(0, *starts, list(zip(shape, source, target, strict=True)))
        assert made is not None
        reach = [
            sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + start + 1
            for strides, start in ((target, starts[1]), (source, starts[0]))
        ]
        return made, reach[0] + draw(st.integers(0, 5)), reach[1] + draw(st.integers(0, 5))

    return make()


def _strides(draw: st.DrawFn, shape: list[int]) -> list[int]:
    """Strides of a tensor with its dimensions in some order, and gaps between its parts."""
    strides, unit = [0] * len(shape), draw(st.integers(1, 3))
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = unit
        unit *= shape[axis] + draw(st.integers(0, 2))
    return strides


@settings(max_examples=150)
@given(made=rectangles(), width=st.sampled_from(list(DTYPES)), most=st.integers(1, 50))
def test_regions_are_summed_read_and_written_as_they_lie(
    made: tuple[Region, int, int], width: int, most: int
) -> None:
    found, live_size, whole_size = made
    for by_kernel in [True, False] if native.KERNEL is not None else [False]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live_weights, "_PIECE", most)
            patch.setattr(live_weights, "_LEAST", most)
            patch.setattr(live_weights, "_threads", lambda: 2)
            if not by_kernel:
                patch.setattr(native, "KERNEL", None)
            _sum_read_and_write(found, storage(width, live_size), whole_size, most)


def _sum_read_and_write(found: Region, held: Storage, whole_size: int, most: int) -> None:
    source, target = _places(found)
    assert len(set(source)) == len(set(target)) == found.count
    parts = list(pieces(found, most))
    assert [place for part in parts for place in zip(*_places(part), strict=True)] == list(
        zip(source, target, strict=True)
    )
    assert all(part.count <= most for part in parts)

    order = np.argsort(source)
    at = np.array(source)[order]
    expected = codec_bits.touch_sum(at, bits(held)[np.array(target)[order]])
    assert live_weights.region_sum(held, found) == expected

    out = np.zeros(whole_size, bits(held).dtype)
    live_weights.read_region(held, found, out)
    should = np.zeros_like(out)
    should[source] = bits(held)[target]
    assert np.array_equal(out, should)

    new = ~should
    new.setflags(write=False)  # as what is mapped from a file
    after = bits(held).copy()
    after[target] = new[source]
    live_weights.write_region(held, found, new)
    assert np.array_equal(bits(held), after)

    mapped = MappedTensor(TensorSpec("t", "U8", (whole_size,)), (found,))
    (located,) = mapped.locate(np.arange(whole_size))
    places = dict(zip(source, target, strict=True))
    chosen = np.arange(whole_size)[located.chosen]
    assert chosen.tolist() == sorted(source)
    assert located.positions.tolist() == [places[i] for i in chosen]
    if chosen.size > 1:
        (located,) = mapped.locate(chosen[::2])
        assert located.positions.tolist() == [places[i] for i in chosen[::2]]
    missing = np.setdiff1d(np.arange(whole_size), chosen)
    assert mapped.locate(missing) == []


def _places(found: Region) -> tuple[list[int], list[int]]:
    """Source and runtime position of each element."""
    index = np.indices(found.shape).reshape(len(found.shape), -1).T
    source = index @ np.array(found.source_strides) + found.source_offset
    return source.tolist(), (index @ np.array(found.strides) + found.offset).tolist()


def test_a_long_region_is_summed_in_shares_of_no_more_than_a_few_rows(way: str) -> None:
    held = storage(2, 4096)
    whole = Region(0, (4096,), 7, (1,), 0, (1,))
    expected = codec_bits.touch_sum(np.arange(7, 4103), bits(held))
    assert live_weights.region_sum(held, whole) == expected


def test_threads_that_ask_at_once_do_not_wait_for_each_other_for_ever(way: str) -> None:
    held = storage(2, 5000)
    whole = Region(0, (5000,), 0, (1,), 0, (1,))
    sums: list[int] = []
    threads = [
        threading.Thread(target=lambda: sums.append(live_weights.region_sum(held, whole)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [codec_bits.touch_sum(np.arange(5000), bits(held))] * 6
