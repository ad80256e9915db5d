"""Publishes every optimizer step of a training run of many ranks."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path

from deltactl.trainer.capture.mirror import Mirror
from deltactl.trainer.model.gate import Gate
from deltactl.trainer.model.masters import Masters
from deltactl.trainer.model.names import Tensors
from deltactl.trainer.model.tensors import check_not_empty
from deltactl.trainer.publisher import Publisher, Settings
from deltactl.trainer.ranks.capture import Parts, describe
from deltactl.trainer.ranks.group import Group, RankLost, on_all
from deltactl.trainer.ranks.layout import lay_out
from deltactl.trainer.ranks.line import RankLine, Status, Taken
from deltactl.trainer.ranks.resume import Begin, Plan, begin
from deltactl.trainer.upload.aux_files import collect
from deltactl.trainer.upload.put import check_writable, opened
from deltactl.trainer.upload.scratch import emptied, scratch_directory
from deltactl.trainer.upload.waiting import AT_ONCE, PATIENTLY, Waiting


class RanksPublisher(Publisher):
    """Publishes a model of many ranks, each its part of the work::

        fully_shard(model)
        with Publisher(model, "s3://bucket/run", optimizer=optimizer):
            ...  # the training loop as it is, on every rank

    What ``Publisher`` makes of a model that is spread over ranks; by its own name it also shares
    the work for one that all ranks have whole, as DistributedDataParallel leaves it. All that
    ``Publisher`` says holds, and every rank makes one with the same arguments, calls ``publish``
    and ``close`` as often as the others, and waits for them there. Tensors may be DTensors that are
    sharded or replicated over any mesh, or the same on all ranks.

    Nobody ever has the whole model. Each tensor has one rank that writes it, so that all write
    about as much; what changed is compared where it is, and sent there. Each rank holds two
    mirrors, of what it has and of what it writes: each of the model's size over the number of
    ranks. Ranks talk to each other while training waits, of as much as has changed; all else is in
    the background, where they only look into the bucket.

    A step's delta, and an anchor, is a file of each rank and an index, which the first rank puts
    when all are there. ``history`` and ``notify`` are the first rank's.

    ``scratch``: a directory; each rank has one of its own in it. The first rank of a machine also
    keeps the step there that the last run of that machine began with.
    """

    def _open(self, settings: Settings) -> None:
        self._encoding: tuple[Taken, Future[bool]] | None = None
        dtype = self._dtype
        to = opened(settings.bucket)
        with contextlib.ExitStack() as stack:
            self._group = group = Group()
            stack.callback(group.close)
            self._speaks = group.rank == 0

            def prepare() -> tuple[Path, Mirror, Mirror]:
                below = f"rank-{group.rank:05d}"
                place = stack.enter_context(scratch_directory(settings.scratch, to.url, below))
                mirrors = Mirror(settings.mirror, place), Mirror(settings.mirror, place)
                for held in mirrors:
                    stack.callback(held.close)
                check_writable(to)
                return place, *mirrors

            self._check()
            place, parts, owned = on_all(group, prepare)
            described = on_all(group, lambda: describe(self._tensors(), dtype))
            layout = lay_out(group.gather(described), group.rank)
            check_not_empty(sum(prod(tensor.shape) for tensor in layout.tensors))
            start = begin(to, group, layout, place, parts, owned)

            def admit() -> tuple[dict[str, Path], bool]:
                if group.rank:
                    return {}, False
                aux = collect(self._model, settings.files, dtype, place / "files")
                gate = Gate(to.url, aux, allow=settings.allow_other_model)
                tensors = {tensor.name: tensor for tensor in layout.tensors}
                return aux, gate.admit(start.plan.model, start.plan.step, tensors)

            aux, other = on_all(group, admit)
            if group.gather(other)[0]:
                parts.tensors.clear()
                owned.tensors.clear()
                start = Begin(Plan(start.plan.newest))
            attempt = group.gather(secrets.token_hex(4))[0]
            self._newest = start.plan.newest
            if settings.step is None and start.plan.step is not None:
                self._training = start.plan.step

            def line() -> RankLine:
                return RankLine(
                    to,
                    layout,
                    group.size,
                    owned,
                    start,
                    aux,
                    emptied(place / "deltas"),
                    attempt=attempt,
                    encoding=settings.encoding,
                    masters=Masters(settings.encoding, wanted=dtype is None and group.rank == 0),
                    cadence=settings.anchors,
                    notify=settings.notify,
                )

            made = on_all(group, line)
            self._parts = Parts(layout, parts)
            stack.callback(self._parts.close)
            self._encoder = ThreadPoolExecutor(1, thread_name_prefix="deltactl-encode")
            stack.callback(self._encoder.shutdown)
            self._begin(self._model, made, self._encoder, stack.pop_all())

    def _check(self) -> None:
        on_all(self._group, lambda: self._optimizers.check(self._tensors().values()))

    def _tensors(self) -> Tensors:
        return self._naming.tensors()

    def _capture(self, line: RankLine, began: float, waiting: Waiting) -> None:
        try:
            if not self._agree(line, waiting):
                self._merged += 1
                return
            step = self._number()
            sent = self._parts.capture(self._tensors, self._dtype, self._group)
        except RankLost:
            line.stop()
            raise
        blocked = self._blocked + time.monotonic() - began
        taken = Taken(sent, step, self._training, self._merged, began, blocked)
        self._encoding = taken, self._encoder.submit(line.encode, taken)
        self._blocked, self._merged = began - time.monotonic(), 0

    def _agree(self, line: RankLine, waiting: Waiting) -> bool:
        """Tell the others how things stand, and hear it from them; whether all are ready. Waits
        until the mirrors are free, and takes note of what became of the last capture."""
        encoded = self._encoding is None or self._encoding[1].result()
        status = line.status(waiting, encoded=encoded)
        rows = self._group.counts(
            [status.encoded, status.room, status.over, status.confirmed, status.due]
        )
        statuses = [Status(bool(a), bool(b), bool(c), d, e) for a, b, c, d, e in rows]
        ok = all(status.encoded for status in statuses)
        line.settle(ok)
        if self._encoding is not None:
            taken, self._encoding = self._encoding[0], None
            if ok:
                self._newest = taken.step
            else:
                taken.sent.parts.undo()
                self._merged += taken.merged_steps + 1
        return line.heard(statuses)

    def _close_in_turn(self, line: RankLine, close: Callable[[], bool]) -> None:
        there = close() if self._group.rank else True
        if not all(row[0] for row in self._group.counts([there])):
            line.give_up()
        if self._group.rank == 0:
            close()

    def _finish(self, line: RankLine, complete: bool) -> None:
        if not complete:  # the others may be anywhere, or gone
            if self._encoding is not None:
                self._encoding[1].result()
            line.give_up()
            return
        try:
            self._agree(line, AT_ONCE)
            if self._merged and not line.over:
                self._last(line)
            self._put_all(line)
        except RankLost as error:
            line.stop()
            line.fail(error)

    def _last(self, line: RankLine) -> None:
        """Give a link to what has none: to the last of the steps."""
        self._merged -= 1
        try:
            self._capture(line, time.monotonic(), PATIENTLY)
        except RankLost:
            raise
        except Exception as error:
            self._merged += 1
            line.fail(error)
        self._agree(line, AT_ONCE)
        if self._merged and line.error is not None:
            line.fail(line.error)  # also if what waits is confirmed yet, this is not made good

    def _put_all(self, line: RankLine) -> None:
        """Put what is waiting: the first rank last, as it waits for what the others put."""
        self._close_in_turn(line, line.close_links)
        if not line.over:
            self._agree(line, AT_ONCE)  # an anchor may have become due
        self._close_in_turn(line, line.close_anchors)
        errors = self._group.gather(None if line.error is None else str(line.error))
        for rank, error in enumerate(errors):
            if error is not None and line.error is None:
                line.fail(RuntimeError(f"rank {rank}: {error}"))
