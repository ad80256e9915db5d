"""Publishers that nobody closes: what was captured gets into the bucket within a limited time, and
a line says what did not."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.core.errors import Conflict, NotAllowed
from deltactl.ops.verify import verify_bucket
from deltactl.trainer import Publisher
from tests.support.publishing import MoodyBucket, adamw, assert_chain, bits_of, small, update


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))


# The process ends.

BEGINNING = """
import sys, threading
from pathlib import Path
import deltactl.trainer.upload.ending as ending
from deltactl.trainer import Publisher
from tests.support.publishing import MoodyBucket, adamw, small, update

place = Path(sys.argv[1])
bucket = MoodyBucket(place / "bucket")
model = small()
optimizer = adamw(model)
"""

NEVER_CLOSED = """
for step in range(1, 4):
    update(model, optimizer, step)
"""

SLOW = """
def before(name):
    if "step_000003" in name:
        threading.Event().wait(1)  # longer than the interpreter's own end takes
bucket.before = before
publisher = Publisher(model, bucket, optimizer=optimizer)
"""

HANGS = """
ending.PATIENCE = 0.5
reached = threading.Event()
def before(name):
    if name.startswith("deltas"):
        reached.set()
        threading.Event().wait()
bucket.before = before
publisher = Publisher(model, bucket, optimizer=optimizer, when_busy="merge")
update(model, optimizer)
while publisher.last is None:
    threading.Event().wait(0.01)
for step in range(7):
    update(model, optimizer, step)
assert reached.wait(60)
"""


def script(place: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", "".join((BEGINNING, *parts)), str(place)],
        cwd=root, env={**os.environ}, capture_output=True, text=True,
    )  # fmt: skip


def test_what_was_captured_is_put_when_the_process_ends(tmp_path: Path) -> None:
    done = script(tmp_path, SLOW, NEVER_CLOSED)
    assert done.returncode == 0
    assert "a publisher was never closed: what it has captured is put now" in done.stderr
    assert "not in the bucket" not in done.stderr
    bucket = LocalBucket(tmp_path / "bucket")
    assert read_chain(bucket).steps == [1, 2, 3]
    assert verify_bucket(bucket, level="rebuild").ok


def test_a_bucket_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    """Four links wait, and three steps are to be in the next one."""
    done = script(tmp_path, HANGS)
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if "not in the bucket" in line]
    assert line == (
        f"7 of the 8 steps of this run are not in the bucket {tmp_path}/bucket, whose newest is "
        "step 1; the next run goes on from there"
    )
    bucket = LocalBucket(tmp_path / "bucket")
    assert verify_bucket(bucket, level="rebuild").ok


TRAINER = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from deltactl.trainer import DeltaCallback
from tests.trainer.test_callbacks import trainer

class Breaks(TrainerCallback):
    def on_step_begin(self, args, state, control, **others):
        if state.global_step == 2:
            raise ZeroDivisionError("in the middle of training")

place = Path(sys.argv[1])
trainer(place / "out", Path(sys.argv[2]), 5, DeltaCallback(place / "bucket"), Breaks()).train()
"""


def test_a_trainer_whose_training_raises(tmp_path: Path, trained_chain: list[Path]) -> None:
    """Its callback is not told that training has ended."""
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, str(tmp_path), str(trained_chain[0])],
        cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert "ZeroDivisionError: in the middle of training" in done.stderr
    assert "a publisher was never closed" in done.stderr
    bucket = LocalBucket(tmp_path / "bucket")
    assert read_chain(bucket).steps == [1, 2]
    assert verify_bucket(bucket, level="rebuild").ok


def test_a_training_that_raises_is_not_kept_by_a_bucket_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltactl.trainer.upload.ending.PATIENCE", 0.2)
    bucket, gate, model = MoodyBucket(tmp_path / "bucket"), threading.Event(), small()
    bucket.before = lambda name: void(gate.wait(60)) if name.startswith("deltas") else None
    expected = {}

    def training() -> None:
        with Publisher(model, bucket, scratch=tmp_path / "scratch") as publisher:
            for step in (1, 2):
                model[0].weight.data[0, 0] += 1
                publisher.publish()
                expected[step] = bits_of(model.state_dict())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training()
    assert "of the 2 steps of this run are not in the bucket" in caplog.text
    with pytest.raises(Conflict, match="another publisher"):  # it is not over yet
        Publisher(model, bucket, scratch=tmp_path / "scratch")
    gate.set()
    join_endings()
    assert_chain(bucket, expected, tmp_path)


def join_endings() -> None:
    for thread in threading.enumerate():
        if thread.name == "deltactl-ending":
            thread.join()


# The publisher is gone, and the process goes on.


def test_a_publisher_that_is_collected_is_ended_in_the_background(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, scratch = MoodyBucket(tmp_path / "bucket"), tmp_path / "scratch"
    opened = threading.Event()
    bucket.before = lambda name: None if name.startswith("anchors") else void(opened.wait(60))
    model = small()
    optimizer = adamw(model)
    expected = {}
    publisher = Publisher(model, bucket, optimizer=optimizer, scratch=scratch)
    line = publisher._line
    assert line is not None
    for step in (1, 2, 3):
        update(model, optimizer, step)
        expected[step] = bits_of(model.state_dict())
    del publisher, optimizer
    gc.collect()
    assert "a publisher was never closed" in caplog.text
    opened.set()
    join_endings()
    assert line.taken == 3 and "not in the bucket" not in caplog.text
    assert_chain(bucket, expected, tmp_path)
    with Publisher(model, bucket, scratch=scratch) as again:  # the directory is free
        again.publish()
    assert again.error is None


def void(_: object) -> None:
    return None


# It is closed, and yet not all is there.


def test_closing_says_how_many_steps_are_not_in_the_bucket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, model = MoodyBucket(tmp_path / "bucket"), small()
    publisher = Publisher(model, bucket)
    publisher.publish()
    publisher._await_encoding()

    def refuse(name: str) -> None:
        if name.startswith("deltas"):
            raise NotAllowed("permission denied", file=name)

    bucket.before = refuse
    publisher.publish()
    publisher.publish()
    with pytest.raises(NotAllowed):
        publisher.close()
    (record,) = [r for r in caplog.records if "not in the bucket" in r.getMessage()]
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("2 of the 3 steps of this run are not in the bucket")
