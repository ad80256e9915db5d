"""The buckets that the conformance suite runs over: one more kind is one more param here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deltactl.bucket import open_bucket
from deltactl.chain.store import Bucket
from tests.support.azure_server import AzureServer
from tests.support.hub import HubStandIn
from tests.support.hub.environment import for_one_test, stand_in
from tests.support.s3_server import S3Server, use_s3

OpenBucket = Callable[..., Bucket]
"""``open_at(prefix="chain")``: a bucket at that prefix of a place that is the test's own, empty
at first. Each call makes a new object, as another process would."""


def _local(request: pytest.FixtureRequest) -> OpenBucket:
    root: Path = request.getfixturevalue("tmp_path")

    def open_at(prefix: str = "chain") -> Bucket:
        return open_bucket(str(root / "buckets" / prefix))

    return open_at


@pytest.fixture(scope="session")
def _hub_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubStandIn]:
    with stand_in(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture
def hub(_hub_server: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A Hub that works, which the environment names, with a token that may write."""
    with for_one_test(_hub_server, monkeypatch):
        yield _hub_server


def _hub(request: pytest.FixtureRequest) -> OpenBucket:
    hub: HubStandIn = request.getfixturevalue("hub")
    name = hub.new_bucket()
    hub.page = 20

    def open_at(prefix: str = "chain") -> Bucket:
        return open_bucket(f"hf://buckets/{name}/{prefix}")

    return open_at


def _s3(request: pytest.FixtureRequest) -> OpenBucket:
    server: S3Server = request.getfixturevalue("s3_server")
    use_s3(request.getfixturevalue("monkeypatch"), server.endpoint)
    return _below(server.new_url())


def _az(request: pytest.FixtureRequest) -> OpenBucket:
    server: AzureServer = request.getfixturevalue("azure_server")
    for name, value in server.environment.items():
        request.getfixturevalue("monkeypatch").setenv(name, value)
    return _below(server.new_url())


def _below(url: str) -> OpenBucket:
    return lambda prefix="chain": open_bucket(f"{url}/{prefix}")


KINDS: dict[str, Callable[[pytest.FixtureRequest], OpenBucket]] = {
    "local": _local,
    "s3": _s3,
    "az": _az,
    "hub": _hub,
}


@pytest.fixture(params=KINDS)
def open_at(request: pytest.FixtureRequest) -> OpenBucket:
    return KINDS[request.param](request)


@pytest.fixture
def more_than_a_page(request: pytest.FixtureRequest) -> int:
    """As many objects as a listing does not give at once."""
    return 45 if request.node.callspec.params["open_at"] == "hub" else 1050


@pytest.fixture
def bucket(open_at: OpenBucket) -> Bucket:
    return open_at()
