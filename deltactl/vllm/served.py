"""What one rank serves: the state of its weights, where they lie, and whether they are still that.

The model directory says which state was loaded; it is hashed, and the live weights are summed, in a
thread. The weight map is recorded without being believed: once the ranks' sums are added, what does
not hold what the directory says is taken out of it. An audit sums the live weights again, against
the directory's sums as the links since have changed them.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deltactl
from deltactl.core.errors import Conflict, DeltactlError, UsageError
from deltactl.vllm.contract import Values, Work
from deltactl.vllm.peers import Peers
from deltactl.vllm.update import facts, gist, phases, wrapped

PROTOCOL = 1
"""Rises when the methods or the keys of ``state()`` change so that a client has to know."""


class Served:
    """See the module. ``refusal`` is why this server takes no updates at all, if it does not."""

    def __init__(self, work: Work, peers: Peers, refusal: DeltactlError | None = None) -> None:
        self._work, self._peers, self._refusal = work, peers, refusal
        self._server = secrets.token_hex(8)  # by which two names of one server are known
        self._standing = refusal  # an error that stands until its cause is gone
        self._error = refusal  # of the last call, or of the work that it began
        self._lock = threading.Lock()  # a thread's result against the main thread's changes
        self._identity = "unknown"
        self._step: int | None = None
        self._state: str | None = None
        self._bucket: str | None = None
        self._poison: DeltactlError | None = None
        self._agreed = False  # on who owns what; the same on all ranks
        self._map: dict[str, Any] | None = None
        self._sums: dict[str, int] = {}  # that all of each tensor has to have
        self._found: Values | None = None  # this rank's part of them, in order of name
        self._commits = 0
        self._audit: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """What this rank knows, as JSON."""
        with self._lock:
            return {
                "deltactl": deltactl.__version__,
                "protocol": PROTOCOL,
                "rank": self._peers.rank,
                "world_size": self._peers.size,
                "server": self._server,
                "identity": self._identity,
                "step": self._step,
                "state": self._state,
                "bucket": self._bucket,
                "poisoned": facts(self._poison),
                "error": facts(self._error),
                "map": self._map,
                "audit": self._audit,
            }

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
        if not self._agreed and not self._agree():
            return
        with self._told():
            known = dict(steps or {})
            if self._identity == "running":
                return
            if self._identity == "known":
                self._step = known.get(self._state or "", self._step)
                return
            self._identity, self._standing = "running", self._refusal
            self._error = self._standing
            in_thread(lambda: self._identify(known), "deltactl-identify")

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
            self._identity, self._state = "known", identity.state
            self._sums, self._found = dict(identity.sums), found
            self._step = steps.get(identity.state)

    def record_map(self) -> None:
        """Collective: prove the weight map by the sums that the identification found."""
        if self._map is not None:
            return
        everyone = self._peers.gather((self._identity, self._state))
        with self._told():
            if any(phase != "known" for phase, _ in everyone):
                raise UsageError("the state is not known on all ranks", found=phases(everyone))
            if len({state for _, state in everyone}) > 1:
                raise Conflict("the ranks were loaded from different states")
            assert self._found is not None
            names, total = sorted(self._sums), unsigned(self._peers.total(self._found))
            try:
                self._work.prove(dict(zip(names, total, strict=True)), self._sums)
            except DeltactlError as error:
                self._identity, self._standing = "failed", error
                raise
            self._map, self._found = self._work.describe(), None

    def audit(self) -> None:
        """Sum in a thread all of this rank's part of the live weights."""
        with self._told():
            if self._map is None or self._poison is not None:
                raise UsageError("there is nothing to audit against", found=self._identity)
            if self._audit is not None and self._audit["phase"] == "running":
                return
            self._audit, self._found = _audit_row("running"), None
            names, commits = sorted(self._sums), self._commits
            in_thread(lambda: self._sum(names, commits), "deltactl-audit")

    def _sum(self, names: list[str], commits: int) -> None:
        try:
            found = self._work.sums(names)
            if commits != self._commits:
                raise Conflict("an update came between")
        except Exception as raised:
            with self._lock:
                self._error = wrapped(raised, "the live weights could not be summed")
                self._audit = _audit_row("failed")
            return
        with self._lock:
            self._found = found

    def seal_audit(self) -> None:
        """Collective: add the ranks' sums and compare with what the chain says must be live."""
        phase = None if self._audit is None else self._audit["phase"]
        found = self._found if phase == "running" else None
        everyone = self._peers.gather((phase, found is not None, self._commits))
        failed = any(theirs in (None, "failed") for theirs, _, _ in everyone)
        if failed or any(not there for _, there, _ in everyone):
            with self._lock:
                if failed and self._audit is not None:
                    self._audit = _audit_row("failed")
            return
        assert found is not None
        total = unsigned(self._peers.total(found))
        with self._told():
            known = self._work.describe()
            skipped = {*known["unmapped"], *known["ignored"]}
            sums = dict(zip(sorted(self._sums), total, strict=True))
            checked = [name for name in sums if name not in skipped]
            differing = [name for name in checked if sums[name] != self._sums[name]]
            self._audit = _audit_row("done") | {
                "checked": len(checked),
                "differing": differing,
                "unaudited": sorted(skipped & sums.keys()),
            }
            self._found = None

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


def _audit_row(phase: str) -> dict[str, Any]:
    return {"phase": phase, "checked": 0, "differing": [], "unaudited": []}
