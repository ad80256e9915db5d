"""Have running servers load a step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltactl.core.chain import read_chain
from deltactl.core.progress import Progress, silent
from deltactl.core.store import Bucket
from deltactl.server.drive import Drive, lost
from deltactl.server.fleet import Together, as_error, side_by_side, urls_of
from deltactl.server.goal import ChainGoal, DeltaGoal, Goal
from deltactl.server.preflight import ready_for
from deltactl.server.report import Replica
from deltactl.server.routes import Server
from deltactl.server.update import DEFAULTS, Job, Options


@dataclass(frozen=True, slots=True)
class Applied:
    """What ``apply`` did: the step and its state, and of each server what became of it."""

    step: int
    state: str | None
    replicas: list[Replica]
    interrupted: bool


def apply_to_servers(
    bucket: Bucket,
    step: int | None,
    urls: Sequence[str],
    options: Options = DEFAULTS,
    *,
    progress: Progress = silent,
) -> Applied:
    """Bring each server to a step of a chain, by default its tip, side by side.

    The chain's headers are read once, here; each server fetches the links itself and proves what it
    writes. Raises what reading the chain raises, Unproven for a chain without digests, UsageError;
    what becomes of a single server is in the report. An interrupt brings every server to rest, on
    the old step or on the new one, and is told.
    """
    urls = urls_of(urls)
    return _apply(ChainGoal(read_chain(bucket), step), urls, options, progress)


def apply_delta_to_servers(
    delta: Path,
    urls: Sequence[str],
    options: Options = DEFAULTS,
    *,
    progress: Progress = silent,
) -> Applied:
    """``apply_to_servers`` for one delta, a file that the servers find at the same path."""
    urls = urls_of(urls)
    return _apply(DeltaGoal(delta), urls, options, progress)


def _apply(goal: Goal, urls: list[str], options: Options, progress: Progress) -> Applied:
    stop, together = threading.Event(), Together(progress, "staging")

    def one(url: str) -> Replica:
        return _to_goal(url, Job(goal, options, stop), together)

    replicas, interrupted = side_by_side(one, urls, stop)
    return Applied(goal.step, goal.state, replicas, interrupted)


def _to_goal(url: str, job: Job, together: Together) -> Replica:
    report = Replica(url)
    try:
        server = Server(url, job.options.timeout)
        try:
            ready_for(server, job.goal)
            Drive(server, job, report, together.of(url)).run()
        finally:
            server.close()
    except Exception as error:
        report.error = as_error(error)
        if job.asked:
            lost(report, job.goal.target)
    return report
