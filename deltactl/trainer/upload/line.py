"""From a capture to the bucket, in the background: encoded, put, confirmed, announced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from deltactl.chain.anchor_policy import AnchorPolicy
from deltactl.chain.store import Bucket
from deltactl.format.link_names import delta_name
from deltactl.ops.oddities import of_first
from deltactl.trainer.capture.capture import Capture
from deltactl.trainer.capture.encode import write_delta
from deltactl.trainer.model.masters import Masters
from deltactl.trainer.report import Publication
from deltactl.trainer.upload.account import Account, Notify
from deltactl.trainer.upload.anchors import Anchors, Loose
from deltactl.trainer.upload.local_base import LocalBase
from deltactl.trainer.upload.put import put_anchor, put_link
from deltactl.trainer.upload.resume import Begin
from deltactl.trainer.upload.waiting import Waiting
from deltactl.trainer.upload.worker import Job, Worker

PENDING = 4
"""Links that may wait for the bucket before training waits for it, or steps are merged."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A capture, and its place. ``started``: the clock when it began."""

    capture: Capture
    step: int
    training_step: int
    merged_steps: int
    started: float
    blocked_seconds: float


class Line(Account):
    """Takes captures one by one (``encode``), and puts their links in that order.

    One thread puts links, one makes and puts later anchors, so that no link waits for those, and
    one tells others. ``deltas``: an empty directory, for the files of deltas until the local base
    has them in it.
    """

    def __init__(
        self,
        bucket: Bucket,
        start: Begin,
        base: LocalBase,
        deltas: Path,
        *,
        encoding: str,
        masters: Masters,
        cadence: AnchorPolicy,
        notify: Notify | None,
    ) -> None:
        super().__init__(bucket.url, notify)
        self._masters = masters
        self._bucket, self._base, self._deltas, self._encoding = bucket, base, deltas, encoding
        self._states = start.states
        self._step = None if start.since is None else start.since.step
        self._links = Worker("deltactl-links", PENDING, self._link_failed)
        self._anchors = Anchors(
            bucket, base, cadence, start.since,
            done=self._anchored, failed=self._anchor_failed,
        )  # fmt: skip

    @property
    def over(self) -> bool:
        """Whether no link is put any more."""
        return self._links.over

    def room(self, how: Waiting) -> bool:
        """Whether another link may be added, after having waited for the bucket in this way."""
        return how.room(self._links)

    # On the thread that encodes.

    def encode(self, captured: Captured) -> bool:
        """Write the link's file and let it be put. Returns False, and the capture is undone, where
        that fails. Afterwards the mirror is free for the next capture."""
        try:
            job = self._first(captured) if self._step is None else self._delta(captured)
        except Exception as error:
            captured.capture.undo()
            self.fail(error)
            return False
        self._step, self._step_error = captured.step, None
        self._links.put(job)
        return True

    def _first(self, captured: Captured) -> Job:
        mirror = captured.capture.mirror
        written = self._base.write(mirror.checkpoint(), captured.step)
        self._states = {tensor.name: tensor for tensor in written.tensors}
        self._odd(captured.step, of_first(mirror.checkpoint()))
        found = _publication(captured, "anchor", mirror.total_elements, written.snapshot.state)

        def put() -> None:
            size = put_anchor(self._bucket, written.snapshot)
            publication = self._confirmed(replace(found, bytes=size), captured.started)
            self._anchors.first(publication)

        return put

    def _delta(self, captured: Captured) -> Job:
        assert self._step is not None
        self._masters.look(captured.capture)
        path = self._deltas / f"{captured.step}.safetensors"
        made = write_delta(
            captured.capture,
            self._states,
            path,
            encoding=self._encoding,
            step=captured.step,
            base_step=self._step,
        )
        self._states = made.states
        report = made.report
        self._odd(captured.step, report.notes)
        found = replace(
            _publication(captured, "delta", report.total_elements, report.result_state),
            changed_elements=report.changed_elements,
            bytes=report.delta_bytes,
            encoding=report.encoding,
        )

        def put() -> None:
            put_link(self._bucket, delta_name(captured.step), path, captured.step)
            self._anchors.confirmed(Loose(path, self._confirmed(found, captured.started)))

        return put

    def close(self, until: float | None = None) -> None:
        """Put what is waiting, or give up at the first error; see Worker."""
        self._links.close(until)
        self._anchors.close(until)
        super().close(until)


def _publication(captured: Captured, kind: str, total_elements: int, state: str) -> Publication:
    """As far as it is known before the bucket has confirmed it."""
    return Publication(
        step=captured.step,
        training_step=captured.training_step,
        kind=kind,
        changed_elements=None,
        total_elements=total_elements,
        bytes=0,
        seconds=0.0,
        blocked_seconds=captured.blocked_seconds,
        merged_steps=captured.merged_steps,
        encoding=None,
        state=state,
    )
