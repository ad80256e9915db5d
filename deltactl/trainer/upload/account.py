"""What became of a run's links: what is confirmed, what failed, and who is told."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace

from deltactl.core.errors import Conflict, Unsupported, UsageError
from deltactl.trainer.report import Publication, log
from deltactl.trainer.upload.worker import Worker

Notify = Callable[[str, int], None]
"""``notify(bucket's URL, step)``."""

_OF_THE_MODEL = Conflict, Unsupported, UsageError
"""What a model that is not what it was is refused with: no next step is taken either."""


class Account(ABC):
    """``history``: what the bucket has confirmed, in order; ``taken``: the steps of training that
    were to be published, of which the bucket has ``_put`` in links."""

    def __init__(self, url: str, notify: Notify | None) -> None:
        self.history: list[Publication] = []
        self.taken = self._put = 0
        self._url = url
        self._step_error: Exception | None = None
        self._link_error: Exception | None = None
        self._anchor_error: Exception | None = None
        self._notices = None if notify is None else _Notices(url, notify)

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether no link is put any more."""

    @property
    def error(self) -> Exception | None:
        """What failed and has not been made good since."""
        return self._step_error or self._link_error or self._anchor_error

    def fail(self, error: Exception) -> None:
        """A step got no link of its own; the next one has its changes, if there is one. The same
        again is not told again before a step has got its link."""
        before, self._step_error = self._step_error, error
        if before is not None and str(before) == str(error):
            return
        if isinstance(error, _OF_THE_MODEL):
            log.error(
                "nothing more is published of this run, unless the model becomes again what it "
                "was: %s%s", error, f" ({error.hint})" if error.hint else "",
            )  # fmt: skip
        else:
            log.warning("a step got no link of its own, the next one has its changes: %s", error)

    def _odd(self, step: int, notes: Iterable[str]) -> None:
        """Tell what is odd about a step's values; it is published all the same."""
        for note in notes:
            log.warning("step %d: %s", step, note)

    # On the threads that put.

    def _confirmed(self, publication: Publication, started: float) -> Publication:
        """A link that the bucket has; ``started``: the clock when its capture began."""
        publication = replace(publication, seconds=time.monotonic() - started)
        self._link_error = None
        self._put += publication.merged_steps + 1
        self._note(publication)
        if self._notices is not None:
            self._notices.tell(publication.step)
        return publication

    def _anchored(self, publication: Publication) -> None:
        self._anchor_error = None
        self._note(publication)

    def _note(self, publication: Publication) -> None:
        self.history.append(publication)
        changed, total = publication.changed_elements or 0, publication.total_elements
        if len(self.history) == 1 and changed > 0.9 * total:
            log.warning(
                "the model differs from the chain's tip in %d of %d elements: was the checkpoint "
                "loaded with which the training is to go on?",
                changed,
                total,
            )
        log.info("%s", publication)

    def _link_failed(self, error: Exception, last: bool) -> None:
        self._link_error = error
        if last:
            log.error("nothing more is published: %s", error)
        else:
            log.warning("a link could not be put, and will be again: %s", error)

    def _anchor_failed(self, error: Exception, last: bool) -> None:
        self._anchor_error = error
        if last:
            log.error("no more anchors are made: %s", error)
        else:
            log.warning("an anchor could not be put, and will be again: %s", error)

    def close(self, until: float | None = None) -> None:
        """Tell of what has not been told yet; see Worker."""
        if self._notices is not None:
            self._notices.close(until)

    def tell_missing(self) -> None:
        """Log how many steps are not in the bucket, if any, when no more are put."""
        missing = self.taken - self._put
        if missing > 0:
            steps = [publication.step for publication in self.history]
            newest = f"step {max(steps)}" if steps else "none of them"
            log.error(
                "%d of the %d steps of this run are not in the bucket %s, whose newest is %s; the "
                "next run goes on from there", missing, self.taken, self._url, newest,
            )  # fmt: skip


class _Notices:
    """Tells of the newest step; of those that come while somebody is being told only the last."""

    def __init__(self, url: str, notify: Notify) -> None:
        self._url, self._notify = url, notify
        self._step = -1
        self._lock = threading.Lock()
        self._waiting = False
        self._worker = Worker("deltactl-notify", 1, lambda *_: None)

    def tell(self, step: int) -> None:
        with self._lock:
            self._step = step
            if self._waiting:
                return
            self._waiting = True
        self._worker.put(self._tell)

    def _tell(self) -> None:
        with self._lock:
            step, self._waiting = self._step, False
        try:
            self._notify(self._url, step)
        except Exception as error:  # another's code; whom it could not tell may follow the bucket
            log.warning("step %d is published, and notify failed: %s", step, error, exc_info=error)

    def close(self, until: float | None) -> None:
        self._worker.close(until)
