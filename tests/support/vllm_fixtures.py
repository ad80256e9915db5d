"""Servers that many tests share: one for each setup, on a chain of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import s3_server as s3
from tests.support.fault_proxy import FaultProxy
from tests.support.s3_server import S3Server
from tests.support.vllm_chain import TIP, ModelChain, copy_chain, make_chain
from tests.support.vllm_client import Client
from tests.support.vllm_server import VllmServer, run_vllm_server


@dataclass(frozen=True)
class Setup:
    """What kind of server: the model, tensor-parallel ranks, and whether it is compiled."""

    kind: str
    ranks: int
    eager: bool

    def __str__(self) -> str:
        return f"{self.kind}-tp{self.ranks}-{'eager' if self.eager else 'compiled'}"


SETUPS = (
    Setup("qwen3", 1, True),
    Setup("qwen3-tied", 2, True),
    Setup("llama", 1, False),
    Setup("qwen3-moe", 2, False),
)


@dataclass(frozen=True)
class Recorded:
    """What a server that was started on a step answers, and the bits that it holds."""

    outputs: list[Any]
    checksums: list[dict[str, str]]


def assert_serves(client: Client, expected: Recorded) -> None:
    """Assert that a server is the other one: in tokens, logprobs and every bit of every runtime
    parameter on every rank; and that its own audit says so too."""
    differ = [
        name
        for found, wanted in zip(client.checksums(), expected.checksums, strict=True)
        for name in wanted
        if found.get(name) != wanted[name]
    ]
    assert not differ
    assert client.outputs() == expected.outputs
    assert client.audit() == []


@pytest.fixture(scope="session")
def vllm_scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs, and what torch.compile made, for all servers of the session."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def vllm_s3(s3_server: S3Server) -> Iterator[FaultProxy]:
    """S3 as the servers see it: through a proxy that can fail."""
    with FaultProxy(s3_server.endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        s3.use_s3(patch, proxy.url)
        yield proxy


@pytest.fixture(scope="session", params=SETUPS, ids=str)
def vllm_setup(request: pytest.FixtureRequest) -> Setup:
    """Tests are run setup by setup, so that one server runs at a time."""
    found: Setup = request.param
    return found


@pytest.fixture(scope="session")
def vllm_chain(vllm_setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> ModelChain:
    """Read it, never write; ``copy_bucket`` gives one to damage."""
    return make_chain(tmp_path_factory.mktemp(str(vllm_setup)), vllm_setup.kind)


@pytest.fixture(scope="session")
def vllm_chain_in_s3(vllm_chain: ModelChain, vllm_s3: FaultProxy, s3_server: S3Server) -> str:
    """The address of the same chain in S3."""
    url = s3_server.new_url()
    copy_chain(vllm_chain, url)
    return url


@pytest.fixture(scope="session")
def vllm_fresh(
    vllm_setup: Setup, vllm_chain: ModelChain, vllm_scratch: Path, vllm_s3: FaultProxy
) -> Recorded:
    """A server that was started on the last step, and is gone."""
    with start(vllm_setup, vllm_chain, TIP, vllm_scratch) as server:
        client = Client(server, vllm_chain)
        return Recorded(client.outputs(), client.checksums())


@pytest.fixture(scope="session")
def vllm_live(
    vllm_setup: Setup,
    vllm_chain: ModelChain,
    vllm_fresh: Recorded,
    vllm_scratch: Path,
    vllm_s3: FaultProxy,
) -> Iterator[tuple[Client, Recorded]]:
    """A server that was started on step 1, and what it was then."""
    with start(vllm_setup, vllm_chain, 1, vllm_scratch) as server:
        client = Client(server, vllm_chain)
        client.prepare()
        yield client, Recorded(client.outputs(), client.checksums())


@pytest.fixture
def vllm_client(vllm_live: tuple[Client, Recorded]) -> Client:
    """The server of the setup, on step 1 whatever the test before did to it."""
    client, first = vllm_live
    client.reset()
    assert client.checksums() == first.checksums
    return client


@pytest.fixture
def vllm_first(vllm_live: tuple[Client, Recorded]) -> Recorded:
    """What the server was when it started on step 1."""
    return vllm_live[1]


def start(
    setup: Setup, chain: ModelChain, step: int, scratch: Path
) -> AbstractContextManager[VllmServer]:
    """A server of a setup on a step of its chain.

    Wherever the step lies, the server is told the same path: vLLM looks up what it compiled by
    that, among others, so that the setup's second server finds some of what the first has made.
    """
    model = scratch / str(setup) / "model"
    model.parent.mkdir(exist_ok=True)
    model.unlink(missing_ok=True)
    model.symlink_to(chain.checkpoints[step])
    return run_vllm_server(model, scratch, world_size=setup.ranks, eager=setup.eager)
