"""What became of a run's links: what is confirmed, what failed, and who is told."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

from deltactl.trainer.report import Publication, log
from deltactl.trainer.worker import Worker

Notify = Callable[[str, int], None]
"""``notify(bucket's URL, step)``."""


class Account(ABC):
    """``history``: what the bucket has confirmed, in order."""

    def __init__(self, url: str, notify: Notify | None) -> None:
        self.history: list[Publication] = []
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
        """A step got no link of its own; the next one has its changes."""
        self._step_error = error
        log.warning("a step got no link of its own, the next one has its changes: %s", error)

    # On the threads that put.

    def _confirmed(self, publication: Publication, started: float) -> Publication:
        """A link that the bucket has; ``started``: the clock when its capture began."""
        publication = replace(publication, seconds=time.monotonic() - started)
        self._link_error = None
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

    def close(self) -> None:
        """Tell of what has not been told yet."""
        if self._notices is not None:
            self._notices.close()


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

    def close(self) -> None:
        self._worker.close()
