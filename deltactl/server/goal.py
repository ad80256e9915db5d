"""Where a server is to go, and which links lead there from what it holds."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

from deltactl.chain.chain import Chain
from deltactl.codec import encoding_named
from deltactl.core.errors import Conflict, Unproven, UsageError
from deltactl.files.atomic import temporary_directory
from deltactl.format.delta import DeltaHeader, open_delta
from deltactl.format.delta_index import DELTA_INDEX
from deltactl.format.link_names import delta_directory, delta_name
from deltactl.server.model import Specs, check_same, specs_at, specs_of


@dataclass(frozen=True, slots=True)
class StageRequest:
    """What the server is told to stage. ``full``: every tensor, whatever is live; then ``links``
    begins with the anchor. ``links``: names of objects; ``nbytes``: what they are to fetch."""

    from_step: int | None
    from_state: str | None
    links: tuple[str, ...]
    deltas: int
    nbytes: int
    full: bool


class Goal(Protocol):
    """A step that servers are to serve.

    ``bucket``: the address that the servers read it from; ``target``: what the user typed;
    ``newer``: steps above that the chain has and cannot rebuild, where no step was asked for.
    """

    step: int
    state: str
    bucket: str
    target: str
    newer: tuple[int, ...]

    def states(self) -> Mapping[str, int]:
        """The states that the goal's chain knows, and the step that each of them is."""
        ...

    def way(self, step: int | None, state: str | None, *, full: bool) -> StageRequest:
        """How to get there from a state, by the fewest bytes. ``step``: the server's own word for
        it; ``full``: whatever is live. Raises Conflict, Malformed, NotFound."""
        ...

    def specs(self) -> Specs:
        """Of the tensors that the step has, as far as that is known."""
        ...

    def fits(self, served: Specs, url: str) -> None:
        """Raise Conflict where a server with these tensors cannot come to serve the step."""
        ...

    def fits_from(self, state: str | None) -> bool:
        """Whether a server in this state is known to have the step's tensors."""
        ...

    def changed(self, way: StageRequest) -> Container[str]:
        """The tensors that this way to the step changes."""
        ...


def check_forward(chain: Chain, tip: int, served: int | None) -> None:
    """Raise Conflict where a server would go back to the tip, which is for the user to say: what is
    seen of the chain from here may be older than what the server was told."""
    if served is None or served <= tip:
        return
    look = "verify" if chain.newer(tip) else "log"
    raise Conflict(
        "the server is on a newer step than the chain can give",
        file=chain.url,
        expected=f"step {served} or above",
        found=f"step {tip}",
        hint=f"deltactl {look} {chain.url}; to go back, name the step: {chain.url}@{tip}",
    )


class ChainGoal:
    """A step of a chain, by default its tip. Raises as ``Chain.numbered`` and ``Chain.wanted``;
    Unproven for TRL's."""

    def __init__(self, chain: Chain, step: int | None) -> None:
        step = chain.numbered(step)
        self._chain, self.bucket = chain, chain.url
        self.step, self._named = chain.wanted(step), step is not None
        self.newer = () if step is not None else chain.newer(self.step)
        chain.need(self.step)
        state = chain.state_at(self.step)
        self.target = f"{chain.url}@{self.step}"
        if state is None:
            raise Unproven(
                "the chain names no states, so a running server could not prove what it serves",
                file=chain.url,
                step=self.step,
                hint=f"deltactl apply {quote(self.target)} --via reload --reload-dir DIR "
                "--server URL",
            )
        self.state = state
        self._specs = specs_at(chain, self.step)

    def states(self) -> dict[str, int]:
        return self._chain.states(self.step)

    def way(self, step: int | None, state: str | None, *, full: bool) -> StageRequest:
        if not self._named:
            check_forward(self._chain, self.step, step)
        held = None if full or state is None else self._held(step, state)
        way = self._chain.way(self.step, held)
        names = tuple(link.name for link in way.links)
        whole = way.anchor is not None
        from_step = step if whole else held
        return StageRequest(from_step, state, names, len(way.deltas), way.nbytes, whole)

    def _held(self, step: int | None, state: str) -> int | None:
        """The earlier step that a server in this state holds; None where it is of no such one."""
        if step is None or self._chain.state_at(step) != state:
            step = self.states().get(state)
        return step if step is not None and step < self.step else None

    def specs(self) -> Specs:
        return self._specs

    def fits(self, served: Specs, url: str) -> None:
        if self._specs:
            check_same(served, self._specs, url, whole=True)

    def fits_from(self, state: str | None) -> bool:
        step = self.states().get(state or "")
        return step is not None and specs_at(self._chain, step) == self._specs

    def changed(self, way: StageRequest) -> Container[str]:
        if way.full:
            return self._specs
        deltas = [link for link in self._chain.deltas.values() if link.name in way.links]
        headers = [link.header for link in deltas if isinstance(link.header, DeltaHeader)]
        return {name for header in headers for name in header.records}


