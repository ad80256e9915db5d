"""How training waits for the bucket: it says so, and not longer than it was told to."""

from __future__ import annotations

import time

from deltactl.core.errors import UsageError
from deltactl.trainer.report import log
from deltactl.trainer.upload.worker import Worker

WAIT, MERGE = "wait", "merge"

_FIRST_WORD = 10.0
"""Seconds of waiting until a line says so; each later line comes after as long as all before."""

_SILENCE = 600.0  # seconds between two lines at most


class Waiting:
    """``when_busy``, ``max_wait``: see Publisher. Raises UsageError."""

    def __init__(self, when_busy: str, max_wait: float | None = None) -> None:
        if when_busy not in (WAIT, MERGE):
            what = "unknown policy for a busy bucket"
            raise UsageError(what, expected=f"{WAIT} or {MERGE}", found=when_busy)
        if max_wait is not None and (when_busy != WAIT or not max_wait >= 0):
            what = "max_wait= is for how many seconds training waits at most"
            hint = f"with when_busy={MERGE!r} it never waits" if when_busy != WAIT else None
            raise UsageError(what, expected="0 or more, or None", found=max_wait, hint=hint)
        self._waits, self._max_wait = when_busy == WAIT, max_wait
        self._spent = False

    def room(self, worker: Worker) -> bool:
        """Whether a worker has room for another job, after having waited for it.

        After ``max_wait`` it is not waited for again until there has been room.
        """
        if worker.has_room:
            self._spent = False
            return True
        if not self._waits or self._spent:
            return False
        began, word = time.monotonic(), _FIRST_WORD
        end = None if self._max_wait is None else began + self._max_wait
        while not worker.wait_for_room(_earlier(began + word, end)):
            waited = time.monotonic() - began
            if worker.hopeless:
                return False
            if self._max_wait is not None and waited >= self._max_wait:
                self._spent = True
                log.warning(
                    "training has waited %.0f s for the bucket, and goes on: steps get no links "
                    "of their own until it has taken those that wait", waited,
                )  # fmt: skip
                return False
            if waited >= word:
                log.warning("training has been waiting for the bucket for %.0f s", waited)
                word = min(2 * word, word + _SILENCE)
        if word > _FIRST_WORD:
            waited = time.monotonic() - began
            log.warning("training goes on, having waited %.0f s for the bucket", waited)
        return True


PATIENTLY = Waiting(WAIT)
AT_ONCE = Waiting(MERGE)


def _earlier(word: float, end: float | None) -> float:
    return word if end is None else min(word, end)
