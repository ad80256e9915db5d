"""What stands between a server and an update, in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from deltactl import __version__
from deltactl.core.errors import DeltactlError, listed
from deltactl.server.apply import plan_for
from deltactl.server.fleet import Met
from deltactl.server.goal import Goal
from deltactl.server.http.routes import Server
from deltactl.server.http.wire import Unreachable
from deltactl.server.preflight import (
    check_alone,
    check_configuration,
    check_dtype,
    check_routes,
    check_version,
    draft_notes,
    no_plugin,
)
from deltactl.server.state import WRITTEN, EngineState

Level = Literal["ok", "warn", "error"]

_SHOWN = 5  # names of tensors
_LISTENS = (
    "see that vllm serve runs there, which does not listen while it is starting, and that it "
    "listens on this port and where this machine can reach it: --host, --port"
)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Finding:
    """``check``: one word for scripts; ``what``: a sentence; ``hint``: what to do, if anything."""

    level: Level
    check: str
    what: str
    hint: str | None = None


def examine(
    url: str, timeout: float = 30.0, goal: Goal | None = None, met: Met | None = None
) -> list[Finding]:
    """Look at one server and change nothing. Ends at what keeps from looking further. ``goal``: a
    step that it is to load; then the server finds out which one it serves. ``met``: the servers
    that are looked at together."""
    with closing(Server(url, timeout)) as server:
        return list(_findings(server, goal, Met() if met is None else met))


def _findings(server: Server, goal: Goal | None, met: Met) -> Iterator[Finding]:
    check = "reachable"
    try:
        yield Finding("ok", check, f"answers, vLLM {check_version(server)}")
        check = "health"
        server.health()
        check = "routes"
        paused = check_routes(server)
        yield Finding("ok", check, "the control routes are there")
        yield _exposed(server.url)
        check = "plugin"
        configuration = server.configuration()
        check_configuration(configuration, server.url)
        check = "replicas"
        check_alone(configuration, server.url)
        check = "plugin"
        engine = server.engine("deltactl_state")
        yield _plugin(engine, server.url)
        check = "twice"
        met.meet(engine.server, server.url)
        if engine.backend and goal is not None:
            check = "step"
            yield from _step(goal, server)
            engine = server.engine("deltactl_state")
        elif engine.backend:  # whatever chain it is, it is of the checkpoint that it was started on
            check = "dtype"
            check_dtype(engine, server.tensors(), server.url)
    except DeltactlError as error:
        yield _of_error(check, error)
        return
    yield from _weights(engine)
    yield from _map(engine)
    if goal is None:  # else it is told already
        yield from (Finding("warn", "draft", note) for note in draft_notes(engine.draft))
    yield from _at_rest(engine, paused, server)


def _of_error(check: str, error: DeltactlError) -> Finding:
    hint = error.hint
    if hint is not None and hint.startswith("deltactl doctor"):  # which is what runs
        hint = _LISTENS if isinstance(error, Unreachable) else "see the server's log"
    return Finding("error", check, str(error), hint)


def _exposed(url: str) -> Finding:
    what = (
        "whoever reaches this port can pause the server and change its weights: --api-key does not "
        "guard the control routes"
    )
    hint = "let nobody but the trainer reach it: a firewall, or a proxy that passes /v1 alone"
    if urlsplit(url).hostname in _LOOPBACK:
        hint += "; see that vLLM listens on 127.0.0.1 alone"
    return Finding("warn", "exposed", what, hint)


def _plugin(engine: EngineState, url: str) -> Finding:
    known = f"deltactl {engine.version}, {engine.world_size} rank" + "s" * (engine.world_size > 1)
    if not engine.backend:
        return _of_error("plugin", no_plugin(url, "another weight-transfer backend"))
    if engine.version != __version__:
        hint = "install the same version on both sides"
        return Finding("warn", "plugin", f"{known}; here is deltactl {__version__}", hint)
    return Finding("ok", "plugin", f"{known}, weights in {engine.dtype} from {engine.model}")


def _step(goal: Goal, server: Server) -> Iterator[Finding]:
    """What ``apply -n`` would say."""
    plan = plan_for(goal, server.url, server.timeout)
    if plan.error is not None:
        yield _of_error("step", plan.error)
    else:
        by = {"full": "every tensor", "deltas": f"{plan.deltas} delta" + "s" * (plan.deltas != 1)}
        known = "unknown weights" if plan.step_before is None else f"step {plan.step_before}"
        how = "is served" if plan.how is None else f"can be loaded from {known}: {by[plan.how]}"
        yield Finding("ok", "step", f"step {goal.step} {how}")
    yield from (Finding("warn", "step", note) for note in plan.notes)


def _weights(engine: EngineState) -> Iterator[Finding]:
    if engine.poisoned is not None:
        what = f"the weights are in an unknown state: {engine.poisoned}"
        yield Finding("error", "weights", what, "deltactl apply BUCKET@STEP --server URL")
    elif engine.identity == "failed":
        what = f"the server cannot tell which weights it started with: {engine.error}"
        yield Finding("error", "weights", what)
    elif "weights" in engine.asleep:
        what = "the server sleeps: it takes no step before its weights are woken"
        yield Finding("warn", "weights", what, "POST /wake_up?tags=weights, apply, tags=kv_cache")
    elif engine.doubt is not None:
        what = f"nobody knows the weights: {engine.doubt}"
        yield Finding("warn", "weights", what, "deltactl apply BUCKET@STEP --server URL")
    elif engine.state is None:
        yield Finding("ok", "weights", "not identified yet; the first apply does that")
    else:
        step = "a state that no chain named" if engine.step is None else f"step {engine.step}"
        what = f"{step}, state {engine.state}, when they were last summed"
        yield Finding("ok", "weights", what, "deltactl verify BUCKET --server URL sums them anew")


def _map(engine: EngineState) -> Iterator[Finding]:
    if engine.refused:
        yield Finding(
            "warn",
            "map",
            f"{len(engine.refused)} of {engine.tensors} tensors cannot be loaded, and steps that "
            f"change them are refused, as no reload of such a layer was proven, only of "
            f"{', '.join(engine.proven)}: {_listed(engine.refused)}",
            "pull the step, and start the server anew on it",
        )
    reloaded = {name: why for name, why in engine.unmapped.items() if name not in engine.refused}
    if reloaded:
        yield Finding(
            "warn",
            "map",
            f"{len(reloaded)} of {engine.tensors} tensors are not written element by element, but "
            f"by vLLM's own loader, which takes longer: {_listed(reloaded)}",
        )


def _listed(names: Mapping[str, str]) -> str:
    return listed([f"{name} ({why})" for name, why in names.items()], _SHOWN)


def _at_rest(engine: EngineState, paused: bool, server: Server) -> Iterator[Finding]:
    update, again = engine.update, "deltactl apply BUCKET@STEP --server URL carries it to an end"
    if update is not None:
        written = "written" if update.phase == WRITTEN else update.phase
        what = f"an update to step {update.to_step} is under way or was left so ({written})"
        yield Finding("warn", "update", what, again)
    elif engine.session:
        yield Finding("warn", "update", "a weight update was opened and not closed", again)
    if paused and update is None:
        what = "the server is paused, by somebody else; apply leaves it so"
        yield Finding("warn", "paused", what, f"curl -X POST {server.url}/resume")
    elif paused:
        yield Finding("warn", "paused", "the server is paused for the update", again)
