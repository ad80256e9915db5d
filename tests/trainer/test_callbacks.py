"""One line in a script with transformers' Trainer, and every step is in the bucket."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from deltactl.bucket.local import LocalBucket
from deltactl.chain.reading import read_chain
from deltactl.core.errors import NotAllowed
from deltactl.demo.tiny_model import quiet
from deltactl.ops.pull import pull
from deltactl.trainer import DeltaCallback, Every
from tests.support.publishing import Bits, MoodyBucket, assert_chain, bits_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACTL_CACHE", str(tmp_path / "cache"))


class Recorder(TrainerCallback):
    """The rounded weights after each step, by the Trainer's own count."""

    def __init__(self) -> None:
        self.bits: dict[int, Bits] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        rounded = {n: t.to(torch.bfloat16) for n, t in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del rounded["lm_head.weight"]
        self.bits[state.global_step] = bits_of(rounded)


def trainer(out: Path, checkpoint: Path, steps: int, *callbacks: TrainerCallback) -> Any:
    """Of float32 masters, with two batches to a step; saves its own checkpoint at every second."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = [{"input_ids": [n + 1] * 8, "labels": [n + 2] * 8} for n in range(32)]
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=2, report_to=[],
        gradient_accumulation_steps=2, learning_rate=1e-5, use_cpu=True, save_steps=2,
        disable_tqdm=True, logging_steps=100,
    )  # fmt: skip
    return Trainer(
        model=model, args=arguments, train_dataset=ids, processing_class=tokenizer,
        callbacks=list(callbacks),
    )  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_a_trainer_publishes_every_step(
    tmp_path: Path, tied: bool, request: pytest.FixtureRequest
) -> None:
    (first, *_) = request.getfixturevalue("trained_chain_tied" if tied else "trained_chain")
    recorder, told = Recorder(), []
    bucket = LocalBucket(tmp_path / "bucket")
    delta = DeltaCallback(
        bucket,
        dtype="bfloat16",
        anchors=Every(2),
        notify=lambda url, step: told.append((url, step)),
    )
    with quiet():
        trainer(tmp_path / "out", first, 3, recorder, delta).train()
    assert sorted(recorder.bits) == [1, 2, 3]
    assert_chain(bucket, recorder.bits, tmp_path)
    assert delta.publisher is not None
    assert [p.training_step for p in delta.publisher.history if p.kind == "delta"] == [2, 3]
    assert told[-1] == (bucket.url, 3)
    pull(bucket, tmp_path / "served")
    with quiet():  # what the anchor brings along is all that a server needs
        served = AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "served")
    assert served.dtype == torch.bfloat16
    assert served.generation_config.do_sample
    assert tokenizer.decode(tokenizer("7 cups")["input_ids"]) == "7 cups"


def test_a_bucket_that_fails_stops_no_training(
    tmp_path: Path, trained_chain: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    bucket = MoodyBucket(tmp_path / "bucket")

    def refuse(name: str) -> None:
        raise NotAllowed("permission denied", file=name)

    bucket.before = refuse
    delta = DeltaCallback(bucket)
    with quiet():
        done = trainer(tmp_path / "out", trained_chain[0], 2, delta)
        assert done.train().global_step == 2
        assert "not everything was published" in caplog.text
        assert delta.publisher is not None and isinstance(delta.publisher.error, NotAllowed)
        bucket.before = lambda name: None
        done.train()  # the same callback, once more
    assert delta.publisher.error is None
    assert read_chain(bucket).steps == [1, 2]


class Breaks(TrainerCallback):
    """Raises in the middle of the third step, once."""

    def __init__(self) -> None:
        self.left = 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and self.left:
            self.left -= 1
            raise ZeroDivisionError


def test_a_training_that_raised_is_ended_by_the_next_one(
    tmp_path: Path, trained_chain: list[Path], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The first has a link for its first step alone: what the second was merged into is not what
    the model is when the next training begins."""
    bucket, gate = MoodyBucket(tmp_path / "bucket"), threading.Event()
    bucket.before = lambda name: assert_true(gate.wait(60))
    delta, recorder = DeltaCallback(bucket, dtype="bfloat16", when_busy="merge"), Recorder()
    with quiet():
        done = trainer(tmp_path / "out", trained_chain[0], 3, Breaks(), recorder, delta)
        with monkeypatch.context() as patch:
            patch.setattr("deltactl.trainer.upload.line.PENDING", 1)
            with pytest.raises(ZeroDivisionError):
                done.train()
        first = recorder.bits[1]
        gate.set()
        done.train()
    assert "1 of the 2 steps of this run are not in the bucket" in caplog.text
    expected = {1: first} | {step + 1: bits for step, bits in recorder.bits.items()}
    assert sorted(expected) == [1, 2, 3, 4]
    assert_chain(bucket, expected, tmp_path)


def assert_true(found: bool) -> None:
    assert found


def test_a_trainer_that_resumes_goes_on_with_the_chain(
    tmp_path: Path, trained_chain: list[Path]
) -> None:
    bucket, recorder = LocalBucket(tmp_path / "bucket"), Recorder()
    with quiet():
        trainer(
            tmp_path / "out", trained_chain[0], 3, recorder, DeltaCallback(bucket, dtype="bfloat16")
        ).train()
        again, delta = Recorder(), DeltaCallback(bucket, dtype="bfloat16")
        second = trainer(tmp_path / "out", trained_chain[0], 4, again, delta)
        second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert sorted(again.bits) == [3, 4]  # the Trainer's third step, once more
    expected = recorder.bits | {step + 1: bits for step, bits in again.bits.items()}
    assert_chain(bucket, expected, tmp_path)
    assert list(read_chain(bucket).anchors) == [1]
