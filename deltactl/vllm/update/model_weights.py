"""What an update does to the model of one rank: the map, staged bits and sums, tied together."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from deltactl.bucket import open_bucket
from deltactl.chain.store import Bucket
from deltactl.checkpoint.checkpoint import Checkpoint, open_checkpoint
from deltactl.core.errors import Conflict, DeltactlError, Unsupported
from deltactl.vllm.layout import proven
from deltactl.vllm.layout.ownership import owners
from deltactl.vllm.layout.weight_map import TensorSpec, WeightMap, addresses, record
from deltactl.vllm.staging import live_weights, staging, totals
from deltactl.vllm.update import host
from deltactl.vllm.update.contract import Identity, Tell, Values
from deltactl.vllm.update.phase import wrapped

if TYPE_CHECKING:
    import torch


Reload = Callable[[tuple[str, ...], Checkpoint], object]
Digests = Mapping[str, str]
"""Of a state's tensors, by name."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory with a model, and the tensors in it."""

    path: Path
    specs: list[TensorSpec]


def _found(find: Callable[[], Path]) -> Directory | DeltactlError:
    try:
        path = find().resolve()
        with open_checkpoint(path) as opened:
            tensors = opened.tensors.values()
            return Directory(path, [TensorSpec(t.name, t.dtype, t.shape) for t in tensors])
    except Exception as error:
        found = wrapped(error, "the model was loaded from no directory that can be read")
        hint = "start vLLM on a directory with the model's weights, also with --load-format dummy"
        found.hint = found.hint or hint
        return found


