"""A step by vLLM's own reload on a real server without the plugin: the kind that was proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltactl.bucket import open_bucket
from deltactl.server.reload import reload_servers
from deltactl.server.update import Options
from tests.support.vllm_chain import TIP, ModelChain, make_chain
from tests.support.vllm_client import Client
from tests.support.vllm_fixtures import Recorded
from tests.support.vllm_server import EXTENSION, run_vllm_server

PLAIN: dict[str, Any] = {"options": (), "extension": EXTENSION}  # which only reads


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> ModelChain:
    return make_chain(tmp_path_factory.mktemp("plain"), "llama")


def recorded(client: Client) -> Recorded:
    return Recorded(client.outputs(), client.checksums())


def test_weights_that_are_not_quantised_with_an_output_layer_of_their_own(
    chain: ModelChain, vllm_scratch: Path, tmp_path: Path
) -> None:
    with run_vllm_server(chain.checkpoints[TIP], vllm_scratch, **PLAIN) as server:
        fresh = recorded(Client(server, chain))
    with run_vllm_server(chain.checkpoints[1], vllm_scratch, **PLAIN) as server:
        client = Client(server, chain)
        assert recorded(client).outputs != fresh.outputs
        bucket, place = open_bucket(chain.bucket), tmp_path / "pulled"
        (report,) = reload_servers(bucket, None, [server.url], place, Options()).replicas
        assert (report.error, report.step_after, report.how) == (None, TIP, "reload")
        assert report.paused is False
        assert recorded(client) == fresh
        assert server.get("/weight_info") == {"weight_version": str(TIP)}
