"""What servers hold, compared with the chain while they serve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

from deltactl.chain.chain import Chain
from deltactl.chain.reading import read_chain
from deltactl.chain.store import Bucket
from deltactl.core.errors import Conflict, DeltactlError, Malformed, Unproven
from deltactl.core.facts import facts_of
from deltactl.server.fleet import Met, noting, side_by_side, urls_of
from deltactl.server.http.routes import Server
from deltactl.server.model import specs_at
from deltactl.server.preflight import (
    check_awake,
    check_dtype,
    check_plugin,
    check_routes,
    check_version,
    draft_notes,
)
from deltactl.server.state import Audit, EngineState
from deltactl.server.summing import Patience, summed


@dataclass(slots=True)
class Audited:
    """What a server holds. ``step``, ``state``: as it says, None where not known; ``paused``:
    whether it is, None where not known; ``checked``: tensors whose sums were compared;
    ``differing``: those whose bits are others; ``unaudited``: those that could not be looked at,
    and why, if that is known. ``notes``: what else the user has to know. ``error``: None where all
    that was looked at is as the chain says."""

    url: str
    step: int | None = None
    state: str | None = None
    checked: int = 0
    differing: tuple[str, ...] = ()
    unaudited: Mapping[str, str | None] = field(default_factory=dict)
    paused: bool | None = None
    notes: list[str] = field(default_factory=list)
    error: DeltactlError | None = None

    @property
    def tensors(self) -> int:
        """How many there are to look at."""
        return self.checked + len(self.unaudited)

    def facts(self) -> dict[str, Any]:
        """JSON-ready: one row of ``replicas``."""
        return facts_of(
            self, ok=self.error is None, tensors=self.tensors, unaudited=list(self.unaudited)
        )


@dataclass(frozen=True, slots=True)
class Audits:
    """What an audit found, and whether the user has interrupted it. ``newer``: steps that are in
    the bucket above the tip and cannot be rebuilt, where no step was asked for."""

    replicas: list[Audited]
    interrupted: bool
    newer: tuple[int, ...] = ()


def audit_servers(
    bucket: Bucket,
    step: int | None,
    urls: Sequence[str],
    *,
    timeout: float,
    on_interrupt: Callable[[], None] = lambda: None,
) -> Audits:
    """Have each server add up its live weights, and compare with what the chain says of its step.

    ``step``: the one that it has to be on; None for any of the chain's. Raises what reading the
    chain raises, UsageError.
    """
    urls, chain, stop = urls_of(urls), read_chain(bucket), threading.Event()
    step = chain.numbered(step)
    if step is not None:
        chain.need(step)

    met = Met()

    def one(url: str) -> Audited:
        report = Audited(url)
        with noting(report), closing(Server(url, timeout)) as server:
            _audit(server, chain, step, report, stop, met)
        return report

    newer = () if step is not None else chain.newer(chain.tip)
    return Audits(*side_by_side(one, urls, stop, on_interrupt), newer)


def _audit(
    server: Server,
    chain: Chain,
    step: int | None,
    report: Audited,
    stop: threading.Event,
    met: Met,
) -> None:
    check_version(server)
    report.paused = check_routes(server)
    engine = check_plugin(server)
    met.meet(engine.server, server.url)
    report.notes += draft_notes(engine.draft)
    check_dtype(engine, specs_at(chain, chain.tip if step is None else step), server.url)
    states = chain.states()
    check_awake(engine, server.url)
    engine = _identified(server, states, engine, stop)
    if engine.doubt is not None:  # somebody may have loaded them since
        engine = summed(server, stop)
        _note(report, engine)
    report.step, report.state = engine.step, engine.state
    _check_state(server, chain, step, engine, states)
    taken, engine = engine, summed(server, stop)
    if engine.mapped is None:  # somebody has exchanged its parameters
        engine = _identified(server, states, engine, stop)
        engine = summed(server, stop)
    if engine.audit is None:
        raise engine.error or DeltactlError("the server could not look at its weights")
    _note(report, engine)
    if engine.state not in (None, taken.state):
        report.step, report.state = engine.step, engine.state
        raise _exchanged(server, chain, taken, engine)
    _judge(server, chain, engine.audit, report)


def _identified(
    server: Server, states: dict[str, int], engine: EngineState, stop: threading.Event
) -> EngineState:
    """The server once it knows which step it serves and where its weights lie, if it can."""
    wait = Patience(server, stop)
    if engine.identity != "known" or engine.step is None:
        engine = server.engine("deltactl_identify", bucket_states=states)
        while engine.identity == "running":
            wait.a_while()
            engine = server.engine("deltactl_state")
    if engine.mapped is None and engine.identity == "known":
        engine = server.engine("deltactl_map")
    return engine


def _exchanged(server: Server, chain: Chain, taken: EngineState, live: EngineState) -> Malformed:
    """Somebody else has loaded another state that the server knows, its directory's say."""
    return Malformed(
        "the server's live weights are another state than it was taken for",
        file=server.url,
        step=taken.step,
        expected=f"state {taken.state}",
        found=f"step {live.step}, state {live.state}",
        hint=f"deltactl apply {quote(chain.url)}@{taken.step} --server {server.url}",
    )


def _check_state(
    server: Server, chain: Chain, step: int | None, engine: EngineState, states: dict[str, int]
) -> None:
    """Raise Conflict unless the server is on a step of the chain, and on the one asked for."""
    if engine.poisoned is not None:
        raise engine.poisoned
    if engine.identity == "failed" and engine.error is not None:
        raise engine.error
    if engine.doubt is not None:
        wanted = chain.tip if step is None else step
        engine.doubt.file, engine.doubt.step = server.url, step
        engine.doubt.hint = f"deltactl apply {quote(chain.url)}@{wanted} --server {server.url}"
        raise engine.doubt
    expected = "a state of the chain" if step is None else f"state {chain.state_at(step)}"
    known = engine.state in states if step is None else engine.state == chain.state_at(step)
    if not known:
        wanted = chain.tip if step is None else step
        hint = f"deltactl apply {quote(chain.url)}@{wanted} --server {server.url}"
        if step is None and chain.newer(chain.tip):
            # It may be on one of them, and would be taken back.
            hint = f"deltactl verify {quote(chain.url)}"
        elif step is None and engine.step is not None and engine.step > (chain.tip or 0):
            hint = f"deltactl log {quote(chain.url)}"  # which may be an older view of the chain
        raise Conflict(
            "the server is on another step"
            if step is not None
            else "the server is on no step of the chain",
            file=server.url,
            step=step,
            expected=expected,
            found=f"step {engine.step}, state {engine.state}",
            hint=hint,
        )


def _note(report: Audited, engine: EngineState) -> None:
    audit = engine.audit
    if audit is not None:
        report.checked, report.differing = audit.checked, audit.differing
        # A model whose output layer is tied keeps nothing of one that the checkpoint has all the
        # same.
        left = [name for name in audit.unaudited if name not in engine.ignored]
        report.unaudited = {name: engine.unmapped.get(name) for name in left}


def _judge(server: Server, chain: Chain, audit: Audit, report: Audited) -> None:
    if audit.differing:
        raise Malformed(
            "the live weights are not those of the step",
            file=server.url,
            step=report.step,
            tensor=audit.differing[0],
            found=f"{len(audit.differing)} of {audit.checked} tensors that were compared differ",
            hint=f"deltactl apply {quote(chain.url)}@{report.step} --server {server.url} --repair",
        )
    if not audit.checked:
        raise Unproven("no tensor could be looked at", file=server.url, step=report.step)
