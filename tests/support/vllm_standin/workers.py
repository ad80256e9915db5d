"""The plugin's part of the stand-in: the methods of deltactl's worker extension and its engine.

The ranks share one process and hold each a part of every tensor; their sums add up as those of real
ranks do.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deltactl.core.errors import (
    Conflict,
    DeltactlError,
    Malformed,
    NotFound,
    Transient,
    UsageError,
)
from tests.support.vllm_standin import weights
from tests.support.vllm_standin.weights import Staged

STEADY = ("staging", "staged", "ready")


def facts(error: DeltactlError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {**error.facts(), "hint": error.hint, "kind": type(error).__name__}


class Workers:
    """All ranks of one server.

    ``rank_says``: by rank, what its replies say instead. ``before_staged``: called in the thread
    that stages, before it is through. ``write_fails``, ``roll_back_fails``: the next commit writes
    half and fails, and cannot take it back. ``answers_badly``: what a model that went through its
    loader says of itself after each commit. ``unmapped``: names that the map lacks. ``lock``: held
    by whatever runs on the main thread of the workers, as that runs one thing at a time.
    """

    def __init__(self, model: Path, ranks: int, scratch: Path) -> None:
        self.model, self.ranks, self.scratch = model, ranks, scratch
        self.tensors = weights.load(model)
        self.dtype, self.protocol = "bfloat16", 2
        self.rank_says: dict[int, dict[str, Any]] = {}
        self.before_staged: Callable[[], object] | None = None
        self.write_fails = self.roll_back_fails = False
        self.answers_badly: DeltactlError | None = None
        self.unaudited: list[str] = []
        self.identity, self.step, self.state = "unknown", None, None
        self.sums: dict[str, int] = {}  # of what is taken for live
        self.first: tuple[str, dict[str, int]] | None = None  # the directory's state and sums
        self.steps: dict[str, int] = {}
        self.doubt: DeltactlError | None = None
        self.exchanged = False
        self.taken: tuple[str | None, int | None] = (None, None)
        self.asleep: list[str] = []
        self.level = 0  # of the sleep
        self.map: dict[str, Any] | None = None
        self.update: dict[str, Any] | None = None
        self.staged: Staged | None = None
        self.poisoned: DeltactlError | None = None
        self.error: DeltactlError | None = None
        self.audit: dict[str, Any] | None = None
        self.calls: list[str] = []
        self.draft: dict[str, str] | None = None
        self.server = secrets.token_hex(8)
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []

    def close(self) -> None:
        for thread in self._threads:
            thread.join()

    def call(self, method: str, arguments: Mapping[str, Any], session: bool) -> list[Any]:
        """A method of the extension on every rank: the replies. Raises AttributeError for none."""
        act = getattr(self, f"_{method}")
        given = dict(arguments)
        call = given.pop("call", None)
        with self._lock:
            self.error, told = None, None
            try:
                told = act(**given)
            except DeltactlError as error:
                self.error = error
            replies = [self.reply(rank, call, session) for rank in range(self.ranks)]
            replies[0] |= told or {}
            return replies

    def reply(self, rank: int, call: str | None, session: bool) -> dict[str, Any]:
        update = self.update and {**self.update, "error": facts(self.update["error"])}
        if update is not None:
            update["elements"] //= self.ranks
            for key in ("request", "links"):
                update.pop(key, None)
        return {
            "deltactl": "0.1.0",
            "protocol": self.protocol,
            "rank": rank,
            "world_size": self.ranks,
            "server": self.server,
            "draft": self.draft,
            "dtype": self.dtype,
            "model": str(self.model),
            "backend": True,
            "call": call,
            "identity": self.identity,
            "step": self.step,
            "state": self.state,
            "bucket": None,
            "poisoned": facts(self.poisoned),
            "doubt": facts(self.doubt),
            "asleep": self.asleep,
            "error": facts(self.error),
            "update": update,
            "session": session,
            "map": self.map,
            "audit": self.audit,
        } | self.rank_says.get(rank, {})

    # The methods, each on all ranks.

    def _deltactl_state(self) -> None:
        pass

    def _deltactl_tensors(self) -> dict[str, Any]:
        return {"tensors": {n: [t.dtype, list(t.shape)] for n, t in self.tensors.items()}}

    def _deltactl_identify(self, bucket_states: Mapping[str, int]) -> None:
        self._check_awake()
        self.steps |= bucket_states
        if self.identity == "known":
            self.step = bucket_states.get(str(self.state), self.step)
        elif self.identity != "running":
            self.identity = "running"
            self._in_thread(lambda: self._look(bucket_states))

    def _look(self, steps: Mapping[str, int]) -> None:
        found = weights.load(self.model)
        state = weights.state(found)
        with self._lock:
            self.identity = "known"
            sums = {n: weights.part_sum(t.bits, slice(0, t.bits.size)) for n, t in found.items()}
            self.first = state, sums
            if self.state is None:  # else it knows what was written last
                self.state, self.step, self.sums = state, steps.get(state), dict(sums)

    def _deltactl_map(self) -> None:
        self._check_awake()
        if self.identity != "known":
            raise UsageError("the state is not known on all ranks")
        if self.map is None:
            self.map = {"tensors": len(self.tensors), "unmapped": {}, "ignored": []}
            self._conclude()

    def _conclude(self) -> list[str]:
        """Which of two states is live: the one that is taken for so, or the directory's."""
        found = {}
        for name, live in self.tensors.items():
            parts = [weights.part(live.bits.size, rank, self.ranks) for rank in range(self.ranks)]
            total = sum(weights.part_sum(live.bits, which) for which in parts)
            found[name] = total % (1 << 64)
        compared = [name for name in found if name not in self.unaudited]
        differing = [name for name in compared if found[name] != self.sums.get(name)]
        if not differing:
            self.doubt = None
            if self.state is None:  # what it took them for before somebody changed them
                self.state, self.step = self.taken
        elif self.first is not None and found == self.first[1]:
            self.state, self.sums, self.doubt = self.first[0], dict(found), None
            self.step = self.steps.get(self.state)
        else:
            which = "the model directory holds" if self.step is None else f"step {self.step} has"
            what, count = f"the live weights are not what {which}", f"{len(differing)} differ"
            self.doubt = self.doubt or Malformed(what, tensor=differing[0], found=count)
            if self.state is not None:
                self.taken = self.state, self.step
            self.state = self.step = None
        return differing

    def _check_awake(self) -> None:
        if "weights" in self.asleep:
            raise Transient("the server sleeps")

    def sleep(self, level: int) -> None:
        """As /sleep: at level 2 the weights are lost, which shows once they are woken."""
        self.level, self.asleep = max(level, self.level), ["weights", "kv_cache"]

    def wake(self, tags: list[str]) -> None:
        """As /wake_up. Memory that was lost holds anything."""
        if "weights" in tags and "weights" in self.asleep and self.level == 2:
            self.overwrite(lambda bits: bits ^ 0x2A)
        self.asleep = [tag for tag in self.asleep if tag not in tags]
        self.level = self.level if self.asleep else 0

    def overwrite(self, change: Callable[[Any], Any]) -> None:
        """Other weights, of which nobody is told, as by /weight_checker's reset."""
        for live in self.tensors.values():
            live.bits[:] = change(live.bits)

    def _deltactl_stage(self, update: Mapping[str, Any]) -> None:
        if self.update is not None and self.update["phase"] in STEADY:
            raise Conflict("another update is under way")
        self._check_awake()
        if self.map is None:
            raise UsageError("the weight map has not been recorded")
        full = update["full"]
        if not full and self.poisoned is not None:
            raise Conflict("only a full update can be loaded")
        if not full and self.doubt is not None:
            raise self.doubt
        if not full and self.state not in (update["from_state"], update["to_state"]):
            raise Conflict("the update stands on another state than the one served")
        self.update = {
            "id": update["id"],
            "phase": "staging",
            "from_step": update["from_step"],
            "to_step": update["to_step"],
            "full": full,
            "elements": 0,
            "bytes": 0,
            "fetched_bytes": 0,
            "seconds": {},
            "reloaded": [],
            "ignored": [],
            "error": None,
            "request": dict(update),
        }
        held = self.update
        if not full and self.state == update["to_state"]:
            held["phase"], self.step = "already", update["to_step"]
            return
        self._in_thread(lambda: self._stage(held))

    def _stage(self, update: dict[str, Any]) -> None:
        request = update["request"]
        try:
            if request["full"]:
                place = self.scratch / request["id"]
                staged = weights.stage_full(
                    self.tensors, request["bucket"], request["to_step"], place
                )
            else:
                staged = weights.stage_deltas(self.tensors, request["bucket"], request["links"])
            if self.before_staged is not None:
                self.before_staged()
        except DeltactlError as error:
            with self._lock:
                update["phase"], update["error"] = "failed", error
            return
        with self._lock:
            if update is self.update:
                self.staged = staged
                update["phase"], update["fetched_bytes"] = "staged", staged.fetched
                sizes = (bits.size for bits in staged.after.values())
                changed = sum(row.positions.size for row in staged.rows)
                update["elements"] = sum(sizes) if request["full"] else changed

    def _deltactl_seal(self, id: str) -> None:
        update = self._own(id)
        if update["phase"] != "staged":
            raise Conflict("not all ranks have staged the update")
        assert self.staged is not None
        for row in self.staged.rows:
            size = self.tensors[row.name].bits.size
            parts = [row.sums(size, rank, self.ranks) for rank in range(self.ranks)]
            total = [sum(column) % (1 << 64) for column in zip(*parts, strict=True)]
            known = [n for n in zip(row.expected, total, strict=True) if n[0] is not None]
            if any(expected != found for expected, found in known):
                update["phase"] = "refused"
                update["error"] = Conflict("the live weights are not those", tensor=row.name)
                return
        update["phase"] = "ready"

    def commit(self, id: str) -> None:
        """What receive_weights does on every rank; raises nothing."""
        with self._lock:
            if self.update is None or self.update["id"] != id:
                self.error = NotFound("no such update is staged on this rank", found=id)
            elif self.update["phase"] == "ready":
                self._commit(self.update)

    def _commit(self, update: dict[str, Any]) -> None:
        staged, request = self.staged, update["request"]
        assert staged is not None
        if not staged.check(self.tensors):
            update["phase"] = "refused"
            update["error"] = Conflict("the live weights are not those that the update stands on")
            return
        before = {name: self.tensors[name].bits.copy() for name in staged.after}
        if self.write_fails:
            self.write_fails = False
            half = [*staged.after][: len(staged.after) // 2 or 1]
            staged.write(self.tensors, {name: staged.after[name] for name in half})
            error = DeltactlError("the weights could not be written")
            if self.roll_back_fails:
                self.roll_back_fails = False
                update["phase"], update["error"], self.poisoned = "failed", error, error
                self.step = self.state = None
                return
            staged.write(self.tensors, before)
            update["phase"], update["error"] = "rolled_back", error
            return
        staged.write(self.tensors)
        if (bad := self.answers_badly) is not None:
            update["phase"], update["error"], self.poisoned = "failed", bad, bad
            self.step = self.state = None
            return
        for row in staged.rows:
            size = self.tensors[row.name].bits.size
            old, new, _ = row.sums(size, 0, 1)
            self.sums[row.name] = (self.sums.get(row.name, 0) - old + new) % (1 << 64)
        if request["full"]:
            for name, live in self.tensors.items():
                self.sums[name] = weights.part_sum(live.bits, slice(0, live.bits.size))
        update["phase"], self.poisoned, self.identity = "committed", None, "known"
        self.doubt = None
        self.step, self.state = request["to_step"], request["to_state"]

    def _deltactl_discard(self, id: str) -> None:
        if self._own(id)["phase"] == "committed":
            raise Conflict("the update is committed")
        self.update = self.staged = None

    def _deltactl_done(self, id: str) -> None:
        if self._own(id)["phase"] in STEADY:
            raise Conflict("the update is under way")
        self.update = self.staged = None

    def _deltactl_audit(self) -> None:
        self._check_awake()
        if self.exchanged:  # another loader made new parameters: where they lie is not known
            self.exchanged, self.map, self.identity = False, None, "unknown"
            return
        if self.identity != "known" or self.map is None:
            raise UsageError("nothing to audit against")
        self.audit = {"phase": "running", "checked": 0, "differing": [], "unaudited": []}

    def _deltactl_audit_seal(self) -> None:
        differing = self._conclude()
        self.audit = {
            "phase": "done",
            "checked": len(self.tensors) - len(self.unaudited),
            "differing": differing,
            "unaudited": self.unaudited,
        }

    def _own(self, id: str) -> dict[str, Any]:
        if self.update is None or self.update["id"] != id:
            raise NotFound("no such update", found=id)
        return self.update

    def _in_thread(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()
