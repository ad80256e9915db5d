"""How the ranks of one server agree: collectives over the CPU, the same number on every rank.

They are called from the worker's main thread only, where vLLM runs the methods of all ranks in the
same order. No rank may leave such a method before a collective that the others enter: each first
settles what it can alone, catching whatever goes wrong, and then tells.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from deltactl.vllm.update.contract import Values


class Peers(Protocol):
    """The ranks of a server, this one among them.

    ``rank`` counts from 0, ``size`` is how many there are.
    """

    rank: int
    size: int

    def gather(self, mine: Any) -> list[Any]:
        """What every rank gave (values that pickle), rank 0 first."""
        ...

    def least(self, mine: int) -> int:
        """The smallest of what the ranks gave; the quick way to agree within a pause."""
        ...

    def total(self, mine: Values) -> Values:
        """Element by element the sum over ranks, modulo 2^64; ``mine`` has one shape on all."""
        ...


def added(values: list[Values]) -> Values:
    """The sum modulo 2^64: of arrays, where overflow wraps in silence."""
    total = np.zeros_like(values[0])
    for one in values:
        total += one
    return total


class Alone:
    """Peers of the one rank of a server without tensor or pipeline parallelism."""

    rank = 0
    size = 1

    def gather(self, mine: Any) -> list[Any]:
        """See Peers."""
        return [mine]

    def least(self, mine: int) -> int:
        """See Peers."""
        return mine

    def total(self, mine: Values) -> Values:
        """See Peers."""
        return mine


class Group:
    """Peers that are the ranks of a torch process group on the CPU (gloo)."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size

    def gather(self, mine: Any) -> list[Any]:
        """See Peers."""
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def least(self, mine: int) -> int:
        """See Peers."""
        import torch
        import torch.distributed as dist

        value = torch.tensor([mine], dtype=torch.int64)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._group)
        return int(value.item())

    def total(self, mine: Values) -> Values:
        """See Peers."""
        # Gathered and added here: what a collective does on overflow is nobody's promise.
        return added(self.gather(mine))
