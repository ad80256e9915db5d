"""The state of one rank of a running server, and one update of it from stage to commit.

::

    stage -> staging -> staged -> seal -> ready -> commit -> committed
                 |                  |        |                   (all ranks wrote and read back)
                 v                  v        +-> refused          live bits are not the old ones
              failed             refused     +-> rolled_back      a rank failed, all took it back
                                    |        +-> failed           a rank could not: poisoned
                                    +-> already                   the target is live, nothing to do

Every phase stays visible in ``state()`` until ``done`` or ``discard``, so that whoever comes later
finds out what an earlier client left behind. At most one update exists at a time.

A run of links is staged on weights that were found to be what they should be; so who wants one
staged has them summed first (``audit``), since anybody may have changed them.

Methods return at once or after a few collectives; what takes long runs in a thread. None raises:
an exception from one rank would leave the replies of the others in vLLM's queue, where each later
call would get the one before (so vLLM 0.32). What went wrong is in the state. ``identify``,
``record_map``, ``seal``, ``commit``, ``audit`` and ``seal_audit`` are collective: every rank enters
every collective whatever happened to it, and all come to the same verdict.

Nothing here knows vLLM: ``Work`` is what can be done to the model, ``Peers`` are the other ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from deltactl.core.errors import Conflict, DeltactlError, Malformed, NotFound, UsageError
from deltactl.vllm.update.canary import Canary
from deltactl.vllm.update.contract import Staged, Work
from deltactl.vllm.update.peers import Peers
from deltactl.vllm.update.phase import STEADY, Update, checked_request, gist, phases, wrapped
from deltactl.vllm.update.served import Known, Served, audit_row, in_thread, unsigned
from deltactl.vllm.update.sleeping import CACHE

REPAIR = "deltactl apply BUCKET@STEP --server URL --repair"
"""What mends a server whose weights are in doubt."""

_ANOTHER_REFUSED = "another rank refused the update"


class Serving(Served):
    """One rank of a server: what it serves, and the update under way."""

    def __init__(
        self,
        work: Work,
        peers: Peers,
        refusal: DeltactlError | None = None,
        canary: Canary | None = None,
    ) -> None:
        super().__init__(work, peers, refusal)
        self._update: Update | None = None
        self._canary = canary

    def state(self) -> dict[str, Any]:
        """What this rank knows, as JSON; the part of ``deltactl_state()`` that needs no vLLM."""
        with self._lock:
            told = None if self._update is None else self._update.as_json()
        return {**super().state(), "update": told}

    def stage(self, request: Mapping[str, Any]) -> None:
        """Begin an update in a thread, or say in ``error`` why not.

        ``request``: ``id``, ``bucket``, ``from_step``, ``from_state``, ``to_step``, ``to_state``,
        ``links`` (object names, in order) and ``full``.
        """
        if self._sleeps():
            return
        with self._told():
            update = Update(checked_request(request))
            self._admit(update)
            self._update = update
            serves = self._serves
            if not update.full and serves and serves.state == update.request["to_state"]:
                update.phase = "already"
                serves.step, serves.bucket = update.request["to_step"], update.request["bucket"]
                return
            in_thread(lambda: self._stage(update), "deltactl-stage")

    def _admit(self, update: Update) -> None:
        """Raise unless this update may begin now."""
        request, before = update.request, self._update
        if self._refusal is not None:
            raise self._refusal
        if before is not None and before.id == update.id:
            raise Conflict("this update has been staged", found=f"{before.id}: {before.phase}")
        if before is not None and before.phase in STEADY:
            raise Conflict("another update is under way", found=f"{before.id}: {before.phase}")
        if self._map is None:
            what = "the weight map has not been recorded and proven"
            raise UsageError(
                what,
                found=f"identity {self._identity}",
                hint="call deltactl_identify, then deltactl_map",
            )
        if update.full:
            return
        if self._poison is not None:
            what = "the weights are in an unknown state; only a full update can be loaded"
            raise Conflict(what, hint=REPAIR)
        if self._doubt is not None:
            raise self._doubt
        serves = self._serves
        if serves is None or serves.state not in (request["from_state"], request["to_state"]):
            raise Conflict(
                "the update stands on another state than the one served",
                step=None if serves is None else serves.step,
                expected=request["from_state"],
                found=None if serves is None else serves.state,
            )

    def _stage(self, update: Update) -> None:
        """In its thread: stage, and keep the result if the update is still wanted."""

        def tell(fetched: int, worked: int) -> None:
            with self._lock:
                update.told |= {"fetched_bytes": fetched, "worked_bytes": worked}

        try:
            staged = self._work.stage(update.request, tell)
        except Exception as raised:
            with self._lock:
                if update.phase == "staging":
                    update.end("failed", wrapped(raised, "the update could not be staged"))
            return
        with self._lock:
            if update is self._update and update.phase == "staging":
                update.keep(staged)
                update.phase = "staged"

    def seal(self, id_: str) -> None:
        """Collective: add the ranks' sums, compare with the headers, and make the update ready."""
        mine = self._update if self._update is not None and self._update.id == id_ else None
        phase = None if mine is None else mine.phase  # as it is now: the thread may change it
        error = None if mine is None else mine.error
        shape = None if mine is None or mine.staged is None else mine.staged.values.shape
        everyone = self._peers.gather((phase, error and gist(error), shape))
        with self._told():
            if mine is None:
                raise NotFound("no such update is staged on this rank", found=id_)
            for rank, (theirs, why, _) in enumerate(everyone):
                if theirs in ("failed", "refused"):
                    if phase in STEADY:
                        mine.end("failed", DeltactlError(f"rank {rank}: {why}"))
                    return
            if any(theirs == "staging" or theirs is None for theirs, _, _ in everyone):
                raise Conflict("not all ranks have staged the update", found=phases(everyone))
            if any(theirs != "staged" for theirs, _, _ in everyone):
                if len({theirs for theirs, _, _ in everyone}) > 1:
                    raise Conflict("the ranks are in different phases", found=phases(everyone))
                return  # sealed before
            self._seal(mine, everyone)

    def _seal(self, mine: Update, everyone: list[Any]) -> None:
        """All ranks have staged it: add up, and come to one verdict."""
        assert mine.staged is not None
        if len({shape for _, _, shape in everyone}) > 1:
            mine.end("refused", DeltactlError("the ranks staged different tensors"))
            return
        total = self._peers.total(mine.staged.values)
        try:
            phase = mine.staged.judge(total)
            mine.sums_after = mine.staged.sums_after(self._known[0].sums, total)
            if phase == "ready" and mine.staged.reloaded and self._canary is not None:
                self._sung(mine, self._canary.before)
        except Exception as raised:  # on every rank alike
            mine.end("refused", wrapped(raised, "the sums could not be compared"))
            return
        mine.phase = phase
        if phase == "already":
            self._take_over(mine, "already")

    def commit(self, id_: str) -> None:
        """Collective, in the pause: write on all ranks, or on none."""
        update = self._update if self._update is not None and self._update.id == id_ else None
        error: DeltactlError | None = None
        standing = 0  # 0: may not, 1: nothing to do, 2: will
        if update is None:
            error = NotFound("no such update is staged on this rank", found=id_)
        elif self._sleeps():
            error = self._error
        elif update.phase in ("committed", "already"):
            standing = 1
        elif update.phase == "ready":
            standing = 2
        else:
            error = Conflict("the update is not ready", found=f"{id_}: {update.phase}")
        least = self._peers.least(standing)
        if least == 2 and update is not None:
            self._write(update)
            return
        with self._lock:
            self._error = error or self._error
            if update is not None and update.phase == "ready":
                update.end("refused", error or DeltactlError(_ANOTHER_REFUSED))

    def _write(self, update: Update) -> None:
        """All ranks are ready: replace the bits, and take it back if any rank did not.

        What is not foreseen, as that a rank is gone, leaves weights that nobody knows.
        """
        try:
            self._replace_or_restore(update)
        except Exception as raised:
            with self._lock:
                self._poisoned_by(update, wrapped(raised, "the ranks could not agree"))

    def _replace_or_restore(self, update: Update) -> None:
        staged, error = _staged(update), None
        done = 0  # 0: failed, 1: refused and left as it was, 2: replaced
        try:
            done = 2 if self._timed(update, "write", staged.replace) else 1
        except Exception as raised:
            error = wrapped(raised, "the weights could not be written")
        least = self._peers.least(done)
        if least == 2:  # on all ranks, before anything that cannot be taken back
            error = self._completed(update)
            least = self._peers.least(0 if error else 2)
        if least == 2 and staged.reloaded:
            error = self._summed_again(update) or self._answered(update)
            least = 0 if error else 2  # on all ranks alike
        if least == 2:
            with self._lock:
                self._take_over(update, "committed")
            return
        if done == 1:
            error = Conflict("the live weights are not those that the update stands on")
        another = _ANOTHER_REFUSED if least == 1 else "another rank could not write its part"
        error = error or DeltactlError(another)
        restored = self._peers.least(1 if done == 1 else self._restored(staged))
        with self._lock:
            if restored:
                self._error = error
                update.end("refused" if least == 1 else "rolled_back", error)
            else:
                self._poisoned_by(update, error)

    def _completed(self, update: Update) -> DeltactlError | None:
        """Write the rest; what kept it from that."""
        try:
            self._timed(update, "complete", _staged(update).complete)
        except Exception as raised:
            return wrapped(raised, "the weights could not be written")
        return None

    def _answered(self, update: Update) -> DeltactlError | None:
        """Ask the model that has been reloaded; what is wrong with its answer."""
        try:
            if self._canary is not None:
                self._sung(update, self._canary.after)
        except Exception as raised:
            return wrapped(raised, "the model could not be asked")
        return None

    def _sung(self, update: Update, act: Callable[[], None]) -> None:
        """Have the canary do it, unless the KV cache sleeps, which it needs; then that is told."""
        if CACHE in self.asleep():
            update.told["unasked"] = True
        else:
            act()

    def _summed_again(self, update: Update) -> DeltactlError | None:
        """Collective: what is wrong with all of the weights after the model's loader has loaded
        some; the same on all ranks. What differs now, and was never proven, its layer changes."""
        if not all(self._peers.gather(self._work.stands())) and not self._agree():
            return self._error or DeltactlError(_ANOTHER_REFUSED)
        total = self._all_sums()
        if update.full and total is not None:
            before = self._work.describe()
            self._work.prove(dict(zip(self._names, total, strict=False)), update.sums_after)
            try:
                self._work.leave_unproven()
            except DeltactlError as error:  # on every rank alike
                return error
            if self._work.describe() != before:  # then the rest is another
                total = self._all_sums()
        if total is None:
            return DeltactlError("the weights that were loaded could not be summed")
        sums = dict(zip(self._names, total[:-1], strict=True))
        differing = self._differing(update.sums_after, sums)
        if differing:
            what = "the model's loader did not load what the step has"
            return Malformed(what, tensor=differing[0], found=f"{len(differing)} tensors differ")
        with self._lock:
            self._rest, self._map = total[-1], self._work.describe()
        return None

    def _all_sums(self) -> list[int] | None:
        """Collective: the sums over all ranks, and last that of the rest; None where a rank cannot
        tell its own."""
        found = None
        with contextlib.suppress(Exception):
            found = self._work.sums(self._names)
        if not self._peers.least(0 if found is None else 1) or found is None:
            return None
        return unsigned(self._peers.total(found))

    def _poisoned_by(self, update: Update, error: DeltactlError) -> None:
        """Nobody knows the weights. With the lock held."""
        what = "an update failed half-way and could not be taken back"
        self._poison = DeltactlError(what, found=str(error), hint=error.hint or REPAIR)
        self._error, self._live = error, False
        update.end("failed", error)

    def _restored(self, staged: Staged) -> int:
        try:
            return int(staged.roll_back())
        except Exception:
            return 0

    def _take_over(self, update: Update, phase: str) -> None:
        """What is live now is the target. With the lock held."""
        request = update.request
        self._work.took_over(update.staged)
        ends = request["to_state"], update.sums_after, request["to_step"], request["bucket"]
        self._known = [Known(*ends, rest=self._rest)]
        if self._first is not None and self._first.state != request["to_state"]:
            self._known.append(self._first)
        self._live, self._doubt, self._poison = True, None, None
        self._error = self._standing
        self._commits += 1
        self._found = None  # of an audit: what it has summed is gone
        if self._audit is not None and self._audit["phase"] == "running":
            self._audit = audit_row("failed")
        update.end(phase)

    def discard(self, id_: str) -> None:
        """Forget an update that was not committed; its memory is freed."""
        with self._told():
            if self._update is None or self._update.id != id_:
                raise NotFound("no such update", found=id_)
            if self._update.phase == "committed":
                raise Conflict("the update is committed", found=id_, hint="deltactl_done")
            self._update = None

    def done(self, id_: str) -> None:
        """The client is through with it."""
        with self._told():
            if self._update is None or self._update.id != id_:
                raise NotFound("no such update", found=id_)
            if self._update.phase in STEADY:
                raise Conflict("the update is under way", found=f"{id_}: {self._update.phase}")
            self._update = None

    def _timed(self, update: Update, name: str, act: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return act()
        finally:
            update.told.setdefault("seconds", {})[name] = time.perf_counter() - start


def _staged(update: Update) -> Staged:
    assert update.staged is not None
    return update.staged
