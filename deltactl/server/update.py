"""What to do next with a server, by how it looks.

``decide`` is the whole of the state machine. It knows nothing of how the server came to be as it
is: a request that failed, one that hung and was carried out all the same, and a client that died
half-way all lead to something that can be seen, and it goes on from there. Nothing is repeated
without a look between, and a server is never resumed on weights that nobody knows.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, field

from deltactl.core.errors import DeltactlError
from deltactl.server.goal import Goal
from deltactl.server.http.routes import PauseMode
from deltactl.server.state import WRITTEN, Seen

HELD = "-held"
"""Ends the id of an update of a server that was found paused: the pause is somebody else's."""


class Do(enum.Enum):
    """What can be done to a server; the words stand in messages."""

    IDENTIFY = "find out which step it serves"
    MAP = "record where the weights lie"
    SUM = "add up the live weights"
    STAGE = "stage the update"
    WAIT = "wait for the server's work"
    SEAL = "compare the staged update with what is live"
    PAUSE = "pause"
    START = "open the update"
    COMMIT = "write the weights"
    FINISH = "close the update"
    CLEAR = "clear the caches"
    RESUME = "resume"
    ACKNOWLEDGE = "let go of the update"
    LABEL = "name the step"
    END = "end"


@dataclass(frozen=True, slots=True)
class Options:
    """How a server is to be updated.

    ``pause``: what becomes of requests in flight, in vLLM's words. ``repair``: write every tensor,
    whatever the server says it holds. ``dry_run``: say what would be done. ``timeout``: seconds for
    an answer. ``grace``: seconds in which an update that is another
    client's has to change, or that client is taken for dead.
    """

    pause: PauseMode = "keep"
    keep_cache: bool = False
    repair: bool = False
    dry_run: bool = False
    timeout: float = 120.0
    grace: float = 1.0


DEFAULTS = Options()


@dataclass(slots=True)
class Job:
    """What a client remembers; everything else stands in what it sees.

    ``id``: of its update. ``dead``: of updates whose client is gone. ``held``: the pause is
    somebody else's and stays. ``asked``: a pause was asked for; ``still``: and answered, so that
    nothing runs any more. ``cleared``: the caches, since the weights were written. ``named``: the
    server was told which step its state is. ``summed``: its live weights were, after the last that
    was written to them, so that its word for them holds. ``strange``: others than it took them for
    were live meanwhile, so that caches may hold what those made. ``mistaken``: they changed after
    they were summed, so that what was staged on them was refused. ``repaired``: all tensors were
    written. ``error``: why it has given up.
    """

    goal: Goal
    options: Options
    stop: threading.Event = field(default_factory=threading.Event)
    id: str = ""
    dead: set[str] = field(default_factory=set)
    held: bool = False
    asked: bool = False
    still: bool = False
    cleared: bool = False
    named: bool = False
    summed: bool = False
    strange: bool = False
    mistaken: bool = False
    repaired: bool = False
    error: DeltactlError | None = None

    @property
    def going(self) -> bool:
        return self.error is None and not self.stop.is_set()

    def there(self, seen: Seen) -> bool:
        """Whether the server serves the goal, or will once it is resumed."""
        same = seen.engine.sound and seen.engine.state == self.goal.state
        return same and (self.repaired or not self.options.repair)


def look_closer(seen: Seen, job: Job) -> Do | None:
    """What is left to be found out of the weights that are live: anybody may have changed them, so
    that a server's word for them holds only once they were summed."""
    engine = seen.engine
    if engine.identity != "known":
        return Do.WAIT if engine.identity == "running" else Do.IDENTIFY
    if engine.mapped is None:
        return Do.MAP
    return Do.SUM if engine.sound and not job.summed else None


def decide(seen: Seen, job: Job) -> Do:
    """What to do next with a server that looks like this: the first line that fits."""
    engine, update = seen.engine, seen.update
    if job.going and update is not None and update.id == job.id:
        if update.phase == "staging":
            return Do.WAIT
        if update.phase == "staged":
            return Do.SEAL
        if update.phase == "ready" and not (job.still or (seen.paused and job.held)):
            return Do.PAUSE
        if update.phase == "ready":
            return Do.COMMIT if engine.session else Do.START
    # Nothing more is to be written with what is staged: the server comes to rest as it is.
    if engine.session:
        return Do.FINISH
    written = update is not None and update.phase == WRITTEN and engine.sound
    if written and not (job.cleared or job.options.keep_cache):
        return Do.CLEAR
    if seen.paused and not job.held and engine.sound:
        return Do.RESUME
    if update is not None and (engine.sound or job.going):
        return Do.ACKNOWLEDGE
    # It is at rest.
    closer = look_closer(seen, job) if job.going else None
    if closer is not None:
        return closer
    if job.there(seen) and engine.step != job.goal.step and not job.named:
        return Do.IDENTIFY
    if job.there(seen) and job.strange and not (job.cleared or job.options.keep_cache):
        return Do.CLEAR
    if job.there(seen):
        return Do.END if seen.label == str(job.goal.step) else Do.LABEL
    return Do.STAGE if job.going else Do.END