class ModelWork:
    """The ``Work`` of one rank of ``ranks`` on ``model``, which was loaded from a directory.

    ``find``: gives that directory, or raises; it is asked once, here, and links are resolved then,
    so that what is done to the path later misleads nobody. ``reload``: loads tensors by name from a
    checkpoint through the model's own loader, in the pause.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        find: Callable[[], Path],
        ranks: int,
        reload: Reload | None = None,
    ) -> None:
        self._model, self._ranks, self._reload = model, ranks, reload
        self._directory = _found(find)
        self._hashing: Future[host.Identity] | None = None
        self._recorded: WeightMap | None = None
        self._addresses: dict[str, int] = {}  # of the parameters when it was recorded
        self._first: dict[str, Digests] = {}  # of the directory's state, by that state
        self._digests: dict[str, Digests] = {}  # of all states that may be live
        self._tied: dict[str, str] = {}  # a tensor that is ignored -> the one that stands for it

    @property
    def directory(self) -> Path:
        """Where the model was loaded from. Raises what kept it from being found."""
        if isinstance(self._directory, DeltactlError):
            raise self._directory
        return self._directory.path

    @property
    def _specs(self) -> list[TensorSpec]:
        if isinstance(self._directory, DeltactlError):
            raise self._directory
        return self._directory.specs

    @property
    def map(self) -> WeightMap:
        """The map, once it is recorded."""
        assert self._recorded is not None
        return self._recorded

    def look(self) -> None:
        """Begin to hash the directory in a thread: soon after loading its files are in memory."""
        self._hashing = Future()
        Thread(target=self._hash, args=(self._hashing,), daemon=True).start()

    def _hash(self, into: Future[host.Identity]) -> None:
        try:
            into.set_result(host.identify(self.directory))
        except Exception as error:
            into.set_exception(error)

    def stands(self) -> bool:
        """See Work."""
        return self._recorded is not None and addresses(self._model) == self._addresses

    def record(self) -> Any:
        """See Work."""
        specs = self._specs
        self._addresses = addresses(self._model)
        self._recorded = record(self._model, specs, ranks=self._ranks)
        return self._recorded.summary()

    def agree(self, records: list[Any], rank: int) -> None:
        """See Work."""
        if self._ranks > 1:
            self.map.settle(owners(records), rank)

    def identify(self) -> Identity:
        """See Work."""
        hashing, self._hashing = self._hashing, None
        try:
            found = host.identify(self.directory) if hashing is None else hashing.result()
        except Conflict:  # it was being written to then
            found = host.identify(self.directory)
        self._first = {found.state: {name: t.digest for name, t in found.tensors.items()}}
        self._digests |= self._first
        self._tied = _tied(self.map, found)
        return Identity(found.state, {n: t.touch_sum for n, t in found.tensors.items()})

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """See Work."""
        return {spec.name: (spec.dtype, spec.shape) for spec in self._specs}

    def sums(self, names: list[str]) -> Values:
        """See Work."""
        found = totals.owned_sums(self.map, [name for name in names if name in self.map.tensors])
        rows = [found.get(name, 0) for name in names]
        return np.array([*rows, totals.rest_sum(self.map)], np.uint64).view(np.int64)

    def prove(self, found: Mapping[str, int], expected: Mapping[str, int]) -> None:
        """See Work."""
        self.map.prove(found, expected)

    def distrust(self) -> None:
        """See Work."""
        self.map.distrust()

    def leave_unproven(self) -> None:
        """See Work."""
        if self.map.unproven:
            self.map.leave_unproven()
            self._may_reload(self.map.unmapped)

    def describe(self) -> dict[str, Any]:
        """See Work."""
        return {
            "tensors": len(self.map.tensors),
            "unmapped": dict(self.map.unmapped),
            "ignored": sorted(self.map.ignored),
            "refused": self._refused(),
            "proven": proven.known(),
        }

    def _refused(self) -> dict[str, str]:
        """Tensors that only a reload could load, and should not, each with the reason."""
        names = self.map.unmapped.keys() | self.map.unproven
        if not names:
            return {}
        own, mapped = (self.map.places(proven=proven) for proven in (True, False))
        why = proven.unproven(
            self._model,
            lambda parameter: parameter.untyped_storage().data_ptr() in own,
            lambda parameter: parameter.untyped_storage().data_ptr() in mapped,
        )
        return {} if why is None else dict.fromkeys(sorted(names), why)

    def _may_reload(self, names: Collection[str]) -> None:
        """Raise Unsupported where one of these tensors should not go through the loader."""
        refused = self._refused()
        names = [name for name in names if name in refused]
        if names:
            raise proven.refusal(refused[names[0]], names)

    def stage(self, request: Mapping[str, Any], tell: Tell) -> Prepared:
        """See Work."""
        if request["full"]:
            self._may_reload(self.map.unmapped.keys() | self.map.unproven)
        bucket, told = open_bucket(request["bucket"]), Told(tell)
        stage = self._stage_full if request["full"] else self._run
        found = stage(bucket, request, told)
        if found.reloaded:
            if self._reload is None:
                what = "the update changes tensors that cannot be written in place"
                raise Unsupported(what, found=", ".join(found.reloaded))
            self._may_reload(found.reloaded)
            start = time.perf_counter()
            checkpoint = self._checkpoint(bucket, request["to_step"], request["to_state"], told)
            found.reload = partial(self._reload, found.reloaded, checkpoint)
            found.seconds["fetch"] += time.perf_counter() - start
        found.fetched_bytes = told.fetched
        return found

    def took_over(self, staged: Prepared) -> None:
        """See Work."""
        self._digests = self._first | {staged.staged.to_state: staged.digests}

    def _run(self, bucket: Bucket, request: Mapping[str, Any], told: Told) -> Prepared:
        """A run of links."""
        start = time.perf_counter()
        links = host.open_links(bucket, request["links"], told)
        digests = dict(self._digests[request["from_state"]])
        for delta in links.deltas:
            digests |= {name: str(row.digest) for name, row in delta.records.items()}
        self._expect(request, digests)
        base = None
        if staging.needs_base(links.deltas):
            step = request["from_step"] or links.deltas[0].header.base_step or 0
            base = self._checkpoint(bucket, step, request["from_state"], told)
        fetched = time.perf_counter()
        staged = staging.stage(self.map, links.deltas, base=base, **_ends(request))
        seconds = {"fetch": fetched - start, "stage": time.perf_counter() - fetched}
        return Prepared(staged, digests, seconds)

    def _stage_full(self, bucket: Bucket, request: Mapping[str, Any], told: Told) -> Prepared:
        """Every tensor of a step, whatever is live."""
        start = time.perf_counter()
        checkpoint = self._checkpoint(bucket, request["to_step"], request["to_state"], told)
        fetched = time.perf_counter()
        tensors = host.identify(checkpoint.path).tensors
        digests = {name: tensor.digest for name, tensor in tensors.items()}
        self._expect(request, digests)
        ends = _ends(request)
        staged = staging.stage_full(
            self.map,
            checkpoint,
            update_id=ends["update_id"],
            to_step=ends["to_step"],
            to_state=ends["to_state"],
        )
        sums = {name: tensor.touch_sum for name, tensor in tensors.items()}
        seconds = {"fetch": fetched - start, "stage": time.perf_counter() - fetched}
        return Prepared(staged, digests, seconds, sums)

    def _expect(self, request: Mapping[str, Any], digests: Digests) -> None:
        """Raise Unsupported where the running model cannot become what a server that is started on
        the result would be: with other tensors, or with two that are tied here and differ there.

        ``digests``: of the result.
        """
        (names,) = self._first.values()
        other = sorted(names.keys() ^ digests.keys())
        apart = [name for name, like in self._tied.items() if digests.get(name) != digests[like]]
        if not other and not apart:
            return
        what = "the step has other tensors than the model that is served"
        if not other:
            what = f"the tensor differs from {self._tied[apart[0]]!r}, which stands for both"
        raise Unsupported(
            what,
            tensor=(other or apart)[0],
            step=request["to_step"],
            hint="pull the step, and start the server anew on it",
        )

    def _checkpoint(self, bucket: Bucket, step: int, state: str, told: Told) -> Checkpoint:
        return host.checkpoint_at(bucket, step, state, model=self.directory, progress=told)


def _tied(weight_map: WeightMap, identity: host.Identity) -> dict[str, str]:
    """For each tensor that the loader ignores the mapped one with the same content, if there is
    one: an output layer that shares the embedding. vLLM ties them where they are equal alone."""
    same: dict[tuple[str, tuple[int, ...], str], str] = {}
    for name in weight_map.tensors:
        tensor = identity.tensors[name]
        same.setdefault((tensor.dtype, tensor.shape, tensor.digest), name)
    found = {}
    for name in weight_map.ignored:
        tensor = identity.tensors[name]
        like = same.get((tensor.dtype, tensor.shape, tensor.digest))
        if like is not None:
            found[name] = like
    return found


def _ends(request: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("from_step", "from_state", "to_step", "to_state")
    return {"update_id": request["id"], **{key: request[key] for key in keys}}


class Told:
    """A Progress of all parts of one staging, each of which counts from zero; ``fetched``: bytes
    that have come."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self.fetched, self._worked = tell, 0, 0
        self._part: tuple[str, int] = ("", 0)

    def __call__(self, what: str, done: int, total: int) -> None:
        part, before = self._part
        more = done - (before if part == what and done else 0)  # 0: the next part begins
        self._part = (what, done)
        self.fetched += more if what == "fetching" else 0
        self._worked += max(more, 0)
        self._tell(self.fetched, self._worked)


