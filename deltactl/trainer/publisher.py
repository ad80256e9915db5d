"""Publishes every optimizer step of a training run as the next link of a chain."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import torch

from deltactl.chain.anchor_policy import AnchorPolicy, Every
from deltactl.chain.store import Bucket
from deltactl.codec import DEFAULT, encoding_named
from deltactl.trainer.capture.capture import Capturer
from deltactl.trainer.capture.mirror import MEMORY, Mirror
from deltactl.trainer.model.gate import Gate
from deltactl.trainer.model.masters import Masters
from deltactl.trainer.model.names import Names, Naming, unwrapped
from deltactl.trainer.model.optimizers import Given
from deltactl.trainer.model.tensors import Live, check_not_empty, check_view, live_tensors
from deltactl.trainer.upload.account import Notify
from deltactl.trainer.upload.aux_files import Files, collect
from deltactl.trainer.upload.line import Captured, Line
from deltactl.trainer.upload.local_base import LocalBase
from deltactl.trainer.upload.put import check_writable, opened
from deltactl.trainer.upload.resume import Begin, begin
from deltactl.trainer.upload.scratch import emptied, scratch_directory
from deltactl.trainer.upload.stepping import Stepping
from deltactl.trainer.upload.waiting import PATIENTLY, Waiting


class Publisher(Stepping[Line]):
    """Publishes a model's weights, step by step, into a bucket::

        with Publisher(model, "s3://bucket/run", optimizer=optimizer):
            ...  # the training loop as it is

    With an ``optimizer`` every call of its ``step`` that steps is published; without one, and for
    what else should be, ``publish`` is called. Training waits only while what changed is taken from
    the weights; encoding and uploading go on beside it.

    The chain in the bucket is gone on with from its tip, whatever became of the run that made it:
    the first link then holds what the model differs by. An empty bucket, and a chain that cannot be
    proven, get an anchor first. A link is only put once the one before it is confirmed. One that
    fails is tried again, for as long as the run goes on; a step that could not even be encoded is
    part of the next link. What is known to have failed, and not yet been made good, is ``error``.

    ``model``: may be wrapped by torch.compile, DistributedDataParallel, Accelerate; of several
    ranks that hold the same weights only rank 0 publishes.

    ``bucket``: a bucket's address, or a Bucket.

    ``step``: the training step that the model is at; the next one is one more. By default that of
    the chain's tip. A chain's steps only rise: where training went on from an earlier step than the
    chain has got to, its steps are published under numbers from the tip on, and that is logged;
    ``Publication.training_step`` has the trainer's own.

    ``encoding``: of the deltas, see ``deltactl push``. ``anchors``: when a step gets an anchor
    beside its delta.

    ``optimizer``: one, or a list of several in the order in which they step, such as Muon beside
    AdamW; then the weights are published when the last one has stepped.

    ``when_busy``: what to do while several links wait for the bucket. "wait": training waits until
    one is confirmed, as long as waiting may help, and says so. "merge": steps get no link of their
    own, and the next link holds all changes since the last. ``max_wait``: seconds after which
    "wait" becomes "merge", until the bucket has taken a link.

    ``files``: what travels with anchors so that they can be served: a directory, of which
    everything but weights is taken, or a tokenizer, saved beside the model's config.

    ``names``: from the model's names to the checkpoint's, where those are not what a Hugging Face
    model's ``save_pretrained`` writes.

    ``dtype``: "bfloat16" to publish float32 masters rounded to it.

    ``scratch``: a directory of this publisher's own on a local disk, kept from run to run, by
    default below the cache. It holds the newest local anchor, another while that is made, and as
    much of deltas: up to three times a checkpoint.

    ``mirror``: where the copy of what was last captured is, as large as a checkpoint: in "memory",
    or on the "disk", in ``scratch``.

    ``notify``: called with the bucket's URL and the step once a step is confirmed, on a thread of
    its own; of steps that are confirmed meanwhile it is only told the newest. What it raises is
    logged.

    ``allow_other_model``: let another model follow on the chain's tip, with an anchor; else a chain
    is of one model, see ``deltactl push``. Smaller changes, such as a new head, are logged.

    A publisher that is never closed is when the process ends: what was captured is put then, for up
    to a minute, and it is logged how many steps are not in the bucket.

    Raises UsageError; Unsupported for a model whose weights cannot be published as it holds them
    (FSDP1, DeepSpeed's ZeRO stage 3, adapters of PEFT), on every rank alike; NotAllowed for a
    directory that cannot be written; Conflict where the bucket holds another model's chain, or
    another publisher of this machine has ``scratch``; and what the bucket raises.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        bucket: str | os.PathLike[str] | Bucket,
        *,
        optimizer: Given | None = None,
        step: int | None = None,
        encoding: str = DEFAULT,
        anchors: AnchorPolicy = Every(),  # noqa: B008 - frozen
        when_busy: Literal["wait", "merge"] = "wait",
        max_wait: float | None = None,
        files: Files | None = None,
        names: Names | None = None,
        dtype: Literal["bfloat16"] | None = None,
        scratch: str | os.PathLike[str] | None = None,
        mirror: Literal["memory", "disk"] = MEMORY,
        notify: Notify | None = None,
        allow_other_model: bool = False,
    ) -> None:
        encoding_named(encoding)
        check_view(dtype)
        super().__init__(optimizer, step, when_busy, max_wait)
        self._model, self._dtype = unwrapped(model), dtype
        self._naming = Naming(model, names)
        self._encoding: tuple[Captured, Future[bool]] | None = None
        live = self._live()
        if not _is_first_rank():
            self._watch()
            return
        to = opened(bucket)
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(scratch_directory(scratch, to.url))
            held = Mirror(mirror, place)
            stack.callback(held.close)
            start = begin(to, place / "base", held)
            aux = collect(self._model, files, dtype, place / "files")
            self._gate = Gate(to.url, aux, allow=allow_other_model)
            if self._gate.admit(start.model, start.step, live):
                held.tensors.clear()
                start = Begin(start.newest)
            check_writable(to)
            base = LocalBase(place / "base", aux)
            self._newest = start.newest
            if step is None and start.step is not None:
                self._training = start.step
            self._capturer = Capturer(held)
            stack.callback(self._capturer.close)
            self._encoder = ThreadPoolExecutor(1, thread_name_prefix="deltactl-encode")
            stack.callback(self._encoder.shutdown)
            line = Line(
                to,
                start,
                base,
                emptied(place / "deltas"),
                encoding=encoding,
                masters=Masters(encoding, wanted=dtype is None),
                cadence=anchors,
                notify=notify,
            )
            self._begin(self._model, line, self._encoder, stack.pop_all())

    def _check(self) -> None:
        self._live()

    def _live(self) -> dict[str, Live]:
        """What there is to publish; looked at on every rank, so that all refuse alike."""
        tensors = self._naming.tensors()
        live = live_tensors(tensors, self._dtype)
        check_not_empty(sum(tensor.flat.numel() for tensor in live.values()))
        self._optimizers.check(tensors.values())
        return live

    def _capture(self, line: Line, began: float, waiting: Waiting) -> None:
        self._await_encoding()
        if not line.room(waiting):
            self._merged += 1
            return
        step = self._number()
        live = live_tensors(self._naming.tensors(), self._dtype)
        self._gate.watch(self._capturer.mirror.tensors, live)
        capture = self._capturer.capture(live)
        blocked = self._blocked + time.monotonic() - began
        captured = Captured(capture, step, self._training, self._merged, began, blocked)
        self._encoding = captured, self._encoder.submit(line.encode, captured)
        self._blocked, self._merged = began - time.monotonic(), 0

    def _await_encoding(self) -> None:
        """Wait until the mirror is free; take note of what became of the last capture."""
        if self._encoding is None:
            return
        captured, future = self._encoding
        self._encoding = None
        if future.result():
            self._newest = captured.step
        else:
            self._merged += captured.merged_steps + 1

    def _finish(self, line: Line, complete: bool) -> None:
        self._await_encoding()
        if not (self._merged and complete) or line.over:
            return
        self._merged -= 1  # the last of these steps gets a link now
        try:
            self._capture(line, time.monotonic(), PATIENTLY)
            self._await_encoding()
        except Exception as error:
            self._merged += 1
            line.fail(error)
        if self._merged and line.error is not None:
            line.fail(line.error)  # also if what waits is confirmed yet, this is not made good


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (
        distributed.is_available() and distributed.is_initialized() and distributed.get_rank()
    )
