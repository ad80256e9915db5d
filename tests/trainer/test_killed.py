"""A trainer killed at any moment leaves a chain that the next one goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.ops.verify import verify_bucket
from tests.support.killed_trainer import kills


@pytest.mark.parametrize("seed", range(5))
def test_ten_trainers_killed_one_after_the_other(tmp_path: Path, seed: int) -> None:
    """Fifty in all. After each the chain verifies at level data, in the other process, and in the
    end at level rebuild: links are never written anew."""
    assert kills(tmp_path, 10, seed) == []
    bucket = LocalBucket(tmp_path / "bucket")
    report = verify_bucket(bucket, level="rebuild")
    assert report.ok, report.errors
    chain = read_chain(bucket)
    assert not chain.problems
    assert sorted(chain.deltas) == chain.steps[1:]  # every run went on, none began anew
    assert len(chain.steps) > 10
    trained = (tmp_path / "states").read_text().split()
    published = [chain.state_at(step) for step in chain.steps]
    assert set(published) <= set(trained)
    assert published[-4:] == trained[-4:]  # of the run that came to its end
