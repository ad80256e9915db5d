"""Runs of two and four ranks: every step in the bucket, bit for bit, and nobody has the model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.ops.pull import pull
from deltactl.ops.verify import verify_bucket
from tests.support.publishing import assert_chain, rebuilt
from tests.support.ranked import Ranks, noted

TWO_AND_FOUR = [
    ("fsdp", 2), ("fsdp", 4), ("masters", 2), ("masters", 4), ("ddp", 2), ("ddp", 4),
    ("placements", 2), ("placements", 4), ("hsdp", 4), ("tensor_parallel", 4), ("fsdp", 1),
    ("callback", 2), ("share", 4),
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as ranks:
        yield ranks


@pytest.mark.parametrize(("scenario", "count"), TWO_AND_FOUR)
def test_every_step_is_the_models_whole_state(
    ranks: Ranks, tmp_path: Path, scenario: str, count: int
) -> None:
    expected = ranks(tmp_path, scenario, count)
    bucket = LocalBucket(tmp_path / "bucket")
    assert_chain(bucket, expected, tmp_path)
    chain = read_chain(bucket)
    assert chain.steps == list(range(1, len(expected) + 1))
    assert sorted(chain.deltas) == chain.steps[1:]
    for link in chain.links:  # a file of each rank, and the index
        assert len(link.objects) == count + 1
    assert len(chain.anchors) > 1 or len(expected) < 5


def test_another_model_enters_only_where_it_is_meant(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks(tmp_path, "another_model", 2)
    bucket = LocalBucket(tmp_path / "bucket")
    assert_chain(bucket, expected, tmp_path)
    assert sorted(read_chain(bucket).anchors) == [1, 3]


def test_what_each_rank_writes_is_about_as_much(ranks: Ranks, tmp_path: Path) -> None:
    ranks(tmp_path, "fsdp", 2)
    anchor = read_chain(LocalBucket(tmp_path / "bucket")).anchors[1]
    sizes = [item.size for item in anchor.objects if item.name.endswith(".safetensors")]
    largest_tensor = 13 * 30 * 2
    assert max(sizes) - min(sizes) <= largest_tensor


def test_an_anchor_is_a_checkpoint_that_can_be_served(ranks: Ranks, tmp_path: Path) -> None:
    """Its shards say what transformers asks of them, and pull does not take over their tables."""
    from safetensors import safe_open

    ranks(tmp_path, "fsdp", 2)
    place = tmp_path / "bucket/anchors/step_000001"
    shards = sorted(place.glob("*.safetensors"))
    assert len(shards) == 2
    pull(LocalBucket(tmp_path / "bucket"), tmp_path / "out", step=1)
    for shard in shards:
        with safe_open(shard, framework="np") as file:
            assert file.metadata()["format"] == "pt"
        with safe_open(tmp_path / "out" / shard.name, framework="np") as file:
            assert file.metadata() == {"format": "pt"}


def test_another_number_of_ranks_goes_on_with_the_chain(ranks: Ranks, tmp_path: Path) -> None:
    """The second run has a tensor more, which the third has not any more."""
    for seed, count in enumerate((2, 4, 1, 2)):
        expected = ranks(tmp_path, "goes_on", count, seed)
    bucket = LocalBucket(tmp_path / "bucket")
    assert sorted(expected) == list(range(1, 13))
    assert_chain(bucket, expected, tmp_path)
    chain = read_chain(bucket)
    assert sorted(chain.deltas) == chain.steps[1:]
    kinds = {
        step: {record.kind for record in chain.deltas[step].header.records.values()}  # type: ignore[union-attr]
        for step in (4, 7)
    }
    assert "added" in kinds[4]
    assert "removed" in kinds[7]


@pytest.mark.parametrize("seed", [0, 1])
def test_what_one_rank_cannot_do_is_done_by_all_in_the_next_link(
    ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    expected = ranks(tmp_path, "fails", 2, seed)
    bucket = LocalBucket(tmp_path / "bucket")
    assert len(expected) == 5
    assert verify_bucket(bucket, level="rebuild").ok
    for step, bits in expected.items():
        assert rebuilt(bucket, step, tmp_path / f"rebuilt-{step}") == bits, step


def test_when_one_rank_gives_up_all_do(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks(tmp_path, "gives_up", 2)
    bucket = LocalBucket(tmp_path / "bucket")
    assert sorted(expected) == [1, 2]
    assert_chain(bucket, expected, tmp_path)


def test_one_rank_is_killed_and_the_next_run_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    """At random moments, six times, in runs of two and four ranks."""
    ranks.kills(tmp_path, 6)
    bucket = LocalBucket(tmp_path / "bucket")
    killed = read_chain(bucket).steps
    assert len(killed) > 2
    expected = ranks(tmp_path, "goes_on", 2, seed=10)
    chain = read_chain(bucket)
    assert not chain.problems
    assert sorted(chain.deltas) == chain.steps[1:]  # no run began anew
    assert verify_bucket(bucket, level="rebuild").ok
    assert {chain.state_at(step) for step in killed} <= set(
        (tmp_path / "states").read_text().split()
    )
    for step, as_noted in zip(chain.steps[-3:], sorted(expected), strict=True):
        assert rebuilt(bucket, step, tmp_path / f"rebuilt-{step}") == expected[as_noted]


TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from deltactl.trainer import Publisher
from tests.support.ranked import Run, uneven
from pathlib import Path

dist.init_process_group("gloo")
run = Run(Path(sys.argv[1]), dist.get_rank(), dist.get_world_size(), 0)
model = uneven()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with Publisher(model, sys.argv[1] + "/bucket", optimizer=optimizer):
    for step in range(1, 4):
        run.train(model, optimizer, step)
        run.note(model, step)
dist.destroy_process_group()
"""


def test_a_script_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "DELTACTL_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert_chain(LocalBucket(tmp_path / "bucket"), noted(tmp_path), tmp_path)
