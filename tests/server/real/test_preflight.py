"""What keeps a real server from a step: doctor, ``apply -n``, apply and verify tell the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deltactl.cli.app import app
from tests.support.vllm_chain import ModelChain, make_chain
from tests.support.vllm_client import Client
from tests.support.vllm_fixtures import SETUPS
from tests.support.vllm_server import BACKEND, run_vllm_server


def command(*words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--json"])


def told(bucket: str, url: str) -> list[tuple[str, str | None, int]]:
    """The error that each way to ask for the tip gives: what, hint and exit status."""
    found = []
    ran = command("doctor", bucket, "--server", url)
    rows = json.loads(ran.stdout)["servers"][0]["findings"]
    (error,) = [row for row in rows if row["level"] == "error"]
    found.append((error["what"], error["hint"], ran.exit_code))
    for more in (["-n"], []):
        ran = command("apply", bucket, "--server", url, *more)
        (row,) = json.loads(ran.stdout)["replicas"]
        assert f"error: {error['what']}\n" in ran.stderr
        found.append((error["what"], row["error"]["hint"], ran.exit_code))
    return found


def test_a_float32_server_of_a_bfloat16_chain(tmp_path: Path, vllm_scratch: Path) -> None:
    chain = make_chain(tmp_path, "qwen3")
    options = ("--weight-transfer-config", BACKEND, "--dtype", "float32")
    with run_vllm_server(chain.checkpoints[1], vllm_scratch, options=options) as server:
        (doctor, dry, real) = told(chain.bucket, server.url)
        assert (doctor[2], dry[2], real[2]) == (1, 11, 11)
        assert doctor[:2] == dry[:2] == real[:2]
        assert "no bit is equal; expected bfloat16, found float32" in doctor[0]
        assert doctor[1] == "start vLLM with --dtype bfloat16"
        ran = command("doctor", "--server", server.url)
        rows = json.loads(ran.stdout)["servers"][0]["findings"]
        assert (ran.exit_code, rows[-1]["what"]) == (1, doctor[0])
        ran = command("verify", chain.bucket, "--server", server.url)
        (row,) = json.loads(ran.stdout)["replicas"]
        assert (ran.exit_code, row["error"]["found"], row["unaudited"]) == (11, "float32", [])
        assert ran.stderr == f"error: {doctor[0]}\nhint: {doctor[1]}\n"


@pytest.mark.parametrize("vllm_setup", SETUPS[:1], ids=str, indirect=True, scope="session")
def test_another_model_s_chain(vllm_client: Client, tmp_path: Path) -> None:
    """Llama has no norms of queries and keys; all its other tensors are alike."""
    before = vllm_client.checksums()
    (doctor, dry, real) = told(make_chain(tmp_path, "llama").bucket, vllm_client.server.url)
    assert (doctor[2], dry[2], real[2]) == (1, 11, 11)
    assert doctor[:2] == dry[:2] == real[:2]
    assert "the step is of another model than the one that is served: 6 of 36 tensors" in doctor[0]
    assert "self_attn.k_norm.weight'" in doctor[0]
    assert "expected BF16 [32], found no such tensor" in doctor[0]
    assert vllm_client.checksums() == before
    vllm_client.serves(1)


@pytest.mark.parametrize("vllm_setup", SETUPS[:1], ids=str, indirect=True, scope="session")
def test_the_server_s_own_chain(vllm_client: Client, vllm_chain: ModelChain) -> None:
    ran = command("doctor", f"{vllm_chain.bucket}@3", "--server", vllm_client.server.url)
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    assert (document["ok"], document["step"]) == (True, 3)
    rows = {row["check"]: row for row in document["servers"][0]["findings"]}
    assert rows["step"]["what"] == "step 3 can be loaded from step 1: 2 deltas"
