"""Two processes, each with a cache of its own, that push into one bucket at the same moments."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from deltactl.bucket import open_bucket
from deltactl.core.errors import Conflict
from deltactl.ops.push import push


@dataclass(frozen=True)
class Turn:
    """What one process pushes: a checkpoint, where to (a bucket's address), as which step."""

    source: Path
    bucket: str
    step: int


_open = cache(open_bucket)  # each process has one of its own

WRITTEN, THERE, CONFLICT = "written", "there already", "conflict"


def race(caches: Path, turns: Sequence[Sequence[Turn]]) -> list[list[str]]:
    """For every turn, which is a Turn for each process, what came of each: one of these words."""
    count = len(turns[0])
    context = get_context("spawn")
    barrier, queue = context.Barrier(count), context.Queue()
    workers = [
        context.Process(
            target=_work, args=(n, caches / str(n), [turn[n] for turn in turns], barrier, queue)
        )
        for n in range(count)
    ]
    for worker in workers:
        worker.start()
    found = dict(queue.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join()
    return [[found[n][at] for n in range(count)] for at in range(len(turns))]


def _work(number: int, cache: Path, turns: Sequence[Turn], barrier: Barrier, queue: Any) -> None:
    os.environ["DELTACTL_CACHE"] = str(cache)
    queue.put((number, [_push(turn, barrier) for turn in turns]))


def _push(turn: Turn, barrier: Barrier) -> str:
    barrier.wait(60)
    try:
        report = push(turn.source, _open(turn.bucket), step=turn.step, anchor_every=7)
        return WRITTEN if report.written else THERE
    except Conflict:
        return CONFLICT
    except BaseException as error:
        return repr(error)
    finally:
        barrier.wait(60)
