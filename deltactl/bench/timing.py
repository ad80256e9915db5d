"""Works timed in turn, so that a machine whose speed drifts is as slow for one as for another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Timed:
    """``run`` is timed; ``clear`` is called before it, untimed, and removes what a run leaves."""

    run: Callable[[], object]
    clear: Callable[[], object] | None = None


def medians(
    works: Mapping[str, Timed],
    rounds: int,
    *,
    done: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds of each work, the median of ``rounds`` runs after one that does not count.

    In every round each runs once, in order, so that one may use what an earlier one has made.
    ``done`` is called after every run.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            if work.clear is not None:
                work.clear()
            os.sync()  # or this work would share the processors with the last one's write-back
            start = clock()
            work.run()
            seconds = clock() - start
            if number:
                taken[name].append(seconds)
            done()
    return {name: median(of_work) for name, of_work in taken.items()}
