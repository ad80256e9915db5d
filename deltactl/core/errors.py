"""Exceptions that carry facts.

Each says what is wrong and, where they are known, which file, tensor and step, what was expected
and what was found, and what to type next. The command line maps classes to exit codes; nothing here
prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class DeltactlError(Exception):
    """Base of all errors that deltactl raises on purpose.

    ``what`` is one sentence without a full stop. ``hint`` is the next thing to do, a command where
    there is one. The other facts are optional; ``facts()`` gives them as JSON-ready values.
    """

    def __init__(
        self,
        what: str,
        *,
        file: object = None,
        tensor: str | None = None,
        step: int | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.file = None if file is None else str(file)
        self.tensor = tensor
        self.step = step
        self.expected = expected
        self.found = found
        self.hint = hint
        super().__init__(what)

    def facts(self) -> dict[str, Any]:
        """The keys of one row of ``errors`` in ``--json``: step, file, tensor, what, expected,
        found."""
        return {
            "step": self.step,
            "file": self.file,
            "tensor": self.tensor,
            "what": self.what,
            "expected": _plain(self.expected),
            "found": _plain(self.found),
        }

    def __str__(self) -> str:
        where = [f"step {self.step}"] if self.step is not None else []
        where += [self.file] if self.file else []
        where += [f"tensor {self.tensor!r}"] if self.tensor is not None else []
        text = f"{', '.join(where)}: {self.what}" if where else self.what
        if self.expected is not None:
            text += f"; expected {self.expected}"
        if self.found is not None:
            text += f"{',' if self.expected is not None else ';'} found {self.found}"
        return text


def listed(names: Sequence[str], limit: int = 4) -> str:
    """Some names, for an error's text, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


class UsageError(DeltactlError):
    """The request itself makes no sense (exit 2)."""


class Malformed(DeltactlError):
    """A file is torn, hostile, or fails a digest: it cannot be what was written (exit 3)."""


class Unproven(DeltactlError):
    """Nothing is known to be wrong, but a digest that would prove it right is missing (exit 3)."""


def difference(
    what: str,
    expected: object,
    found: object,
    *,
    file: object = None,
    tensor: str | None = None,
    step: int | None = None,
) -> Malformed | None:
    """The error for what was found to be another than is expected; None where it is the same."""
    if expected == found:
        return None
    return Malformed(what, file=file, tensor=tensor, step=step, expected=expected, found=found)


class Unsupported(DeltactlError):
    """A sound file that this version cannot read: a later format, an unknown encoding (exit 1)."""


class NotAllowed(DeltactlError):
    """Authentication or permission (exit 4)."""


class Transient(DeltactlError):
    """Network or a busy server; trying again may help (exit 5).

    ``retry_after``: seconds that the server asked to be left alone for, if it did.
    """

    retry_after: float | None = None


class NotFound(DeltactlError):
    """No such bucket, chain, step or file (exit 10)."""


class Conflict(DeltactlError):
    """The step exists with other content, or the base is another (exit 11)."""
