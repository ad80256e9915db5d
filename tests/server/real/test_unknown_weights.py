"""Weights that somebody else has changed, that came from elsewhere or were never loaded: after one
``apply`` the server is, in answers and in every bit, one that was started on the step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_chain import TIP, ModelChain
from tests.support.vllm_client import Client
from tests.support.vllm_fixtures import Recorded, Setup, assert_serves
from tests.support.vllm_server import BACKEND, run_vllm_server

MOVED, DUMMY = Setup("qwen3", 1, True), Setup("qwen3-tied", 2, True)


def ours(verb: str, client: Client, step: int) -> tuple[int, dict[str, Any], str]:
    """Our command: its exit status, what it says of the server, and stderr."""
    target = f"{client.chain.bucket}@{step}"
    words = ["-m", "deltactl", verb, target, "--server", client.server.url, "--json"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    (row,) = json.loads(done.stdout)["replicas"]
    return done.returncode, row, done.stderr


def assert_brought_to(client: Client, step: int, how: str | None) -> dict[str, Any]:
    code, row, err = ours("apply", client, step)
    assert (code, row["ok"], row["how"], row["step_after"]) == (0, True, how, step), err
    return row


def reset(client: Client) -> None:
    client.server.post("/weight_checker", {"action": "reset"})


def reload_the_directory(client: Client) -> None:
    client.server.rpc("reload_weights")


def reload_another(client: Client) -> None:
    client.server.rpc("reload_weights", weights_path=str(client.chain.checkpoints[3]))


@pytest.mark.parametrize(
    ("change", "how"),
    [(reset, "full"), (reload_the_directory, "deltas"), (reload_another, "full")],
)
def test_weights_that_were_changed_behind_our_back(
    vllm_client: Client, vllm_fresh: Recorded, change: Callable[[Client], None], how: str
) -> None:
    """Each where the server was on the very step that it is told to load."""
    assert_brought_to(vllm_client, TIP, "deltas")
    change(vllm_client)
    assert vllm_client.checksums() != vllm_fresh.checksums
    code, row, err = ours("verify", vllm_client, TIP)
    assert (code, row["ok"]) == (3, False)
    if how == "deltas":  # what is live now has a name
        assert row["step"] == 1
        assert "are another state than it was taken for" in err
    else:
        assert row["differing"], err
        assert "tensors" in err
    row = assert_brought_to(vllm_client, TIP, how)
    assert row["reloaded"] == [], "the map was proven"
    assert_serves(vllm_client, vllm_fresh)
    assert_brought_to(vllm_client, TIP, None)


def test_a_bit_that_no_link_touches(vllm_client: Client, vllm_fresh: Recorded) -> None:
    id_ = vllm_client.stage(TIP)
    vllm_client.server.rpc("test_flip", rank=len(vllm_client.states()) - 1, staged=False)
    vllm_client.ask("discard", id=id_)
    assert_brought_to(vllm_client, TIP, "full")
    assert_serves(vllm_client, vllm_fresh)


@pytest.mark.parametrize("vllm_setup", [MOVED], ids=str, indirect=True, scope="session")
def test_a_model_path_that_leads_elsewhere_before_the_first_apply(
    vllm_setup: Setup, vllm_chain: ModelChain, vllm_fresh: Recorded, vllm_scratch: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The link was moved to the very step that is asked for; its files are older than the server,
    which goes on serving the step that it was started on."""
    model = tmp_path / "current"
    model.symlink_to(vllm_chain.checkpoints[1])
    with run_vllm_server(model, vllm_scratch, eager=vllm_setup.eager) as server:
        client = Client(server, vllm_chain)
        model.unlink()
        model.symlink_to(vllm_chain.checkpoints[TIP])
        row = assert_brought_to(client, TIP, "deltas")
        assert row["step_before"] == 1
        assert_serves(client, vllm_fresh)


@pytest.mark.parametrize("vllm_setup", [DUMMY], ids=str, indirect=True, scope="session")
def test_a_start_on_weights_that_were_never_loaded(
    vllm_setup: Setup, vllm_chain: ModelChain, vllm_fresh: Recorded, vllm_scratch: Path
) -> None:
    """All of them are loaded once, those too that no link touches; then they are as any others,
    each mapped, and deltas do."""
    options = ("--weight-transfer-config", BACKEND, "--load-format", "dummy")
    with run_vllm_server(
        vllm_chain.checkpoints[1], vllm_scratch, world_size=vllm_setup.ranks, options=options
    ) as server:
        client = Client(server, vllm_chain)
        code, row, _ = ours("verify", client, 1)
        assert (code, row["step"], len(row["differing"])) == (3, None, row["checked"])
        row = assert_brought_to(client, 3, "full")
        assert row["reloaded"]
        assert any("nobody knew" in note for note in row["notes"])
        for state in client.states():
            assert (state["map"]["unmapped"], state["doubt"]) == ({}, None)
        assert client.audit() == []
        assert_brought_to(client, TIP, "deltas")
        assert_serves(client, vllm_fresh)
