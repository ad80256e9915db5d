"""What live weights add up to, of each tensor and of the rest, and what that shows of a map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltactl.codec.bits import touch_sum
from deltactl.vllm.layout.regions import MappedTensor, Region, TensorSpec, region
from deltactl.vllm.layout.weight_map import Storage, WeightMap
from deltactl.vllm.staging.totals import owned_sums, rest_sum
from tests.support.checkpoints import random_tensor
from tests.support.live_ranks import GAP, make_ranks


def storage(size: int, seed: int = 0, *, parameter: bool = True) -> Storage:
    draw = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 15), 1 << 15, (size,), dtype=torch.int16, generator=draw)
    return Storage(f"storage {seed}", bits, parameter)


def bits_of(held: Storage) -> Any:
    return held.bits.numpy().view(np.uint16)


def run(number: int, source: int, offset: int, count: int) -> Region:
    return Region(number, (count,), source, (1,), offset, (1,))


def tensor(name: str, *regions: Region, owned: tuple[int, ...] = ()) -> MappedTensor:
    elements = sum(one.count for one in regions)
    return MappedTensor(TensorSpec(name, "BF16", (elements,)), regions, owned)


def test_a_tensor_is_proven_by_the_bits_that_it_has_and_no_other() -> None:
    held, names = storage(60), ("same", "changed", "unknown", "missing")
    tensors = {name: tensor(name, run(0, 0, 15 * i, 15)) for i, name in enumerate(names)}
    found = WeightMap((held,), tensors, (), {}, set(names), set(names))
    sums = {
        name: touch_sum(np.arange(15), bits_of(held)[15 * i : 15 * i + 15])
        for i, name in enumerate(names)
    }
    bits_of(held)[20] ^= 1
    own = owned_sums(found)
    assert own == {**sums, "changed": own["changed"]}
    assert owned_sums(found, ["same"]) == {"same": sums["same"]}
    del own["missing"], sums["unknown"]
    found.prove(own, sums)
    assert found.unproven == {"changed", "unknown", "missing"}
    assert not found.unmapped
    found.leave_unproven()
    assert list(found.tensors) == ["same"]
    assert set(found.unmapped) == {"changed", "unknown", "missing"}
    found.distrust()
    assert found.unproven == {"same"}


def test_an_owner_counts_for_all_copies_and_each_copy_is_taken_off() -> None:
    held = storage(15)
    bits_of(held)[5:10] = bits_of(held)[:5]
    parts = (run(0, 0, 0, 5), run(0, 0, 5, 5), run(0, 5, 10, 5))
    found = WeightMap((held,), {"t": tensor("t", *parts, owned=(2, 0, 1))}, (), {})
    right = touch_sum(np.arange(10), np.concatenate((bits_of(held)[:5], bits_of(held)[10:])))
    assert owned_sums(found) == {"t": right}
    bits_of(held)[7] ^= 1
    assert owned_sums(found) != {"t": right}


def test_a_copy_on_any_rank_that_differs_shows() -> None:
    shapes = {"rows": (6, 5), "columns": (4, 6), "norm": (7,), "twice": (7,), "turned": (3, 4)}
    states = {name: random_tensor("BF16", shape, 1) for name, shape in shapes.items()}
    ranks = make_ranks(states, 3)

    def total() -> dict[str, int]:
        sums = [owned_sums(rank.map) for rank in ranks]
        return {name: sum(one[name] for one in sums) % (1 << 64) for name in states}

    before = total()
    for rank in ranks:
        for number, memory in enumerate(rank.memory):
            memory[GAP] ^= 1
            names = [
                name
                for name, mapped in rank.map.tensors.items()
                if any(one.storage == number for one in mapped.regions)
            ]
            now = total()
            assert [name for name in now if now[name] != before[name]] == names
            memory[GAP] ^= 1
    assert total() == before


@pytest.mark.parametrize("where", [0, 5, 12, 19])
def test_the_rest_is_what_no_tensor_reaches(where: int) -> None:
    """Elements 5 to 12 of one storage, and nothing of another, are a tensor's."""
    held = (storage(20, 0), storage(7, 1), storage(9, 2, parameter=False))
    found = WeightMap(held, {"t": tensor("t", run(0, 0, 5, 8))}, (), {})
    before = rest_sum(found)
    bits_of(held[0])[where] ^= 4
    assert (rest_sum(found) == before) is (5 <= where <= 12)
    bits_of(held[0])[where] ^= 4
    bits_of(held[2])[3] ^= 4  # a buffer's
    assert rest_sum(found) == before
    bits_of(held[1])[3] ^= 4
    assert rest_sum(found) != before


def test_all_that_is_reached_leaves_no_rest() -> None:
    found = WeightMap((storage(8),), {"t": tensor("t", run(0, 0, 0, 8))}, (), {})
    assert rest_sum(found) == 0


def test_what_lies_in_two_storages_is_not_exchanged_unnoticed() -> None:
    held = (storage(6, 0), storage(6, 1))
    found = WeightMap(held, {}, (), {})
    before = rest_sum(found)
    first = bits_of(held[0]).copy()
    bits_of(held[0])[:], bits_of(held[1])[:] = bits_of(held[1]).copy(), first
    assert rest_sum(found) != before


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_the_rest_does_not_change_with_what_is_written_through_the_map(
    data: st.DataObject,
) -> None:
    """Whichever rectangles of a storage tensors take, in any order of their dimensions."""
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    first, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    n, m = data.draw(st.integers(1, rows - first)), data.draw(st.integers(1, columns - left))
    axes = [(n, m, columns), (m, 1, 1)]
    if data.draw(st.booleans()):
        axes = [(n, 1, columns), (m, n, 1)]
    placed = region(0, 0, first * columns + left, axes)
    assert placed is not None
    held = storage(rows * columns, data.draw(st.integers(0, 9)))
    found = WeightMap((held,), {"t": tensor("t", placed)}, (), {})
    before = rest_sum(found)
    taken = np.zeros((rows, columns), bool)
    taken[first : first + n, left : left + m] = True
    bits_of(held)[taken.ravel()] ^= 0x55
    assert rest_sum(found) == before
    if not taken.all():
        bits_of(held)[np.flatnonzero(~taken.ravel())[0]] ^= 1
        assert rest_sum(found) != before
