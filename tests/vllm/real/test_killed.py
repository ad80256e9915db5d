"""A server of its own, of which a part is killed in the middle of an update."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from typer.testing import CliRunner, Result

from deltactl.cli.app import app
from deltactl.server.http.routes import Server
from deltactl.server.state import EngineState
from deltactl.vllm.update.host import identify
from tests.support.fault_proxy import FaultProxy, hang
from tests.support.supervised import children_of
from tests.support.vllm_chain import TIP, ModelChain, copy_chain, make_chain
from tests.support.vllm_client import LIMIT, Client, phases
from tests.support.vllm_fixtures import Setup, start
from tests.support.vllm_models import write_model
from tests.support.vllm_server import BACKEND, Refused, VllmServer, run_vllm_server


def test_a_worker_that_is_killed_in_the_pause(tmp_path: Path, vllm_scratch: Path) -> None:
    """The server ends: it does not go on with the ranks that are left. What it was started on is
    as it was, so that it comes up on the old step again."""
    setup = Setup("qwen3", 2, True)
    chain = make_chain(tmp_path, setup.kind)
    with start(setup, chain, 1, vllm_scratch) as server:
        client = Client(server, chain)
        client.prepare()
        id_ = client.stage(3)
        assert phases(client.seal(id_)) == ["ready", "ready"]
        server.post("/pause", mode="keep")
        server.post("/start_weight_update")
        (worker,) = [pid for pid, title in server.processes().items() if "Worker_TP1" in title]
        os.kill(worker, signal.SIGKILL)
        deadline = time.monotonic() + LIMIT
        while server.alive():
            assert time.monotonic() < deadline, "it calls itself healthy with a dead rank"
            time.sleep(0.05)
        with pytest.raises((requests.RequestException, Refused)):
            server.generate([[1, 2, 3]], 2)
    assert identify(chain.checkpoints[1]).state == chain.states[1]


# What ``apply`` makes of it.


def kill(server: VllmServer, *, whole: bool) -> None:
    """The process that answers HTTP, or all of the server; back when nothing of it runs."""
    front = children_of(server.supervisor.pid)
    for pid in server.processes() if whole else front:
        os.kill(pid, signal.SIGKILL)
    server.supervisor.wait()


@contextmanager
def killed_before(route: str, act: Callable[[], None]) -> Iterator[None]:
    """``act`` runs where the client is about to call a method of Server."""
    real = getattr(Server, route)

    def dying(self: Server, *args: Any, **kwargs: Any) -> Any:
        act()
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, route, dying)
        yield


@contextmanager
def killed_while_staging(proxy: FaultProxy, act: Callable[[], None]) -> Iterator[None]:
    """``act`` runs while the server fetches, from a store that does not answer it any more."""
    real, asked = Server.engine, 0

    def dying(self: Server, method: str, **arguments: Any) -> EngineState:
        nonlocal asked
        if method == "deltactl_stage":
            asked = len(proxy.requests)
            proxy.inject(hang())
        elif asked:
            deadline = time.monotonic() + LIMIT
            while len(proxy.requests) == asked:
                assert time.monotonic() < deadline, "it fetches nothing"
                time.sleep(0.01)
            update = real(self, "deltactl_state").update
            assert update is not None and update.phase == "staging"
            asked = 0
            act()
        return real(self, method, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "engine", dying)
        yield
    proxy.clear()


def apply(target: str, server: VllmServer) -> Result:
    return CliRunner().invoke(app, ["apply", target, "--server", server.url, "--json"])


def assert_lost(ran: Result, target: str, server: VllmServer, *, paused: bool) -> None:
    """It says that it does not know how the server is, that trying again may help, and how."""
    assert ran.exit_code == 5, ran.output
    (row,) = json.loads(ran.stdout)["replicas"]
    assert row["step_after"] is row["state"] is row["paused"] is None
    assert f"error: {server.url}: no connection to the server any more; found" in ran.stderr
    again = f"deltactl apply {target} --server {server.url}"
    assert f"restart the server, then {again}\n" in ran.stderr
    unknown = ["may be paused, on the old step or on the new one"]
    assert row["notes"] == (unknown if paused else [])


def assert_brought(server: VllmServer, chain: ModelChain, step: int) -> None:
    """Started anew on what it was started on, it knows that step, and gets to the other."""
    ran = apply(f"{chain.bucket}@{step}", server)
    assert ran.exit_code == 0, ran.output
    (row,) = json.loads(ran.stdout)["replicas"]
    assert (row["step_before"], row["step_after"], row["how"]) == (1, step, "deltas")
    client = Client(server, chain)
    client.serves(step)
    assert client.audit() == []
    assert server.generate([[1, 2, 3]], 2)


def test_a_server_that_is_killed_under_an_apply(
    tmp_path: Path, vllm_scratch: Path, vllm_s3: FaultProxy, s3_server: Any
) -> None:
    """Three times, at three moments; each time the next server brings it to an end."""
    setup = Setup("qwen3", 1, True)
    chain, url = make_chain(tmp_path, setup.kind), s3_server.new_url()
    copy_chain(chain, url)
    with start(setup, chain, 1, vllm_scratch) as server:
        target = f"{url}@{TIP}"
        with killed_while_staging(vllm_s3, lambda: kill(server, whole=False)):
            ran = apply(target, server)
        assert_lost(ran, target, server, paused=False)
    with start(setup, chain, 1, vllm_scratch) as server:
        assert_brought(server, chain, 4)
        target = f"{chain.bucket}@{TIP}"
        with killed_before("commit", lambda: kill(server, whole=False)):
            ran = apply(target, server)
        assert_lost(ran, target, server, paused=True)
    with start(setup, chain, 1, vllm_scratch) as server:
        assert_brought(server, chain, TIP)
        target = f"{chain.bucket}@3"
        with killed_before("finish", lambda: kill(server, whole=True)):
            ran = apply(target, server)
        assert_lost(ran, target, server, paused=True)
    assert identify(chain.checkpoints[1]).state == chain.states[1]


def test_an_engine_that_is_killed_in_the_pause(tmp_path: Path, vllm_scratch: Path) -> None:
    """Requests that are open are never answered, and vLLM closes its port behind them. It is told
    in seconds, long before the timeout, of which nothing is left to wait for.

    It has a draft, which is told of before.
    """
    chain = make_chain(tmp_path, "qwen3")
    target, draft = f"{chain.bucket}@3", write_model(tmp_path / "draft", "qwen3", seed=1)
    guesses = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    options = ("--weight-transfer-config", BACKEND, "--speculative-config", json.dumps(guesses))
    with run_vllm_server(chain.checkpoints[1], vllm_scratch, options=options) as server:
        note = f"draft of its speculative decoding (draft_model, {draft}) is not updated"
        for words in (["apply", f"{chain.bucket}@2"], ["verify", chain.bucket], ["doctor"]):
            ran = CliRunner().invoke(app, [*words, "--server", server.url])
            assert (ran.exit_code, note in ran.stdout) == (0, True), ran.output
        assert server.generate([[1, 2, 3]], 8)

        def kill_engine() -> None:
            (engine,) = [pid for pid, name in server.processes().items() if "EngineCore" in name]
            os.kill(engine, signal.SIGKILL)

        with killed_before("commit", kill_engine):
            ran = CliRunner().invoke(
                app, ["apply", target, "--server", server.url, "--json", "--timeout", str(10**6)]
            )
        assert ran.exit_code == 1, ran.output
        (row,) = json.loads(ran.stdout)["replicas"]
        assert row["error"]["what"] == "the server's engine has died"
        assert row["step_after"] is row["state"] is row["paused"] is None
        assert len(row["notes"]) == 1  # nothing of a server that may be paused
        assert note in row["notes"][0]
        again = f"deltactl apply {target} --server {server.url}"
        assert f"hint: see its log, and restart the server, then {again}\n" in ran.stderr
        for words in (["doctor"], ["verify", chain.bucket]):
            ran = CliRunner().invoke(app, [*words, "--server", server.url])
            assert ran.exit_code in (1, 5)  # by whether the port is closed by now
            assert "engine has died" in ran.output or "no connection to the server" in ran.output
    assert identify(chain.checkpoints[1]).state == chain.states[1]
