"""Fixtures that every test may ask for, and what keeps tests to themselves."""

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import botocore.loaders
import botocore.session
import pytest
from hypothesis import HealthCheck, settings

from deltactl.core.threads import cores
from tests.support.azure_server import AzureServer, run_azure_server
from tests.support.fixtures import loops, unprivileged
from tests.support.s3_server import S3Server, run_s3_server
from tests.support.trained import trained_chain, trained_chain_tied
from tests.support.vllm_fixtures import (
    vllm_chain,
    vllm_chain_in_s3,
    vllm_client,
    vllm_first,
    vllm_fresh,
    vllm_live,
    vllm_s3,
    vllm_scratch,
    vllm_setup,
)
from tests.support.vllm_server import REQUIRED, vllm_is_missing

__all__ = [
    "loops", "trained_chain", "trained_chain_tied", "unprivileged", "vllm_chain",
    "vllm_chain_in_s3", "vllm_client", "vllm_first", "vllm_fresh", "vllm_live", "vllm_s3",
    "vllm_scratch", "vllm_setup",
]  # fmt: skip

NEED_VLLM = ("demo/real", "server/real", "vllm/real")
"""Directories of tests that start a real vLLM. Where it is not installed they are not collected."""

collect_ignore = list(NEED_VLLM) if vllm_is_missing() else []

VLLM_LIMIT = 900
"""Seconds for one test of those, which may have to start two servers first."""

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")  # before a test is imported: how fast it is decides nothing

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background; what a test starts is to be interrupted there too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported, so before any test


def pytest_configure(config: pytest.Config) -> None:
    if collect_ignore and os.environ.get(REQUIRED):
        raise pytest.UsageError(f"{REQUIRED} is set, and vLLM is not installed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means: one more than there are cores, as many tests wait for others."""
    return cores() + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadscope`` keeps together what shares a real vLLM."""
    if config.getvalue("dist") != "loadscope":
        return None
    from tests.support.scheduling import ServerScheduling

    return ServerScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a real vLLM may take longer."""
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).as_posix().startswith(NEED_VLLM):
            item.add_marker(pytest.mark.timeout(VLLM_LIMIT))


_PATIENCE = 60.0  # seconds


def pytest_unconfigure(config: pytest.Config) -> None:
    """A thread that a test has left running must not keep the process for ever: it is told where
    it stands, and the run has failed. One of several workers waits for the others."""
    if hasattr(config, "workerinput"):
        return
    faulthandler.dump_traceback_later(_PATIENCE, exit=True, file=sys.__stderr__)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if collect_ignore:
        left_out = " and ".join(f"tests/{name}" for name in NEED_VLLM)
        terminalreporter.write_line(f"not run: {left_out}, as vLLM is not installed; see .ci/run")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tips are cached below the session's directory, never in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTACTL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_loader() -> Iterator[None]:
    """What botocore knows of S3 is read once, not for every client, of which there are hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", cache(botocore.loaders.create_loader))
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
