"""Anchors after the first, made from the deltas since the last one while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from deltactl.chain.anchor_policy import AnchorPolicy, Run
from deltactl.chain.store import Bucket
from deltactl.trainer.report import Publication, log
from deltactl.trainer.upload.local_base import LocalBase, Written
from deltactl.trainer.upload.put import put_anchor
from deltactl.trainer.upload.worker import Worker


@dataclass(frozen=True, slots=True)
class Loose:
    """A confirmed delta, and its file, which the local base does not have in it yet."""

    path: Path
    publication: Publication


class Anchors:
    """Follows the confirmed links, asks the cadence, and makes what is due.

    Also where no anchor is due the deltas are taken into the local base once they are as large as
    it is, so that their files do not fill the disk.
    """

    def __init__(
        self,
        bucket: Bucket,
        base: LocalBase,
        cadence: AnchorPolicy,
        since: Run | None,
        *,
        done: Callable[[Publication], None],
        failed: Callable[[Exception, bool], None],
    ) -> None:
        self._bucket, self._base, self._cadence, self._done = bucket, base, cadence, done
        self._since = since
        self._loose: list[Loose] = []
        self._lock = threading.Lock()
        self._worker = Worker("deltactl-anchors", 1, failed)

    def first(self, publication: Publication) -> None:
        """The chain's first anchor, or a new one of a chain that was not gone on with."""
        step = publication.step
        self._since = from_anchor(step, publication.bytes, ())

    def confirmed(self, link: Loose) -> None:
        """A delta that the bucket has confirmed."""
        with self._lock:
            assert self._since is not None
            self._loose.append(link)
            self._since = with_delta(self._since, link.publication)
            since, loose = self._since, tuple(self._loose)
        if self._worker.over or not self._worker.has_room:
            return
        due = is_due(self._cadence, since)
        if due or sum(item.publication.bytes for item in loose) > since.anchor_bytes:
            self._worker.put(_Advance(self, loose, due))

    def advance(self, loose: tuple[Loose, ...]) -> Written:
        """Take deltas into the local base. Raises Malformed, OSError."""
        newest = loose[-1].publication
        written = self._base.advance([i.path for i in loose], newest.step, newest.state)
        with self._lock:
            self._loose = self._loose[len(loose) :]
        for item in loose:
            item.path.unlink(missing_ok=True)
        return written

    def put(self, written: Written, publication: Publication) -> None:
        """Put an anchor of the step of ``publication``. Raises what the bucket raises."""
        size = put_anchor(self._bucket, written.snapshot)
        with self._lock:
            self._since = from_anchor(publication.step, size, (i.publication for i in self._loose))
        self._done(replace(publication, bytes=size))

    def close(self, until: float | None = None) -> None:
        """Finish what is under way; see Worker."""
        self._worker.close(until)


def is_due(cadence: AnchorPolicy, since: Run) -> bool:
    """What the cadence says; no, where it fails."""
    try:
        return cadence.due(since)
    except Exception:  # another's code; the links go on without its anchors
        log.exception("the cadence of anchors failed at step %d", since.step)
        return False


def with_delta(since: Run, delta: Publication) -> Run:
    """A run of deltas, and one more."""
    return replace(
        since,
        step=delta.step,
        delta_bytes=since.delta_bytes + delta.bytes,
        changed=since.changed + (delta.changed_elements or 0),
    )


def from_anchor(step: int, nbytes: int, newer: Iterable[Publication]) -> Run:
    """The run that begins with an anchor, and the deltas that were confirmed after it."""
    since = Run(step, step, nbytes, 0, 0)
    for delta in newer:
        since = with_delta(since, delta)
    return since


class _Advance:
    """The job; tried again it goes on where it failed."""

    def __init__(self, anchors: Anchors, loose: tuple[Loose, ...], due: bool) -> None:
        self._anchors, self._loose, self._due = anchors, loose, due
        self._written: Written | None = None
        self._started = time.monotonic()

    def __call__(self) -> None:
        if self._written is None:
            self._written = self._anchors.advance(self._loose)
        if self._due:
            seconds = time.monotonic() - self._started
            self._anchors.put(self._written, as_anchor(self._loose[-1].publication, seconds))


def as_anchor(delta: Publication, seconds: float) -> Publication:
    """The anchor of a delta's step; of how many bytes is not known yet."""
    return replace(
        delta,
        kind="anchor",
        changed_elements=None,
        encoding=None,
        seconds=seconds,
        blocked_seconds=0.0,
        merged_steps=0,
    )
