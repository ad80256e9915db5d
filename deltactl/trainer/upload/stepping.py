"""A publisher as training sees it: it counts steps, and never stops them."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch

from deltactl.core.errors import UsageError
from deltactl.format.header import check_step
from deltactl.trainer.model.optimizers import Given, Optimizers
from deltactl.trainer.report import Publication, log
from deltactl.trainer.upload.account import Account
from deltactl.trainer.upload.ending import Ending
from deltactl.trainer.upload.waiting import Waiting

L = TypeVar("L", bound=Account)


class Stepping(Generic[L]):
    """What publishers have in common. ``_line`` is None where nothing is published."""

    def __init__(
        self, optimizer: Given | None, step: int | None, when_busy: str, max_wait: float | None
    ) -> None:
        self._waiting = Waiting(when_busy, max_wait)
        self._optimizers = Optimizers(optimizer)
        self._closed, self._blocked, self._merged = False, 0.0, 0
        self._training = 0 if step is None else check_step(step)
        self._offset, self._newest = 0, -1
        self._line: L | None = None
        self._ending: Ending | None = None
        self._hooks = contextlib.ExitStack()
        self._speaks = True  # or another rank says the same
        self._checked = self._foreign_told = False

    def _begin(
        self,
        model: torch.nn.Module,
        line: L,
        encoder: ThreadPoolExecutor,
        stack: contextlib.ExitStack,
    ) -> None:
        """All is there: steps may come. ``stack``: what is to be let go of in the end."""
        self._line, self._ending = line, Ending(line, encoder, stack)
        weakref.finalize(self, self._ending.finish_later).atexit = False
        if self._speaks:
            self._optimizers.warn_of_others(model)
        self._watch()

    def _watch(self) -> None:
        """Publish each step of the optimizers, on every rank."""
        for hook in self._optimizers.watch(self.publish, self._missed):
            self._hooks.callback(hook.remove)

    def _missed(self) -> None:
        """A step in which the last optimizer has not stepped: the next link has its changes."""
        if self._closed or self._is_foreign:
            return
        self._training += 1
        self._merged += 1
        if self._line is not None:
            self._line.taken += 1

    @property
    def _is_foreign(self) -> bool:
        return self._ending is not None and self._ending.is_foreign

    def publish(self, step: int | None = None) -> None:
        """Publish the weights as they are now, as ``step``, by default the one after the last.

        Returns when what changed has been taken, and the weights may change again. Raises
        UsageError for what is no step, and once closed; at the first step also what the
        model is refused for, if it has become such a one since the publisher was made. Nothing else
        that fails stops training: see ``error``. In a process that was forked from the publisher's
        nothing is published.
        """
        if self._closed:
            raise UsageError("the publisher is closed", step=step)
        if self._is_foreign:
            self._tell_foreign()
            return
        training = check_step(self._training + 1 if step is None else step)
        if not self._checked:
            self._check()
            self._checked = True
        self._training = training
        if self._line is None:
            return
        self._line.taken += 1
        if self._line.over:
            return
        began = time.monotonic()
        try:
            self._capture(self._line, began, self._waiting)
        except Exception as error:
            self._merged += 1
            self._line.fail(error)
        finally:
            self._blocked += time.monotonic() - began

    def _tell_foreign(self) -> None:
        if not self._foreign_told:
            log.warning("nothing is published by a process that was forked from the publisher's")
        self._foreign_told = True

    def _check(self) -> None:
        """Raise, on all ranks alike, where the model cannot be published as it is now."""
        raise NotImplementedError

    def _capture(self, line: L, began: float, waiting: Waiting) -> None:
        """Take what changed, or count the step as one whose changes are in the next link."""
        raise NotImplementedError

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

    def abandon(self) -> None:
        """End where training was broken off, maybe in the middle of a step: what was captured is
        put, for up to a minute, and nothing more is taken. What is not published is logged."""
        if self._closed:
            return
        self._end(complete=False)
        if self.error is not None:
            log.error("not everything was published: %s", self.error)

    def _end(self, *, complete: bool) -> None:
        """``complete``: the model is between two steps, and what got no link can get one."""
        if self._closed:
            return
        if self._is_foreign:
            self._closed = True
            return
        self._optimizers.end(self._missed)
        self._closed = True
        self._hooks.close()
        if self._line is None or self._ending is None:
            return
        try:
            self._finish(self._line, complete)
        finally:
            if complete:
                self._ending.finish()
            else:
                self._ending.finish_soon()

    def _finish(self, line: L, complete: bool) -> None:
        """Let a link have what is left; ``complete`` as above."""
        raise NotImplementedError

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
            self.abandon()
