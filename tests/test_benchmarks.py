"""The benchmarks run, and the limits that no clock decides hold, on small checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltactl.bench import catch_up
from deltactl.bench.run import bench
from deltactl.codec import ENCODINGS
from tests.benchmarks.limits import (
    KINDS,
    OURS,
    SIZES,
    kind_rows,
    kinds,
    memory_rows,
    size_rows,
    speed_rows,
)
from tests.benchmarks.sums import live_weights, speed
from tests.benchmarks.transfers import ROWS, ratio


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scratch = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catch_up, "LINKS", (1, 3))
        found = bench(params=1 << 24, rounds=1, scratch=scratch).facts()
    assert list(scratch.iterdir()) == []
    return found


def test_every_encoding_has_a_limit() -> None:
    assert ENCODINGS.keys() <= SIZES.keys()
    assert ENCODINGS.keys() - {"raw", "gap_delta"} <= set(OURS)


def test_sizes_are_within_their_limits(document: dict[str, Any]) -> None:
    """What a header of fixed size adds to so small a delta does not count."""
    rows = size_rows(document)
    assert len(rows) == len(ENCODINGS)
    assert all(row.found <= row.limit + 0.03 for row in rows), rows


def test_speed_is_measured_beside_its_limits(document: dict[str, Any]) -> None:
    rows = speed_rows(document)
    assert len(rows) >= 6
    assert all(row.found > 0 for row in rows)


def test_no_encoding_of_ours_is_worse_than_trls_on_other_checkpoints(tmp_path: Path) -> None:
    found = kinds(1 << 22, tmp_path)
    assert len(found) == len(KINDS)
    assert found[0].changed < 0.005 < 0.02 < found[1].changed < 0.05
    assert found[2].changed > 0.9
    rows = kind_rows(found)
    assert len(rows) >= len(KINDS)
    assert all(row.reached for row in rows), rows


def test_memory_is_within_its_limits_and_does_not_grow(tmp_path: Path) -> None:
    rows = memory_rows(0.2, tmp_path)  # tensors larger than a block
    assert len(rows) == 12
    assert all(row.reached for row in rows), rows


@pytest.mark.parametrize(
    ("theirs", "expected"), [((2, 4, 3, 2, 9), False), ((0.5, 0.9, 3, 0.4, 0.5), True)]
)
def test_transfers_can_show_that_boto3_is_faster(theirs: tuple[float, ...], expected: bool) -> None:
    for row, works in ROWS.items():
        rounds = [dict(zip(works, (1.0, each), strict=True)) for each in theirs]
        found = ratio(rounds, row)
        assert found.slower is expected
        assert found.low <= found.median <= found.high
        assert found.median == sorted(theirs)[2]


def test_what_is_summed_is_all_of_the_live_weights() -> None:
    weights = live_weights(0.001)
    assert sum(mapped.count for mapped in weights.tensors.values()) == sum(
        storage.bits.numel() for storage in weights.storages
    )
    assert speed(0.001, 1) > 0
