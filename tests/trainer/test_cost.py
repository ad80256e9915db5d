"""What publishing costs, as far as no clock decides it: the measurement runs, and memory is as
said."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.training import DISK, MEMORY, PLAIN, TRL, run

MEGA = 1_000_000


def test_a_mirror_is_one_copy_and_on_the_disk_none(tmp_path: Path) -> None:
    params = 24 << 20
    found = run(params, steps=2, rounds=1, where=tmp_path)
    assert all(row["step"] > 0 for row in found.values())
    assert found[TRL]["changed"] == found[MEMORY]["changed"] == found[DISK]["changed"] > 0
    over = {way: row["peak"] - found[PLAIN]["peak"] for way, row in found.items()}
    copy = 2 * params
    assert over[MEMORY] - over[DISK] > copy / 2
    assert over[MEMORY] < copy + 120 * MEGA
    assert list(tmp_path.iterdir()) == []
