"""How the library tells its caller how far it is, without printing."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)``, both in bytes, from any thread, never twice at once.
"""


def silent(what: str, done: int, total: int) -> None:
    """A Progress that says nothing."""
