"""What ranks say to each other, on the training's own thread, in the host's memory.

A group of its own with gloo: collectives of NCCL would need the device, and the training's own
group might be in the middle of something else. Ranks wait for each other as long as it takes: one
of them may be waiting for the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from deltactl.core.errors import DeltactlError, UsageError

T = TypeVar("T")

_ROUND = 1 << 28
"""Bytes that a rank sends at once, to all others together."""

_PATIENCE = timedelta(days=7)


class RankLost(DeltactlError):
    """A rank is gone, and with it whatever all have to do together."""


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch has no class of its own for it
        what = "the ranks have lost each other"
        raise RankLost(what, found=f"{type(error).__name__}: {error}") from error


class Group:
    """All ranks of the run. What needs them all raises RankLost where one is gone."""

    def __init__(self) -> None:
        """Collective."""
        if not (dist.is_available() and dist.is_initialized()):
            what = "there are no ranks: torch.distributed is not initialized"
            raise UsageError(what, hint="torchrun, and torch.distributed.init_process_group()")
        self._group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, mine: T) -> list[T]:
        """What every rank says, by rank."""
        found: list[Any] = [None] * self.size
        with _together():
            dist.all_gather_object(found, mine, group=self._group)
        return found

    def counts(self, mine: Sequence[int]) -> list[list[int]]:
        """The same for as many integers of every rank; quicker."""
        sent = torch.tensor(mine, dtype=torch.int64)
        found = [torch.empty_like(sent) for _ in range(self.size)]
        with _together():
            dist.all_gather(found, sent, group=self._group)
        return [row.tolist() for row in found]

    def exchange(self, outgoing: Sequence[bytes] | None) -> list[bytes] | None:
        """Send bytes to each rank, by rank, and get those that each has for this one.

        None says that this rank has failed: then nothing is sent, and all get None.
        """
        sizes = [-1] * self.size if outgoing is None else [len(data) for data in outgoing]
        table = self.counts(sizes)
        if outgoing is None or any(size < 0 for row in table for size in row):
            return None
        step = _ROUND // self.size
        found = [bytearray() for _ in range(self.size)]
        for at in range(0, max(size for row in table for size in row), step):
            there = [min(max(size - at, 0), step) for size in sizes]
            here = [min(max(row[self.rank] - at, 0), step) for row in table]
            sent = bytearray().join(
                memoryview(part)[at : at + size] for part, size in zip(outgoing, there, strict=True)
            )
            got = torch.empty(sum(here), dtype=torch.uint8)
            with _together():
                dist.all_to_all_single(got, _tensor(sent), here, there, group=self._group)
            data, start = got.numpy(), 0
            for source, size in enumerate(here):
                found[source] += data[start : start + size].tobytes()
                start += size
        return [bytes(data) for data in found]

    def close(self) -> None:
        """Let go of it; not collective."""
        dist.destroy_process_group(self._group)


def _tensor(data: bytearray) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8)


def on_all(group: Group, work: Callable[[], T]) -> T:
    """Do work on every rank, and return this one's; where one fails all raise. Collective."""
    fault: Exception | None = None
    found: T | None = None
    try:
        found = work()
    except Exception as error:
        fault = error
    said = group.gather(_portable(fault))
    if fault is not None:
        raise fault
    for rank, other in enumerate(said):
        if other is not None:
            other.add_note(f"on rank {rank}")
            raise other
    return cast(T, found)


def _portable(error: Exception | None) -> Exception | None:
    """As another process can have it."""
    if error is None or isinstance(error, DeltactlError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
