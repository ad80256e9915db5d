"""One server's way to a step: decide by what is seen, do it, and look again where in doubt."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from logging import DEBUG, INFO, getLogger
from shlex import quote
from time import monotonic
from typing import Any

from deltactl.core.errors import Conflict, DeltactlError, Malformed, Transient
from deltactl.server.goal import StageRequest, message
from deltactl.server.http.routes import Server
from deltactl.server.http.wire import Refused
from deltactl.server.preflight import check_layers
from deltactl.server.report import Replica
from deltactl.server.state import UNWRITTEN, WRITTEN, Seen, UpdateState
from deltactl.server.summing import PATIENCE, hangs, summed
from deltactl.server.update import HELD, Do, Job, decide, look_closer

log = getLogger("deltactl.server")

_TRIES = 2  # of anything that fails
_STAGINGS = 3  # an update, once more where the server has lost it, a repair
_MOST = 20  # times that anything but a poll is done on one way: more is a circle
_FIRST_POLL, _LONGEST_POLL = 0.01, 0.5  # seconds
_UNASKED = "what was reloaded was not tried with a prompt, as the KV cache sleeps"

_TO_REST = frozenset({Do.FINISH, Do.CLEAR, Do.RESUME, Do.ACKNOWLEDGE, Do.LABEL})
"""Where these fail there is nothing left to fall back on."""


class Drive:
    """Brings one server to a goal. ``progress``: told of the bytes staged, and of how many."""

    def __init__(
        self, server: Server, job: Job, report: Replica, progress: Callable[[int, int], None]
    ) -> None:
        self.server, self.job, self.report, self._progress = server, job, report, progress
        self._acts: dict[Do, Callable[[Seen], Seen]] = {
            Do.IDENTIFY: self._identify,
            Do.MAP: self._map,
            Do.SUM: self._sum,
            Do.STAGE: self._stage,
            Do.WAIT: self._poll,
            Do.SEAL: self._seal,
            Do.PAUSE: self._pause,
            Do.START: self._start,
            Do.COMMIT: self._commit,
            Do.FINISH: self._finish,
            Do.CLEAR: self._clear,
            Do.RESUME: self._resume,
            Do.ACKNOWLEDGE: self._acknowledge,
            Do.LABEL: self._set_label,
            Do.END: self._confirm,
        }
        self._failures: Counter[Do] = Counter()
        self._done: Counter[Do] = Counter()
        self._way: StageRequest | None = None
        self._mistaken_update: str | None = None
        self._staged_paused = False
        self._staging_since = self._paused_since = 0.0
        self._wait = _FIRST_POLL
        self._sign: tuple[object, float] = (None, 0.0)

    def run(self) -> None:
        """Go as far as it goes; what became of it is in the report and the job.

        Raises what kept even from looking, and what kept the server from coming to rest.
        """
        seen = self._note(self._first_look())
        while not self._is_another_s(seen):
            do = decide(seen, self.job)
            if do is Do.END and seen.certain:
                break
            self._done[do] += 1
            log.log(DEBUG if do is Do.WAIT else INFO, "%s: %s", self.server.url, do.value)
            if do is not Do.WAIT and self._done[do] > _MOST:
                raise DeltactlError("the update goes round in circles", file=self.server.url)
            try:
                seen = self._acts[do](seen)
            except DeltactlError as error:
                self.report.forget()
                if not self._may_go_on(do, error):
                    raise self._stuck(error) from None
                seen = self._look()
            self._note(seen)
        self._conclude(seen)

    def plan(self) -> None:
        """Say in the report what ``run`` would do; nothing that is served changes.

        The server finds out which step it serves.
        """
        seen, job = self._note(self.server.look()), self.job
        while job.going and (do := look_closer(seen, job)) is not None:
            seen = self._note(self._acts[do](seen))
        left = seen.update
        if left is not None:
            self.report.notes.append(f"an update to step {left.to_step} is under way or was left")
        if job.error is not None:
            self.report.error = job.error
        elif not job.there(seen):
            self._note_stranger(seen)
            whole = job.options.repair or not seen.engine.sound
            way = job.goal.way(seen.engine.step, seen.engine.state, full=whole)
            check_layers(seen.engine, job.goal, way, self.server.url)
            self.report.how = "full" if way.full else "deltas"
            self.report.deltas, self.report.bytes_fetched = way.deltas, way.nbytes

    def _conclude(self, seen: Seen) -> None:
        job, report, url = self.job, self.report, self.server.url
        report.error = job.error
        if report.error is None and not job.there(seen):
            report.error = DeltactlError("interrupted before the weights were written", file=url)
        if seen.paused and job.held:
            report.notes.append("was paused already, and is left paused")
        if not seen.engine.sound:
            report.error = unknown_weights(seen, url, job.goal.target, report.error)

    def _may_go_on(self, do: Do, error: DeltactlError) -> bool:
        """After a failure: once is no reason to give up, where another try may go better."""
        self._failures[do] += 1
        if isinstance(error, Transient | Refused | Malformed) and self._failures[do] < _TRIES:
            return True
        if do not in _TO_REST:
            self.job.error = self.job.error or error
        return do not in _TO_REST

    def _stuck(self, error: DeltactlError) -> DeltactlError:
        """What to raise for a server that does not come to rest; how it is left is noted."""
        with contextlib.suppress(DeltactlError):
            seen = self._note(self._look())
            if not seen.engine.sound:
                return unknown_weights(seen, self.server.url, self.job.goal.target, error)
        return error

    # Looking.

    def _look(self) -> Seen:
        """The server as it is. Looking changes nothing, so it is simply tried again."""
        for _ in range(_TRIES - 1):
            try:
                return self.server.look()
            except Transient:
                self.job.stop.wait(self._wait)
        return self.server.look()

    def _first_look(self) -> Seen:
        """As it was found. An update that nobody carries on is of a client that died."""
        seen = self.server.look()
        deadline = monotonic() + self.job.options.timeout
        while (left := seen.update) is not None and not self.job.stop.is_set():
            before = seen
            self.job.stop.wait(self.job.options.grace)
            seen = self._look()
            if _sign(seen) == _sign(before) and left.phase != "staging":
                self.job.dead.add(left.id)
                self.report.notes.append(
                    f"found an update to step {left.to_step} that a client had left"
                )
                break
            if monotonic() > deadline:
                break
        ours = left is not None and not left.id.endswith(HELD)
        self.job.held = seen.paused and seen.engine.sound and not ours
        return seen

    def _note(self, seen: Seen) -> Seen:
        """Remember what is seen for the first time."""
        job, engine, update = self.job, seen.engine, seen.update
        if not job.id:  # its word may change until its weights are summed
            self.report.step_before = engine.step
        self.report.step_after, self.report.state = engine.step, engine.state
        self.report.paused = seen.paused
        if seen.certain and not seen.paused:
            job.still = False
        job.strange = job.strange or engine.doubt is not None
        if engine.identity == "failed" and job.going:
            job.error = engine.error or DeltactlError("the server could not identify its weights")
        if update is not None and update.id == job.id:
            self._note_own(seen, update)
        return seen

    def _note_stranger(self, seen: Seen) -> None:
        """Weights of another chain are replaced as any others; but somebody may have erred."""
        state, doubt, note = seen.engine.state, seen.engine.doubt, None
        if doubt is not None:
            note = f"held weights that nobody knew: {doubt}"
        elif state is not None and state not in self.job.goal.states():
            note = "held weights that are no step of this chain"
        if note is not None and note not in self.report.notes:
            self.report.notes.append(note)

    def _is_another_s(self, seen: Seen) -> bool:
        """Whether the server is in the hands of another client, which is let alone."""
        update, job = seen.update, self.job
        if update is None or update.id == job.id or update.id in job.dead:
            return False
        if not job.there(seen):
            what, hint = "another client is updating the server", "wait for it, then try again"
            job.error = job.error or Transient(what, file=self.server.url, hint=hint)
        return True

    def _note_own(self, seen: Seen, update: UpdateState) -> None:
        job, report = self.job, self.report
        report.bytes_fetched = max(report.bytes_fetched, update.fetched_bytes)
        if update.phase == "ready" and seen.certain and seen.paused:
            job.held = job.held or not (job.asked or self._staged_paused)  # it was meanwhile
        if update.phase == WRITTEN:
            job.repaired = update.full
            report.how = "full" if update.full else "deltas"
            report.deltas = self._way.deltas if self._way else 0
            report.elements, report.reloaded = update.elements, update.reloaded
            if update.unasked and _UNASKED not in report.notes:
                report.notes.append(_UNASKED)
        repairable = not update.full and (not seen.engine.sound or self._mistook(update))
        if update.phase in UNWRITTEN and job.going and not repairable:
            job.error = update.error or DeltactlError("the server could not load the update")
            if job.error.hint is None:
                job.error.hint = self._remedy(job.error)

    def _mistook(self, update: UpdateState) -> bool:
        """Whether somebody changed the weights once they were summed, as far as a refusal tells,
        and for the first time: then they are summed anew."""
        job = self.job
        if update.phase in UNWRITTEN and isinstance(update.error, Conflict) and not job.mistaken:
            job.mistaken, job.summed = True, False
            self._mistaken_update = update.id
        return update.id == self._mistaken_update

    def _remedy(self, error: DeltactlError) -> str | None:
        """What to type where the live weights are at fault, or what is in the bucket."""
        if isinstance(error, Conflict):
            return (
                f"deltactl apply {quote(self.job.goal.target)} --server {self.server.url} --repair"
            )
        return (
            f"deltactl verify {quote(self.job.goal.bucket)}"
            if isinstance(error, Malformed)
            else None
        )

    def _poll(self, seen: Seen) -> Seen:
        """Wait a while, then look at what can have changed. Raises Transient where nothing does."""
        self.job.stop.wait(self._wait)
        self._wait = min(self._wait * 1.5, _LONGEST_POLL)
        seen = self._told(seen, "deltactl_state")
        update, now = seen.update, monotonic()
        if update is not None and self._way is not None:
            self._progress(update.fetched_bytes, self._way.nbytes)
        if self._sign[0] != _sign(seen):
            self._sign = (_sign(seen), now)
        elif now - self._sign[1] > PATIENCE * self.job.options.timeout:
            self._failures[Do.WAIT] = _TRIES
            raise hangs(self.server)
        return seen

    def _confirm(self, seen: Seen) -> Seen:
        """Before the end is told: what was only concluded so far is looked at."""
        return self._look()

    # Doing: what is answered well need not be looked at again.

    def _told(self, seen: Seen, method: str, **arguments: Any) -> Seen:
        """Call a method of the plugin; its reply says how the engine is, and nothing of vLLM."""
        return replace(seen, engine=self.server.engine(method, **arguments), certain=False)

    def _identify(self, seen: Seen) -> Seen:
        self.job.named = seen.engine.identity == "known"
        return self._told(seen, "deltactl_identify", bucket_states=dict(self.job.goal.states()))

    def _map(self, seen: Seen) -> Seen:
        seen = self._told(seen, "deltactl_map")
        if seen.engine.mapped is None:
            raise seen.engine.error or DeltactlError("the server records no map of its weights")
        self.job.summed = True
        return seen

    def _sum(self, seen: Seen) -> Seen:
        before, engine = seen.engine, summed(self.server, self.job.stop)
        self.job.summed = engine.mapped is not None
        self.job.strange = self.job.strange or engine.state != before.state
        return replace(seen, engine=engine, certain=False)

    def _stage(self, seen: Seen) -> Seen:
        job, engine = self.job, seen.engine
        if self._done[Do.STAGE] > _STAGINGS:
            raise DeltactlError("the server does not keep what it stages", file=self.server.url)
        self._note_stranger(seen)
        whole = job.options.repair or not engine.sound
        self._way = job.goal.way(engine.step, engine.state, full=whole)
        check_layers(engine, job.goal, self._way, self.server.url)
        job.dead.add(job.id)
        job.id = secrets.token_hex(8) + (HELD if seen.paused and job.held else "")
        job.cleared, self._staged_paused = False, seen.paused
        self._wait, self._staging_since = _FIRST_POLL, monotonic()
        seen = self._told(seen, "deltactl_stage", update=message(job.goal, self._way, job.id))
        if seen.update is None and seen.engine.error is not None:
            raise seen.engine.error
        return seen

    def _seal(self, seen: Seen) -> Seen:
        self.server.engine("deltactl_seal", id=self.job.id)
        self.report.seconds_staging = monotonic() - self._staging_since
        return self._look()

    def _pause(self, seen: Seen) -> Seen:
        if not self.job.asked:
            self._paused_since = monotonic()
        self.job.asked = True
        options = self.job.options
        self.server.pause(options.pause, clear_cache=not options.keep_cache)
        self.job.still = True
        return seen.expect(paused=True)

    def _start(self, seen: Seen) -> Seen:
        self.server.start()
        return seen.expect(session=True)

    def _commit(self, seen: Seen) -> Seen:
        # What nobody wrote just now may have been changed by another hand since it was summed, and
        # what is live already was not written.
        self.job.summed = False
        self.server.commit(self.job.id)
        return self._told(seen, "deltactl_state")

    def _finish(self, seen: Seen) -> Seen:
        written = seen.update is not None and seen.update.phase == WRITTEN and seen.engine.sound
        label = str(seen.engine.step) if written else seen.label
        self.server.finish(label if written else None)
        return seen.expect(session=False, label=label)

    def _clear(self, seen: Seen) -> Seen:
        if not self.job.still:  # the pause that clears the rest is another client's
            self.server.clear_inputs()
        if not self.server.clear_prefixes():
            self.server.pause(self.job.options.pause, clear_cache=True)
        self.job.cleared = True
        return seen.expect()

    def _resume(self, seen: Seen) -> Seen:
        self.server.resume()
        if self.job.asked:
            before = self.report.seconds_paused or 0.0
            self.report.seconds_paused = before + monotonic() - self._paused_since
        self.job.asked = self.job.still = False
        return seen.expect(paused=False)

    def _acknowledge(self, seen: Seen) -> Seen:
        assert seen.update is not None
        method = "deltactl_done" if seen.update.written else "deltactl_discard"
        after = self._told(seen, method, id=seen.update.id)
        if after.update is not None and after.update.id == seen.update.id:
            raise after.engine.error or DeltactlError("the server does not let go of the update")
        return after

    def _set_label(self, seen: Seen) -> Seen:
        label = str(self.job.goal.step)
        self.server.set_label(label)
        return seen.expect(label=label)


def unknown_weights(
    seen: Seen, url: str, target: str, cause: DeltactlError | None
) -> DeltactlError:
    """The error for a server whose weights nobody knows."""
    state = "it is left paused" if seen.paused else "and it is NOT paused: it serves them"
    found = cause or seen.engine.poisoned
    remedy = seen.engine.poisoned.hint if seen.engine.poisoned else None
    if remedy is None or remedy.startswith("deltactl apply"):
        remedy = f"deltactl apply {quote(target)} --server {url}, which writes every tensor anew"
    return Malformed(
        f"the server's weights are in an unknown state; {state}",
        file=url,
        found=None if found is None else str(found),
        hint=remedy,
    )


def _sign(seen: Seen) -> object:
    """What changes while a server, or another client, is at work."""
    update = seen.update
    if update is None:
        return (seen.engine.identity,)
    done = (update.fetched_bytes, update.worked_bytes, update.elements)
    times = sorted((update.seconds or {}).items())
    engine = seen.engine
    return (engine.identity, seen.paused, engine.session, update.id, update.phase, done, times)
