"""The buckets that the conformance suite runs over: one more kind is one more param here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deltactl.bucket import open_bucket
from deltactl.core.store import Bucket
from tests.support.azure_server import AzureServer
from tests.support.s3_server import S3Server, use_s3

OpenBucket = Callable[..., Bucket]
"""``open_at(prefix="chain")``: a bucket at that prefix of a place that is the test's own, empty
at first. Each call makes a new object, as another process would."""


def _local(request: pytest.FixtureRequest) -> OpenBucket:
    root: Path = request.getfixturevalue("tmp_path")

    def open_at(prefix: str = "chain") -> Bucket:
        return open_bucket(str(root / "buckets" / prefix))

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
}


@pytest.fixture(params=KINDS)
def open_at(request: pytest.FixtureRequest) -> OpenBucket:
    return KINDS[request.param](request)


@pytest.fixture
def bucket(open_at: OpenBucket) -> Bucket:
    return open_at()
