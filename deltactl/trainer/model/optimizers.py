"""The optimizers whose steps are published: one, or several that step one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from deltactl.core.errors import UsageError
from deltactl.trainer.report import log

Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_BY_HAND = (
    "where weights are copied back after the step: leave optimizer= out, and call "
    "publisher.publish(step) once they are"
)

_ROUNDS = 3
"""Rounds of the others after which it is told that the last one does not step."""


class Optimizers:
    """Calls ``stepped`` when a round of steps is complete, that is when the last optimizer has
    stepped, and ``missed`` for a round in which others did and it did not, once that is known.

    ``given``: in the order in which they step. Raises UsageError for what are no optimizers.
    """

    def __init__(self, given: Given | None) -> None:
        found = list(given) if isinstance(given, Sequence) else [given] if given is not None else []
        for optimizer in found:
            if not isinstance(optimizer, torch.optim.Optimizer):
                what = "optimizer= takes one of torch.optim.Optimizer, or a list of them"
                raise UsageError(what, found=type(optimizer).__name__, hint=_BY_HAND)
        self._inner = [_inner(optimizer) for optimizer in found]
        if len({id(optimizer) for optimizer in self._inner}) < len(found):
            raise UsageError("an optimizer is given twice")
        if given is not None and not found:
            raise UsageError("optimizer= is an empty list", hint="leave it out, or fill it")
        self._at = -1  # the number of the last one that stepped in this round
        self._begun = False
        self._others: set[int] = set()  # those that have stepped since the last one did
        self._rounds = 0  # of these

    def check(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise UsageError where one steps none of the tensors, by their storage."""
        known = {_start(tensor) for tensor in tensors}
        for number, optimizer in enumerate(self._inner):
            stepped = {_start(parameter) for parameter in _parameters(optimizer)}
            if stepped and not stepped & known:
                which = "the optimizer" if len(self._inner) == 1 else f"optimizer {number}"
                raise UsageError(
                    f"{which} steps none of the model's tensors",
                    expected="an optimizer of model.parameters()",
                    hint=_BY_HAND,
                )

    def warn_of_others(self, model: torch.nn.Module) -> None:
        """Tell of what the model has to train that none of these steps."""
        stepped = {_start(parameter) for one in self._inner for parameter in _parameters(one)}
        others = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.numel() and _start(parameter) not in stepped
        ]
        if self._inner and others:
            log.warning(
                "optimizer= has not %d of the model's tensors that require gradients, such as %r: "
                "what else steps them has to be in it too, in the order in which they step, or "
                "what is published is from between two of their steps",
                len(others),
                others[0],
            )

    def watch(self, stepped: Callable[[], None], missed: Callable[[], None]) -> list[Any]:
        """Be told of steps; returns handles, to be removed in the end.

        What is called is not traced by torch.compile, also where it compiles the step itself.
        """
        untraced: Any = torch.compiler.disable  # which is untyped
        return [
            optimizer.register_step_post_hook(
                untraced(partial(self._stepped, number, stepped, missed))
            )
            for number, optimizer in enumerate(self._inner)
        ]

    def _stepped(
        self, number: int, stepped: Callable[[], None], missed: Callable[[], None], *_: Any
    ) -> None:
        if not self._begun and number:
            log.warning(
                "optimizer %d of optimizer= was the first to step: they have to be given in the "
                "order in which they step, or what is published is from between two steps",
                number,
            )
        self._begun = True
        if number <= self._at:  # a new round, and the last has not stepped in the one before
            self.end(missed)
            self._rounds += 1
            if self._rounds == _ROUNDS:
                self._warn_of_the_last()
        self._at = number
        self._others.add(number)
        if number == len(self._inner) - 1:
            self._at, self._rounds, self._others = -1, 0, set()
            stepped()

    def _warn_of_the_last(self) -> None:
        """Said once, until the last one steps again."""
        idle = [
            f"optimizer {number} ({type(optimizer).__name__})"
            for number, optimizer in enumerate(self._inner)
            if number not in self._others
        ]
        log.warning(
            "nothing is published: the others have made %d rounds of steps without %s, and a step "
            "is published when the last of optimizer= has stepped; put last what steps every time, "
            "leave out what never steps, or leave optimizer= out and call publisher.publish(step)",
            self._rounds,
            " and ".join(idle),
        )

    def end(self, missed: Callable[[], None]) -> None:
        """No more steps: a round that has begun is over."""
        if self._at >= 0:
            self._at = -1
            missed()


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside wrappers such as Accelerate's, which steps when gradients are whole."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.numel()]


def _start(tensor: torch.Tensor) -> int:
    return id(tensor) if isinstance(tensor, DTensor) else tensor.data_ptr()
