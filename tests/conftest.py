"""Fixtures that every test may ask for, and what keeps tests to themselves."""

import os
from collections.abc import Iterator

import pytest

from tests.support.azure_server import AzureServer, run_azure_server
from tests.support.s3_server import S3Server, run_s3_server
from tests.support.trained import trained_chain, trained_chain_tied

__all__ = ["trained_chain", "trained_chain_tied"]

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported, so before any test


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tips are cached below the session's directory, never in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One for the whole session; each test has a prefix of its own in it."""
    with run_s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def azure_server() -> Iterator[AzureServer]:
    """One for the whole session; each test has a prefix of its own in it."""
    with run_azure_server() as server:
        yield server
