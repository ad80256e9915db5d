"""The pieces of one transfer, several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, wait
from typing import TypeVar

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def together(
    pool: Executor, work: Callable[[Piece], Result], pieces: Iterable[Piece]
) -> list[Result]:
    """The results of all pieces, in order. After a failure no piece is begun, and those that were
    have ended when it is raised: what they work on may then be closed."""
    futures = [pool.submit(work, piece) for piece in pieces]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
