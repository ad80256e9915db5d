"""Have running servers load a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from deltactl.chain.reading import read_chain
from deltactl.chain.store import Bucket
from deltactl.core.progress import Progress, silent
from deltactl.server.drive import Drive
from deltactl.server.fleet import Met, Together, as_error, side_by_side, urls_of
from deltactl.server.goal import ChainGoal, DeltaGoal, Goal, lent
from deltactl.server.http.routes import Server
from deltactl.server.http.wire import ConnectionLost, Dead
from deltactl.server.preflight import draft_notes, ready_for
from deltactl.server.report import Replica
from deltactl.server.update import DEFAULTS, Job, Options


@dataclass(frozen=True, slots=True)
class Applied:
    """What ``apply`` did: the step and its state, and of each server what became of it. ``newer``:
    steps above that are in the bucket and cannot be rebuilt, where no step was asked for."""

    step: int
    state: str | None
    replicas: list[Replica]
    interrupted: bool
    newer: tuple[int, ...] = ()


def apply_to_servers(
    bucket: Bucket,
    step: int | None,
    urls: Sequence[str],
    options: Options = DEFAULTS,
    *,
    progress: Progress = silent,
    on_interrupt: Callable[[], None] = lambda: None,
) -> Applied:
    """Bring each server to a step of a chain, by default its tip, side by side.

    The chain's headers are read once, here; each server fetches the links itself and proves what it
    writes. Raises what reading the chain raises, Unproven for a chain without digests, UsageError;
    what becomes of a single server is in the report. An interrupt brings every server to rest, on
    the old step or on the new one, and is told.
    """
    urls = urls_of(urls)
    goal = ChainGoal(read_chain(bucket), step)
    return _apply(goal, urls, options, progress, on_interrupt)


def apply_delta_to_servers(
    delta: Path,
    urls: Sequence[str],
    options: Options = DEFAULTS,
    *,
    progress: Progress = silent,
    on_interrupt: Callable[[], None] = lambda: None,
) -> Applied:
    """``apply_to_servers`` for one delta, a file that the servers find at the same path."""
    urls = urls_of(urls)
    with lent(delta) as (bucket, name):
        return _apply(DeltaGoal(delta, bucket, name), urls, options, progress, on_interrupt)


def _apply(
    goal: Goal,
    urls: list[str],
    options: Options,
    progress: Progress,
    on_interrupt: Callable[[], None],
) -> Applied:
    stop, together, met = threading.Event(), Together(progress, "staging"), Met()

    def one(url: str) -> Replica:
        return _to_goal(url, Job(goal, options, stop), together, met)

    replicas, interrupted = side_by_side(one, urls, stop, on_interrupt)
    return Applied(goal.step, goal.state, replicas, interrupted, goal.newer)


def plan_for(goal: Goal, url: str, timeout: float) -> Replica:
    """What ``apply`` with ``dry_run`` says of one server."""
    job = Job(goal, Options(dry_run=True, timeout=timeout))
    return _to_goal(url, job, Together(silent, ""), Met())


def _to_goal(url: str, job: Job, together: Together, met: Met) -> Replica:
    report = Replica(url)
    try:
        with closing(Server(url, job.options.timeout)) as server:
            engine = ready_for(server, job.goal)
            met.meet(engine.server, url)
            report.notes += draft_notes(engine.draft)
            drive = Drive(server, job, report, together.of(url))
            drive.plan() if job.options.dry_run else drive.run()
    except Exception as error:
        report.error = as_error(error)
        again = f"deltactl apply {quote(job.goal.target)} --server {url}"
        unknown = job.asked and report.paused is None
        if unknown and not isinstance(error, Dead):
            report.notes.append("may be paused, on the old step or on the new one")
        if isinstance(error, Dead | ConnectionLost):
            report.error.hint = f"{error.hint}, then {again}"
        elif unknown:
            report.error.hint = again
    return report
