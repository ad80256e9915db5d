"""Publishes from one process, which has all of the model."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from deltactl.trainer.capture.capture import Capturer
from deltactl.trainer.capture.mirror import Mirror
from deltactl.trainer.model.gate import Gate
from deltactl.trainer.model.masters import Masters
from deltactl.trainer.model.tensors import Live, check_not_empty, live_tensors
from deltactl.trainer.publisher import Publisher, Settings
from deltactl.trainer.upload.aux_files import collect
from deltactl.trainer.upload.line import Captured, Line
from deltactl.trainer.upload.local_base import LocalBase
from deltactl.trainer.upload.put import check_writable, opened
from deltactl.trainer.upload.resume import Begin, begin
from deltactl.trainer.upload.scratch import emptied, scratch_directory
from deltactl.trainer.upload.waiting import PATIENTLY, Waiting


class SinglePublisher(Publisher):
    """The publisher of a model that this process has all of; others that have the same do nothing
    but look at it, so that all refuse alike."""

    def _open(self, settings: Settings) -> None:
        self._encoding: tuple[Captured, Future[bool]] | None = None
        live = self._live()
        if not _is_first_rank():
            self._watch()
            return
        to = opened(settings.bucket)
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(scratch_directory(settings.scratch, to.url))
            held = Mirror(settings.mirror, place)
            stack.callback(held.close)
            start = begin(to, place / "base", held)
            aux = collect(self._model, settings.files, self._dtype, place / "files")
            self._gate = Gate(to.url, aux, allow=settings.allow_other_model)
            if self._gate.admit(start.model, start.step, live):
                held.tensors.clear()
                start = Begin(start.newest)
            check_writable(to)
            base = LocalBase(place / "base", aux)
            self._newest = start.newest
            if settings.step is None and start.step is not None:
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
                encoding=settings.encoding,
                masters=Masters(settings.encoding, wanted=self._dtype is None),
                cadence=settings.anchors,
                notify=settings.notify,
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
