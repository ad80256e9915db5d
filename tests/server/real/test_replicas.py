"""Six replicas, two of them real: none waits for another, and each is reported as it is."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deltactl.core.errors import DeltactlError
from tests.support.vllm_chain import TIP, ModelChain
from tests.support.vllm_client import LIMIT, Client
from tests.support.vllm_fixtures import SETUPS, Recorded, Setup, assert_serves, start
from tests.support.vllm_standin import StandIn


def command(verb: str, target: str, urls: list[str]) -> subprocess.CompletedProcess[str]:
    words = [verb, target, *(word for url in urls for word in ("--server", url)), "--json"]
    return subprocess.run(
        [sys.executable, "-m", "deltactl", *words], capture_output=True, text=True, check=False
    )


def until(done: Callable[[], bool], what: str) -> None:
    """Hold up whoever calls this. Where nobody else gets on, it fails the update, and the test."""
    deadline = time.monotonic() + LIMIT / 2
    while not done():
        if time.monotonic() > deadline:
            raise DeltactlError(f"held up in vain until {what}")
        time.sleep(0.01)


@pytest.mark.parametrize("vllm_setup", SETUPS[:1], ids=str, indirect=True, scope="session")
def test_none_waits_for_another(
    vllm_client: Client,
    vllm_setup: Setup,
    vllm_fresh: Recorded,
    vllm_chain: ModelChain,
    vllm_scratch: Path,
    tmp_path: Path,
) -> None:
    """Two that stage slowly meet each other in the middle of it, and go on only once both real ones
    serve the step and another has died in its pause; the first that is named answers its very first
    request after all that. So a client that lets any wait for any other comes to no end.
    """
    first, urls = vllm_chain.checkpoints[1], []

    def stand_in(name: str) -> StandIn:
        (tmp_path / name).mkdir()
        return StandIn(first, tmp_path / name)

    with (
        start(vllm_setup, vllm_chain, 1, vllm_scratch) as second,
        stand_in("late") as late,
        stand_in("slow") as slow,
        stand_in("slower") as slower,
        stand_in("dying") as dying,
    ):
        real = [vllm_client, Client(second, vllm_chain)]
        meeting = threading.Barrier(2, timeout=LIMIT)

        def quick_are_through() -> bool:
            labels = [client.server.get("/weight_info")["weight_version"] for client in real]
            return labels == [str(TIP)] * 2 and dying.dead

        def stage_slowly() -> None:
            meeting.wait()
            until(quick_are_through, "the real servers serve the step")

        seen: list[bool] = []

        def answer_last() -> None:
            until(lambda: slow.vllm.label == slower.vllm.label == str(TIP), "the slow ones do")
            seen.append(quick_are_through())

        slow.vllm.workers.before_staged = slower.vllm.workers.before_staged = stage_slowly
        late.fail("/version", how=None, meanwhile=answer_last)
        dying.fail("/update_weights", how="kill")
        fleet = [late.url, slow.url, real[0].server.url, dying.url, real[1].server.url, slower.url]
        urls += fleet
        ran = command("apply", f"{vllm_chain.bucket}@{TIP}", urls)

        assert seen == [True], ran.stderr
        assert ran.returncode == 5, ran.stderr
        rows = {row["url"]: row for row in json.loads(ran.stdout)["replicas"]}
        assert list(rows) == urls
        lost = rows.pop(dying.url)
        for row in rows.values():
            known = (row["ok"], row["step_before"], row["step_after"], row["paused"], row["error"])
            assert known == (True, 1, TIP, False, None), row
            assert row["state"] == vllm_chain.states[TIP]
        assert (lost["ok"], lost["step_before"], lost["error"]["exit_code"]) == (False, 1, 5)
        assert lost["step_after"] is lost["state"] is lost["paused"] is None
        assert lost["notes"] == ["may be paused, on the old step or on the new one"]
        assert f"error: {dying.url}: " in ran.stderr
        again = f"deltactl apply {vllm_chain.bucket}@{TIP} --server {dying.url}"
        assert f"restart the server, then {again}\n" in ran.stderr
        for server in (late, slow, slower):
            assert server.live == vllm_chain.states[TIP]

        proof = command("verify", f"{vllm_chain.bucket}@{TIP}", [c.server.url for c in real])
        assert proof.returncode == 0, proof.stderr
        for client in real:
            client.serves(TIP)
            assert_serves(client, vllm_fresh)
