"""Processes that training forks, such as a DataLoader's workers, have no part in its publisher."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.core.errors import Conflict
from deltactl.trainer import Publisher
from tests.support.publishing import adamw, assert_chain, bits_of, small, update


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch"


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((24,), float(index)).bfloat16()


def test_a_worker_that_lives_on_holds_no_lock(tmp_path: Path, scratch: Path) -> None:
    model = small()
    with Publisher(model, tmp_path / "bucket", scratch=scratch) as publisher:
        loader = DataLoader(
            Numbers(), num_workers=1, persistent_workers=True, multiprocessing_context="fork"
        )
        batches = iter(loader)
        next(batches)
        publisher.publish()
    with Publisher(model, tmp_path / "bucket", scratch=scratch) as publisher:
        publisher.publish()
        assert len(list(batches)) == 3  # the worker is there yet
    assert read_chain(LocalBucket(tmp_path / "bucket")).steps == [1, 2]


def child(work: object) -> int:
    """The exit status of a child that does it."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        work()  # type: ignore[operator]
        status = 0
    finally:
        os._exit(status)


def test_a_child_publishes_nothing_and_takes_nothing_away(
    tmp_path: Path, scratch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bucket = LocalBucket(tmp_path / "bucket")
    publisher = Publisher(model, bucket, optimizer=optimizer, scratch=scratch)

    def work() -> None:
        logging.getLogger("deltactl.trainer").addHandler(logging.StreamHandler(sys.stderr))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        publisher.publish()
        with publisher:
            publisher.publish()
        publisher.close()

    assert child(work) == 0
    told = capfd.readouterr().err.splitlines()
    assert told == ["nothing is published by a process that was forked from the publisher's"]
    with pytest.raises(Conflict, match="another publisher"):
        Publisher(model, bucket, scratch=scratch)  # the lock is the parent's as before
    expected = {}
    with publisher:
        for step in (1, 2):
            update(model, optimizer, step)
            expected[step] = bits_of(model.state_dict())
    assert_chain(bucket, expected, tmp_path)


ABANDONED = """
import os, signal, sys
from deltactl.trainer import Publisher
from tests.support.publishing import small

publisher = Publisher(small(), sys.argv[1] + "/bucket", scratch=sys.argv[1] + "/scratch")
pid = os.fork()
if pid:
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
os.close(1)
signal.pause()
"""


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[None]:
    """A child whose parent, a publisher, was killed."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", ABANDONED, str(tmp_path)]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    yield
    os.kill(int(done.stdout), signal.SIGKILL)


def test_a_child_that_outlives_a_killed_publisher_holds_no_lock(
    tmp_path: Path, scratch: Path, orphan: None
) -> None:
    model = small()
    with Publisher(model, tmp_path / "bucket", optimizer=adamw(model), scratch=scratch) as again:
        again.publish()
    assert again.error is None