@dataclass
class Prepared:
    """A staged update as the state machine wants it.

    ``digests``: of the result's tensors. ``full_sums``: touch sums of a full one's result.
    ``reload``: loads what cannot be written in place; it comes last, as it cannot be taken back.
    """

    staged: staging.Staged
    digests: Digests
    seconds: dict[str, float]
    full_sums: Mapping[str, int] | None = field(default=None, repr=False)
    fetched_bytes: int = 0
    reload: Callable[[], object] | None = field(default=None, repr=False)
    reloading: bool = False

    @property
    def elements(self) -> int:
        return self.staged.elements

    @property
    def nbytes(self) -> int:
        return self.staged.nbytes

    @property
    def reloaded(self) -> tuple[str, ...]:
        return self.staged.reload

    @property
    def ignored(self) -> tuple[str, ...]:
        return self.staged.ignored

    @property
    def values(self) -> Values:
        return self.staged.sums.values

    def judge(self, total: Values) -> str:
        """See contract.Staged."""
        return self.staged.sums.judge(total)

    def sums_after(self, before: Mapping[str, int], total: Values) -> dict[str, int]:
        """See contract.Staged."""
        if self.full_sums is not None:
            return dict(self.full_sums)
        found = dict(before)
        for row, values in zip(self.staged.sums.rows, total.view(np.uint64), strict=True):
            old, new = int(values[0]), int(values[1])
            name = row.record.name
            found[name] = new if row.record.whole else (found[name] - old + new) % (1 << 64)
        return found

    def replace(self) -> bool:
        """See contract.Staged."""
        return self.staged.replace()

    def complete(self) -> None:
        """See contract.Staged."""
        self.staged.complete()
        if self.reload is not None:
            self.reloading = True
            self.reload()
            if not self.staged.verify():
                raise DeltactlError(live_weights.LOST)

    def roll_back(self) -> bool:
        """See contract.Staged."""
        return self.staged.roll_back() and not self.reloading