class DeltaGoal:
    """What a delta file leads to; the servers read it as the object ``name`` of ``bucket``. Raises
    UsageError for one that names no step, Unproven for one without states, and as ``open_delta``.
    """

    def __init__(self, delta: Path, bucket: Path, name: str) -> None:
        opened = open_delta(delta)
        opened.check_payload()
        header = opened.header
        if header.base_state is None or header.result_state is None:
            raise Unproven("the delta names no states", file=delta)
        if header.step is None:
            hint = "deltactl diff A B -o FILE --step N"
            raise UsageError("the delta names no step", file=delta, hint=hint)
        self.step, self.state = header.step, header.result_state
        self.bucket, self.target = str(bucket), str(delta)
        self.newer: tuple[int, ...] = ()
        self._path, self._name, self._header = delta, name, header

    def states(self) -> dict[str, int]:
        base = self._header.base_step
        known = {} if base is None else {str(self._header.base_state): base}
        return {**known, self.state: self.step}

    def way(self, step: int | None, state: str | None, *, full: bool) -> StageRequest:
        header = self._header
        if full or state != header.base_state:
            what = "the server does not hold the state that the delta stands on"
            raise Conflict(
                what if not full else "a delta alone cannot make a server's weights anew",
                file=self._path,
                step=self.step,
                expected=f"state {header.base_state}",
                found=None if full else f"step {step}, state {state}",
                hint=f"deltactl apply BUCKET@{self.step} --server URL",
            )
        return StageRequest(step, state, (self._name,), 1, header.nbytes, False)

    def specs(self) -> Specs:
        return specs_of(self._header)

    def fits(self, served: Specs, url: str) -> None:
        check_same(served, self.specs(), url, whole=False)

    def fits_from(self, state: str | None) -> bool:
        return state == self.state

    def changed(self, way: StageRequest) -> Container[str]:
        return self._header.records


@contextlib.contextmanager
def lent(delta: Path) -> Iterator[tuple[Path, str]]:
    """A delta as a link of a bucket while the block runs: the bucket, and the link's name there.

    Where it lies in none, a directory beside it is one, with links to its files or copies.
    Raises UsageError for an encoding that cannot be read so, and as ``open_delta``.
    """
    opened = open_delta(delta)
    path, header = opened.path.resolve(), opened.header
    home = name = delta_name(header.step or 0)
    files = {path: name}
    if header.files:
        home = delta_directory(header.step or 0)
        name = f"{home}/{DELTA_INDEX}"
        parts = (DELTA_INDEX, *(part.name for part in header.files))
        files = {path / part: f"{home}/{part}" for part in parts}
    if path.parts[-2:] == tuple(home.split("/")):
        yield path.parents[1], name
        return
    if encoding_named(header.encoding).needs_base:
        what = "servers can read a delta in this encoding only in the bucket that has its base"
        raise UsageError(
            what,
            file=delta,
            found=header.encoding,
            hint=f"deltactl apply BUCKET@{header.step} --server URL",
        )
    with temporary_directory(path) as bucket:
        for file, place in files.items():
            (bucket / place).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, bucket / place)
            except OSError:
                shutil.copyfile(file, bucket / place)
        yield bucket, name


def message(goal: Goal, way: StageRequest, update: str) -> dict[str, Any]:
    """The argument of ``deltactl_stage``."""
    return {
        "id": update,
        "bucket": goal.bucket,
        "from_step": way.from_step,
        "from_state": way.from_state,
        "to_step": goal.step,
        "to_state": goal.state,
        "links": list(way.links),
        "full": way.full,
    }
