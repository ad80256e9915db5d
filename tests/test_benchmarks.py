"""The benchmarks run, and the limits that no clock decides hold, on small checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.limits import memory_rows, size_rows, speed_rows
from tests.support.pairs import write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    a, b = write_pair(tmp_path_factory.mktemp("pair"), 1 << 24)
    return a / "model.safetensors", b / "model.safetensors"


def test_sizes_are_within_their_limits(pair: tuple[Path, Path]) -> None:
    rows = size_rows(*pair)
    assert len(rows) == 3
    assert all(row.reached for row in rows), rows


def test_speed_is_measured_beside_its_peers(pair: tuple[Path, Path]) -> None:
    rows, speed = speed_rows(*pair)
    assert len(rows) == 3
    assert all(row.found > 0 for row in rows)
    assert set(speed) == {"diff", "read both", "read and BLAKE3 both", "TRL's way"}


def test_memory_is_within_its_limits_and_does_not_grow(tmp_path: Path) -> None:
    rows = memory_rows(0.2, tmp_path)  # tensors larger than a block
    assert len(rows) == 12
    assert all(row.reached for row in rows), rows
