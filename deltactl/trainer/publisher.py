"""Publishes every optimizer step of a training run as the next link of a chain."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from deltactl.bucket import open_bucket
from deltactl.core.cache import cache_root
from deltactl.core.cadence import Cadence, Every
from deltactl.core.digest import hasher
from deltactl.core.encoding import DEFAULT, encoding_named
from deltactl.core.errors import Conflict, NotAllowed, UsageError
from deltactl.core.header import check_step
from deltactl.core.store import Bucket
from deltactl.trainer.aux_files import Files, collect
from deltactl.trainer.capture import Capturer
from deltactl.trainer.line import Captured, Line, Notify
from deltactl.trainer.live import Live, check_view, live_tensors
from deltactl.trainer.local_base import LocalBase
from deltactl.trainer.mirror import MEMORY, Mirror
from deltactl.trainer.names import Names, Naming, check_optimizer, inner_optimizer, unwrapped
from deltactl.trainer.report import Publication, log
from deltactl.trainer.resume import begin, check_same_model

WAIT, MERGE = "wait", "merge"


class Publisher:
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

    ``when_busy``: what to do while several links wait for the bucket. "wait": training waits until
    one is confirmed, as long as waiting may help. "merge": steps get no link of their own, and the
    next link holds all changes since the last.

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

    Raises UsageError; Conflict where the bucket holds another model's chain, or another publisher
    of this machine has ``scratch``; and what the bucket raises.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        bucket: str | os.PathLike[str] | Bucket,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
        encoding: str = DEFAULT,
        anchors: Cadence = Every(),  # noqa: B008 - frozen
        when_busy: Literal["wait", "merge"] = "wait",
        files: Files | None = None,
        names: Names | None = None,
        dtype: Literal["bfloat16"] | None = None,
        scratch: str | os.PathLike[str] | None = None,
        mirror: Literal["memory", "disk"] = MEMORY,
        notify: Notify | None = None,
    ) -> None:
        encoding_named(encoding)
        check_view(dtype)
        if when_busy not in (WAIT, MERGE):
            what = "unknown policy for a busy bucket"
            raise UsageError(what, expected=f"{WAIT} or {MERGE}", found=when_busy)
        if step is not None:
            check_step(step)
        self._naming, self._dtype, self._when_busy = Naming(model, names), dtype, when_busy
        self._closed, self._blocked, self._merged = False, 0.0, 0
        self._training, self._offset, self._newest = step or 0, 0, -1
        self._encoding: tuple[Captured, Future[bool]] | None = None
        self._line: Line | None = None
        self._stack = contextlib.ExitStack()
        if not _is_first_rank():
            return
        opened = bucket if not isinstance(bucket, str | os.PathLike) else open_bucket(str(bucket))
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(_scratch(scratch, opened.url))
            held = Mirror(mirror, place)
            stack.callback(held.close)
            start = begin(opened, place / "base", held)
            tensors = self._naming.tensors()
            check_same_model(held, _specs(live_tensors(tensors, dtype)), opened.url)
            aux = collect(unwrapped(model), files, dtype, place / "files")
            base = LocalBase(place / "base", aux)
            self._newest = start.newest
            if step is None and start.since is not None:
                self._training = start.since.step
            self._capturer = Capturer(held)
            stack.callback(self._capturer.close)
            self._encoder = ThreadPoolExecutor(1, thread_name_prefix="deltactl-encode")
            stack.callback(self._encoder.shutdown)
            if optimizer is not None:
                check_optimizer(optimizer, tensors)
                hook = inner_optimizer(optimizer).register_step_post_hook(self._stepped)
                stack.callback(hook.remove)
            self._line = Line(
                opened,
                start,
                base,
                _empty(place / "deltas"),
                encoding=encoding,
                cadence=anchors,
                notify=notify,
            )
            self._stack = stack.pop_all()

    def _stepped(self, *_: Any) -> None:
        self.publish()

    def publish(self, step: int | None = None) -> None:
        """Publish the weights as they are now, as ``step``, by default the one after the last.

        Returns when what changed has been taken, and the weights may change again. Raises
        UsageError for a number that is no step, and once closed. Nothing else that fails stops
        training: see ``error``.
        """
        if self._closed:
            raise UsageError("the publisher is closed", step=step)
        training = self._training + 1 if step is None else step
        check_step(training)
        self._training = training
        if self._line is None or self._line.over:
            return
        began = time.monotonic()
        try:
            self._capture(self._line, began, wait=self._when_busy == WAIT)
        except Exception as error:
            self._merged += 1
            self._line.fail(error)
        finally:
            self._blocked += time.monotonic() - began

    def _capture(self, line: Line, began: float, *, wait: bool) -> None:
        self._await_encoding()
        if not (line.wait_for_room() if wait else line.has_room):
            self._merged += 1
            return
        step = self._number()
        capture = self._capturer.capture(live_tensors(self._naming.tensors(), self._dtype))
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

    def _number(self) -> int:
        """The chain's step for the training's."""
        number = self._training + self._offset
        if number <= self._newest:
            self._offset = self._newest + 1 - self._training
            number = self._newest + 1
            log.warning(
                "training step %d is published as step %d: a chain's steps only rise, and this one "
                "has got to %d", self._training, number, self._newest,
            )  # fmt: skip
        return number

    @property
    def history(self) -> tuple[Publication, ...]:
        """What the bucket has confirmed, in order."""
        return () if self._line is None else tuple(self._line.history)

    @property
    def last(self) -> Publication | None:
        """The last of these."""
        return self.history[-1] if self.history else None

    @property
    def error(self) -> Exception | None:
        """What failed and has not been made good since; None if all that was captured is published
        or on its way."""
        return None if self._line is None else self._line.error

    def close(self) -> None:
        """Publish what has not been, and wait until the bucket has confirmed it.

        A link that fails now is not tried for ever. Raises ``error`` if there is one in the end;
        the chain is whole up to the last confirmed step then, and the next run goes on from there.
        """
        self._end(complete=True)
        if self.error is not None:
            raise self.error

    def _end(self, *, complete: bool) -> None:
        """``complete``: the model is between two steps, and what got no link can get one."""
        if self._closed:
            return
        self._closed = True
        with self._stack:
            if self._line is not None:
                try:
                    self._finish(self._line, complete)
                finally:
                    self._line.close()

    def _finish(self, line: Line, complete: bool) -> None:
        self._await_encoding()
        if not (self._merged and complete) or line.over:
            return
        try:
            self._capture(line, time.monotonic(), wait=True)
            self._await_encoding()
        except Exception as error:
            line.fail(error)
        if self._merged and line.error is not None:
            line.fail(line.error)  # also if what waits is confirmed yet, this is not made good

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end(complete=False)
            if self.error is not None:
                log.error("not everything was published: %s", self.error)


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (
        distributed.is_available() and distributed.is_initialized() and distributed.get_rank()
    )


def _specs(live: dict[str, Live]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in live.items()}


@contextlib.contextmanager
def _scratch(given: str | os.PathLike[str] | None, url: str) -> Iterator[Path]:
    """The publisher's directory, held by a lock."""
    name = hasher().update(os.fsencode(url)).hexdigest()[:32]
    place = cache_root() / "trainers" / name if given is None else Path(given)
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = open(place / "lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        what = f"the publisher's directory cannot be written: {error.strerror or error}".lower()
        hint = "name one of yours: scratch=, or set DELTACTL_CACHE"
        raise NotAllowed(what, file=place, hint=hint) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = "another publisher of this machine has the directory"
            raise Conflict(
                what, file=place, hint="one publisher a chain: close the other"
            ) from None
        yield place


def _empty(place: Path) -> Path:
    """Nothing in it is of use: what an earlier run had not got confirmed is found anew."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    return place
