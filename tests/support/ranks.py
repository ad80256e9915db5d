"""The ranks of a server without the server: threads that meet in collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from deltactl.vllm.update.contract import Values
from deltactl.vllm.update.peers import added

T = TypeVar("T")
R = TypeVar("R")

LIMIT = 30.0
"""Seconds that a rank waits for the others; a collective that one of them left out fails then."""


class ThreadPeers:
    """Peers of one of ``size`` threads; made by ``thread_peers``."""

    def __init__(self, rank: int, barrier: threading.Barrier, given: list[Any]) -> None:
        self.rank, self.size = rank, barrier.parties
        self._barrier, self._given = barrier, given

    def gather(self, mine: Any) -> list[Any]:
        self._given[self.rank] = mine
        self._barrier.wait(LIMIT)
        found = list(self._given)
        self._barrier.wait(LIMIT)
        return found

    def least(self, mine: int) -> int:
        return int(min(self.gather(mine)))

    def total(self, mine: Values) -> Values:
        return added(self.gather(mine))


def thread_peers(size: int) -> list[ThreadPeers]:
    barrier, given = threading.Barrier(size), [None] * size
    return [ThreadPeers(rank, barrier, given) for rank in range(size)]


def together(ranks: Sequence[T], act: Callable[[T], R]) -> list[R]:
    """What ``act`` gives on every rank, all at once, as vLLM runs a method."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(act, ranks))
