"""What one rank serves: the state of its weights, where they lie, and whether they are still that.

Nothing is believed of live weights: they are summed, in a thread, and are the state whose sums they
have. The states that are looked for are the one that was written last and that of the directory
that the model was loaded from. Where they are neither, nobody knows them: ``state`` is None and
``doubt`` says why, and a full update alone helps. So it is where weights were never loaded
(``--load-format dummy``), were loaded anew or reset by somebody else, or were lost in a sleep.

The weight map is recorded without being believed, too. A tensor lies as it says once it was found
to hold what a checkpoint does. While the weights are unknown the others may just hold something
else; after one full load by the model's own loader they do not, and are taken out of the map.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deltactl
from deltactl.core.errors import Conflict, DeltactlError, Malformed, Transient, Unproven, UsageError
from deltactl.vllm.update.contract import Values, Work
from deltactl.vllm.update.peers import Peers
from deltactl.vllm.update.phase import facts, gist, phases, wrapped
from deltactl.vllm.update.sleeping import WEIGHTS

PROTOCOL = 2
"""Rises when the methods or the keys of ``state()`` change so that a client has to know."""

ANEW = "deltactl apply BUCKET@STEP --server URL"
"""What mends a server whose weights nobody knows."""


@dataclass(slots=True)
class Known:
    """A state that may be live. ``sums``: of each tensor; ``rest``: of all that no mapped tensor
    reaches, None where it was never seen. ``bucket``: where it came from."""

    state: str
    sums: dict[str, int]
    step: int | None = None
    bucket: str | None = None
    rest: int | None = None


class Served:
    """See the module. ``refusal`` is why this server takes no updates at all, if it does not."""

    def __init__(self, work: Work, peers: Peers, refusal: DeltactlError | None = None) -> None:
        self._work, self._peers, self._refusal = work, peers, refusal
        self._server = secrets.token_hex(8)  # by which two names of one server are known
        self._standing = refusal  # an error that stands until its cause is gone
        self._error = refusal  # of the last call, or of the work that it began
        self._lock = threading.Lock()  # a thread's result against the main thread's changes
        self._identity = "unknown"
        self._known: list[Known] = []  # that may be live; the one that should be is the first
        self._first: Known | None = None  # the directory's
        self._live = False  # whether the first that may be live is what was found to be live
        self._rest = 0  # what all that no mapped tensor reaches added up to
        self._doubt: DeltactlError | None = None
        self._poison: DeltactlError | None = None
        self.asleep: Callable[[], tuple[str, ...]] = tuple  # which of vLLM's tags are
        self._agreed = False  # on who owns what; the same on all ranks
        self._map: dict[str, Any] | None = None
        self._found: Values | None = None  # this rank's part of the sums, in order of name
        self._commits = 0
        self._audit: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """What this rank knows, as JSON."""
        with self._lock:
            known = self._serves
            return {
                "deltactl": deltactl.__version__,
                "protocol": PROTOCOL,
                "rank": self._peers.rank,
                "world_size": self._peers.size,
                "server": self._server,
                "identity": self._identity,
                "step": known and known.step,
                "state": known and known.state,
                "bucket": known and known.bucket,
                "poisoned": facts(self._poison),
                "doubt": facts(self._doubt),
                "error": facts(self._error),
                "map": self._map,
                "audit": self._audit,
                "asleep": list(self.asleep()),
            }

    @property
    def _serves(self) -> Known | None:
        """What is live; None where nobody knows it."""
        return self._known[0] if self._live else None

    def tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]] | None:
        """Type and shape of each tensor of the checkpoint; None, and ``error``, where they cannot
        be read. The same on all ranks, and none asks another."""
        with self._told():
            return self._work.tensors()
        return None

    def identify(self, steps: Mapping[str, int] | None) -> None:
        """Collective: find out which state is served, in a thread. ``steps``: step of each state.

        Where the state is known already, only the step is looked up anew.
        """
        if self._sleeps():
            return
        if not self._stands() and not self._agree():
            return
        with self._told():
            known = dict(steps or {})
            if self._identity == "running":
                return
            for one in self._known:
                one.step = known.get(one.state, one.step)
            if self._identity == "known":
                return
            self._identity, self._standing = "running", self._refusal
            self._error = self._standing
            in_thread(lambda: self._identify(known), "deltactl-identify")

    def _sleeps(self) -> bool:
        """Whether the weights are away, so that nothing of them may be read; then that is told."""
        if WEIGHTS not in self.asleep():
            return False
        with self._lock:
            self._error = Transient(
                "the server sleeps: its weights are not in memory",
                hint="wake them, POST /wake_up?tags=weights, then try again",
            )
        return True

    def _stands(self) -> bool:
        """Collective: whether the map is recorded, and all parameters lie where it says. If they do
        not, somebody has exchanged them, and the map is to be recorded anew."""
        stand = all(self._peers.gather(self._agreed and self._work.stands()))
        if not stand:
            with self._lock:
                self._agreed, self._map, self._live = False, None, False
                if self._identity == "known":
                    self._identity = "unknown"
        return stand

    def _agree(self) -> bool:
        """Record the weight map and settle with the other ranks who owns what; whether it is."""
        mine: Any = None
        error: DeltactlError | None = None
        try:
            mine = self._work.record()
        except Exception as raised:
            error = wrapped(raised, "the weight map could not be recorded")
        everyone = self._peers.gather((mine, error and gist(error)))
        with self._told():
            for rank, (_, why) in enumerate(everyone):
                if why is not None:
                    self._identity = "failed"
                    self._standing = error or DeltactlError(f"rank {rank}: {why}")
                    raise self._standing
            self._work.agree([record for record, _ in everyone], self._peers.rank)
            self._agreed = True
        return self._agreed

    def _identify(self, steps: Mapping[str, int]) -> None:
        try:
            identity = self._work.identify()
            found = self._work.sums(sorted(identity.sums))
        except Exception as error:
            with self._lock:
                self._identity = "failed"
                self._standing = wrapped(error, "the model directory cannot be identified")
                self._error = self._standing
            return
        with self._lock:
            self._identity, self._found = "known", found
            if identity.state not in [known.state for known in self._known]:
                step = steps.get(identity.state)
                self._first = Known(identity.state, dict(identity.sums), step)
                self._known.append(self._first)

    def record_map(self) -> None:
        """Collective: conclude from the sums that the identification found what is live."""
        if self._map is not None:
            return
        everyone = self._peers.gather((self._identity, [known.state for known in self._known]))
        with self._told():
            if any(phase != "known" for phase, _ in everyone):
                raise UsageError("the state is not known on all ranks", found=phases(everyone))
            if any(states != everyone[0][1] for _, states in everyone):
                raise Conflict("the ranks were loaded from different states")
            assert self._found is not None
            self._conclude(unsigned(self._peers.total(self._found)))

    def _conclude(self, total: list[int]) -> list[str]:
        """Tell from the sums over all ranks which of the known states is live, and which tensors
        are not those of the first. The same on all ranks. With the lock held."""
        sums, self._rest = dict(zip(self._names, total[:-1], strict=True)), total[-1]
        for known in self._known:
            self._work.prove(sums, known.sums)
        self._map, self._found = self._work.describe(), None
        differ = [self._differing(known.sums, sums) for known in self._known]
        whole = not self._map["unmapped"]
        fits = [
            not names and (known.rest == self._rest or (known.rest is None and whole))
            for known, names in zip(self._known, differ, strict=True)
        ]
        self._live = any(fits) and self._poison is None
        if self._live:
            at = fits.index(True)
            self._known[at].rest, self._doubt = self._rest, None
            self._known.insert(0, self._known.pop(at))
        else:
            if self._rest not in [known.rest for known in self._known]:
                self._work.distrust()
            self._doubt = self._doubt_of(self._known[0], differ[0])
        return differ[0]

    @property
    def _names(self) -> list[str]:
        """Of all tensors, in the order of sums."""
        return sorted(self._known[0].sums)

    def _checked(self) -> list[str]:
        """The tensors that can be compared with a checkpoint."""
        described = self._work.describe()
        skipped = {*described["unmapped"], *described["ignored"]}
        return [name for name in self._names if name not in skipped]

    def _differing(self, expected: Mapping[str, int], sums: Mapping[str, int]) -> list[str]:
        return [name for name in self._checked() if sums[name] != expected[name]]

    def _doubt_of(self, known: Known, differing: list[str]) -> DeltactlError:
        which = "the model directory holds" if known.step is None else f"step {known.step} has"
        if differing:
            checked = len(self._checked())
            return Malformed(
                f"the live weights are not what {which}",
                tensor=differing[0],
                found=f"{len(differing)} of {checked} tensors differ",
                hint=ANEW,
            )
        what = "something beside the mapped tensors is not as it was loaded"
        if known.rest is None and self._map is not None:
            unmapped = sorted(self._map["unmapped"])
            what = f"nothing shows what {len(unmapped)} tensors hold, {unmapped[0]!r} among them"
        return Unproven(what, hint=ANEW)

    def audit(self) -> None:
        """Collective: sum in a thread all of this rank's part of the live weights."""
        if self._sleeps():
            return
        if self._agreed and not self._stands():
            return
        with self._told():
            if self._map is None or self._poison is not None:
                raise UsageError("there is nothing to audit against", found=self._identity)
            if self._audit is not None and self._audit["phase"] == "running":
                return
            self._audit, self._found = audit_row("running"), None
            names, commits = self._names, self._commits
            in_thread(lambda: self._sum(names, commits), "deltactl-audit")

    def _sum(self, names: list[str], commits: int) -> None:
        error: DeltactlError | None = None
        try:
            found = self._work.sums(names)
        except Exception as raised:
            error = wrapped(raised, "the live weights could not be summed")
        with self._lock:
            if error is None and commits != self._commits:
                error = Transient("an update came between")
            if error is None:
                self._found = found
            else:
                self._error, self._audit = error, audit_row("failed")

    def seal_audit(self) -> None:
        """Collective: add the ranks' sums and compare with what the chain says must be live."""
        phase = None if self._audit is None else self._audit["phase"]
        found = self._found if phase == "running" else None
        everyone = self._peers.gather((phase, found is not None, self._commits))
        failed = any(theirs in (None, "failed") for theirs, _, _ in everyone)
        if failed or any(not there for _, there, _ in everyone):
            with self._lock:
                if failed and self._audit is not None:
                    self._audit = audit_row("failed")
            return
        assert found is not None
        total = unsigned(self._peers.total(found))
        with self._told():
            differing, checked = self._conclude(total), self._checked()
            self._audit = audit_row("done") | {
                "checked": len(checked),
                "differing": differing,
                "unaudited": [name for name in self._names if name not in checked],
            }

    @contextmanager
    def _told(self) -> Iterator[None]:
        """With the lock held, turn what is raised within into ``error`` of the state, unless one
        stands that explains it."""
        with self._lock:
            self._error = self._standing
            try:
                yield
            except Exception as error:
                self._error = self._standing or wrapped(error, "the request failed")


def unsigned(values: Values) -> list[int]:
    """Sums modulo 2^64, as they stand in headers."""
    return [int(value) % (1 << 64) for value in values]


def in_thread(act: Callable[[], None], name: str) -> None:
    """Have a thread do it that nobody waits for."""
    threading.Thread(target=act, name=name, daemon=True).start()


def audit_row(phase: str) -> dict[str, Any]:
    """``audit`` of the state, where nothing was compared yet."""
    return {"phase": phase, "checked": 0, "differing": [], "unaudited": []}
