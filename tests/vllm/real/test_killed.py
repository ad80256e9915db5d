"""A server of its own, of which a part is killed in the middle of an update."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import requests

from deltactl.vllm.host import identify
from tests.support.vllm_chain import make_chain
from tests.support.vllm_client import LIMIT, Client, phases
from tests.support.vllm_fixtures import Setup, start
from tests.support.vllm_server import Refused


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
