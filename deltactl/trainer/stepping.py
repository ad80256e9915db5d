"""A publisher as training sees it: it counts steps, and never stops them."""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from deltactl.core.errors import UsageError
from deltactl.core.header import check_step
from deltactl.trainer.account import Account
from deltactl.trainer.report import Publication, log

WAIT, MERGE = "wait", "merge"

L = TypeVar("L", bound=Account)


class Stepping(ABC, Generic[L]):
    """What publishers have in common. ``_line`` is None where nothing is published."""

    def __init__(self, step: int | None, when_busy: str) -> None:
        if when_busy not in (WAIT, MERGE):
            what = "unknown policy for a busy bucket"
            raise UsageError(what, expected=f"{WAIT} or {MERGE}", found=when_busy)
        if step is not None:
            check_step(step)
        self._when_busy = when_busy
        self._closed, self._blocked, self._merged = False, 0.0, 0
        self._training, self._offset, self._newest = step or 0, 0, -1
        self._line: L | None = None
        self._stack = contextlib.ExitStack()
        self._speaks = True  # or another rank says the same

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

    @abstractmethod
    def _capture(self, line: L, began: float, *, wait: bool) -> None:
        """Take what changed, or count the step as one whose changes are in the next link."""

    def _number(self) -> int:
        """The chain's step for the training's."""
        number = self._training + self._offset
        if number <= self._newest:
            self._offset = self._newest + 1 - self._training
            number = self._newest + 1
            log.log(
                logging.WARNING if self._speaks else logging.DEBUG,
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

    @abstractmethod
    def _finish(self, line: L, complete: bool) -> None:
        """Let a link have what is left; ``complete`` as above."""

    def __enter__(self) -> Self:
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
