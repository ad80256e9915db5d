"""The client and a real server: the command and the library bring it to a step and say so."""

from __future__ import annotations

import json
import subprocess
import sys

from deltactl.bucket import open_bucket
from deltactl.server.apply import apply_to_servers
from deltactl.server.doctor import examine
from deltactl.server.update import Options
from tests.support.vllm_chain import DENSE, TIP, ModelChain
from tests.support.vllm_client import Client
from tests.support.vllm_fixtures import Recorded, assert_serves

QUICK = Options(grace=0.2)


def test_from_the_first_step_to_the_tip(
    vllm_client: Client, vllm_fresh: Recorded, vllm_chain: ModelChain
) -> None:
    applied = apply_to_servers(open_bucket(vllm_chain.bucket), None, [vllm_client.server.url])
    (replica,) = applied.replicas
    assert replica.error is None, replica
    assert (replica.step_before, replica.step_after, replica.how) == (1, TIP, "deltas")
    assert (replica.paused, replica.reloaded) == (False, ())
    assert replica.seconds_paused is not None
    assert vllm_client.server.get("/weight_info") == {"weight_version": str(TIP)}
    vllm_client.serves(TIP)
    assert_serves(vllm_client, vllm_fresh)


def test_the_command_from_s3(
    vllm_client: Client, vllm_fresh: Recorded, vllm_chain_in_s3: str
) -> None:
    for step in (DENSE, TIP):
        target = f"{vllm_chain_in_s3}@{step}"
        command = ["-m", "deltactl", "apply", target, "--server", vllm_client.server.url, "--json"]
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        (row,) = json.loads(done.stdout)["replicas"]
        assert (row["ok"], row["step_after"]) == (True, step)
    assert_serves(vllm_client, vllm_fresh)


def test_a_server_that_was_left_paused_on_unknown_weights(
    vllm_client: Client, vllm_fresh: Recorded, vllm_chain: ModelChain
) -> None:
    id_ = vllm_client.stage(3)
    vllm_client.seal(id_)
    vllm_client.server.rpc("test_break", points=["write", "roll_back"], rank=0)
    vllm_client.server.post("/pause", mode="keep")
    vllm_client.commit(id_)
    assert vllm_client.states()[0]["poisoned"] is not None
    bucket = open_bucket(vllm_chain.bucket)
    (replica,) = apply_to_servers(bucket, None, [vllm_client.server.url], QUICK).replicas
    assert replica.error is None, replica
    assert (replica.step_after, replica.how, replica.paused) == (TIP, "full", False)
    assert_serves(vllm_client, vllm_fresh)


def test_the_doctor_finds_nothing_in_the_way(vllm_client: Client) -> None:
    assert [f for f in examine(vllm_client.server.url) if f.level == "error"] == []
