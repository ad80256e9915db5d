"""What has to be so before a server can be updated, in the order in which it can be found out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deltactl.core.errors import Conflict, DeltactlError, Malformed, Transient, Unsupported
from deltactl.server.goal import Goal, StageRequest
from deltactl.server.http.routes import Server
from deltactl.server.http.wire import Refused
from deltactl.server.model import Specs, float_of
from deltactl.server.state import EngineState

OLDEST = (0, 32)
"""The oldest vLLM whose routes are those that are used here."""

BACKEND = "deltactl"
EXTENSION = "deltactl.vllm.WorkerExtension"
FLAGS = f'--weight-transfer-config \'{{"backend":"{BACKEND}"}}\' --worker-extension-cls {EXTENSION}'


def check_version(server: Server) -> str:
    """vLLM's version. Raises Unsupported for one that is too old, and where something else than
    vLLM answers; Transient where nothing does."""
    try:
        version = server.version()
    except (Refused, Malformed) as error:
        if isinstance(error, Transient) or (isinstance(error, Refused) and error.status >= 500):
            raise
        raise no_vllm(server.url, error) from None
    match = re.match(r"(\d+)\.(\d+)", version)
    if match and (0, 0) < (int(match[1]), int(match[2])) < OLDEST:
        raise Unsupported(
            "the server's vLLM is too old",
            file=server.url,
            expected=f"{'.'.join(map(str, OLDEST))} or newer",
            found=version,
        )
    return version


def check_routes(server: Server) -> bool:
    """Whether the server is paused. Raises Unsupported where the control routes are not there."""
    try:
        return server.paused()
    except Refused as error:
        if error.status != 404:
            raise
        raise Unsupported(
            "the server has no control routes",
            file=server.url,
            found="/is_paused: status 404",
            hint="start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment",
        ) from None


def check_plugin(server: Server) -> EngineState:
    """What the plugin in the server says. Raises Unsupported where it is not there, or is not used.

    Of a server of several ranks vLLM's configuration is asked first: a method that they lack would
    leave their replies out of step for good.
    """
    if server.world_size() > 1:
        _check_configured(server)
    try:
        engine = server.engine("deltactl_state")
    except Refused:
        _check_configured(server)
        engine = server.engine("deltactl_state")
    if not engine.backend:
        raise no_plugin(server.url, "another weight-transfer backend")
    return engine


def _check_configured(server: Server) -> None:
    configuration = server.configuration()
    check_configuration(configuration, server.url)
    check_alone(configuration, server.url)


def check_configuration(configuration: Mapping[str, Any], url: str) -> None:
    """Raise Unsupported unless vLLM was started with the backend and the worker extension."""
    transfer = configuration.get("weight_transfer_config")
    backend = transfer.get("backend") if isinstance(transfer, dict) else None
    if backend != BACKEND:
        raise no_plugin(url, f"weight-transfer backend {backend}")
    parallel = configuration.get("parallel_config")
    extension = parallel.get("worker_extension_cls") if isinstance(parallel, dict) else None
    if not extension:
        raise no_plugin(url, "no worker extension")


def check_alone(configuration: Mapping[str, Any], url: str) -> None:
    """Raise Unsupported where the server is several replicas that vLLM feeds from one address."""
    parallel = configuration.get("parallel_config")
    replicas = parallel.get("data_parallel_size") if isinstance(parallel, dict) else 1
    if isinstance(replicas, int) and replicas > 1:
        raise Unsupported(
            "the server has several data-parallel replicas, which cannot be updated as one",
            file=url,
            found=f"data-parallel size {replicas}",
            hint="start one vLLM server for each, and give each with --server",
        )


def no_vllm(url: str, error: Refused | Malformed) -> DeltactlError:
    """The error for an address at which something else answers."""
    status = f"status {error.status}" if isinstance(error, Refused) else "another answer"
    return Unsupported(
        "what answers at this address is no vLLM server",
        file=url,
        expected="vLLM's version at /version",
        found=", ".join(filter(None, (status, str(error.found or "")))),
        hint="give the address that vllm serve listens on, http://HOST:PORT, without /v1",
    )


def no_plugin(url: str, found: str) -> DeltactlError:
    """The error for a vLLM that was started without deltactl."""
    return Unsupported(
        "the server does not run deltactl's plugin",
        file=url,
        found=found,
        hint=f"pip install deltactl where vLLM runs, and start it with {FLAGS}; "
        "or try --via reload, which needs neither",
    )


def check_awake(engine: EngineState, url: str) -> None:
    """Raise Transient for a server whose weights sleep. Its KV cache may, and is woken last, so
    that there is room to load."""
    if "weights" in engine.asleep:
        raise Transient(
            "the server sleeps: its weights are not in memory",
            file=url,
            found=f"asleep: {', '.join(sorted(engine.asleep))}",
            hint=f"curl -X POST '{url}/wake_up?tags=weights', then again, and only then "
            "tags=kv_cache",
        )


def check_dtype(engine: EngineState, specs: Specs, url: str) -> None:
    """Raise Conflict where the server keeps its weights in another floating type than most of a
    checkpoint's."""
    dtype = float_of(specs)
    if dtype is not None and engine.dtype != dtype and engine.dtype.startswith(("bfloat", "float")):
        raise Conflict(
            "the server keeps its weights in another type than the checkpoint: no bit is equal",
            file=url,
            expected=dtype,
            found=engine.dtype,
            hint=f"start vLLM with --dtype {dtype}",
        )


def check_tensors(server: Server, engine: EngineState, goal: Goal) -> None:
    """Raise Conflict where the step is of another model than the server's."""
    if not goal.fits_from(engine.state) and (served := server.tensors()):
        goal.fits(served, server.url)


def check_layers(engine: EngineState, goal: Goal, way: StageRequest, url: str) -> None:
    """Raise Unsupported where the way leads through vLLM's own loader for a tensor of a layer that
    may answer wrongly afterwards."""
    changed = goal.changed(way)
    names = sorted(name for name in engine.refused if name in changed)
    if names:
        raise Unsupported(
            f"{len(names)} of {engine.tensors} tensors would have to go through vLLM's own loader, "
            "and for a layer like this it was not proven that the answers are right afterwards",
            file=url,
            step=goal.step,
            tensor=names[0],
            expected="one of " + ", ".join(engine.proven) if engine.proven else None,
            found=engine.refused[names[0]],
            hint="pull the step, and start the server anew on it",
        )


WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Ways in which vLLM guesses tokens by what has been said before."""


def draft_notes(draft: object) -> list[str]:
    """What is to be told of a second model that guesses tokens; ``draft``: vLLM's
    ``speculative_config``. What it guesses is checked by the first: answers are right all the same,
    and come less quickly the older it is."""
    if not isinstance(draft, Mapping) or draft.get("method") in WITHOUT_WEIGHTS:
        return []
    what = f"the draft of its speculative decoding ({draft.get('method')}, {draft.get('model')})"
    return [f"{what} is not updated: fewer and fewer of its tokens are accepted"]


def ready_for(server: Server, goal: Goal) -> EngineState:
    """What the server's plugin says. Raises what stands between it and an update to the goal."""
    check_version(server)
    check_routes(server)
    engine = check_plugin(server)
    check_awake(engine, server.url)
    check_dtype(engine, goal.specs(), server.url)
    check_tensors(server, engine, goal)
    return engine
