"""The environment in which the real clients talk to the stand-in.

Xet's client makes one session a process, which reads its settings when it is first used, and keeps
a cache of what the store has. So there is one stand-in a process too, that never forgets content.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.hub.server import HubStandIn

SETTINGS = {
    "HF_XET_XORB_COMPRESSION_POLICY": "none",
    "HF_XET_CLIENT_RETRY_BASE_DELAY": "20ms",
    "HF_XET_CLIENT_READ_TIMEOUT": "1s",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


@contextmanager
def stand_in(home: Path) -> Iterator[HubStandIn]:
    """A stand-in for this process, with what the clients keep below ``home``."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        patch.setenv("HF_XET_CACHE", str(home / "xet"))
        hub = HubStandIn()
        try:
            yield hub
        finally:
            hub.close()


@contextmanager
def for_one_test(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the environment name the stand-in and its token; afterwards it is as it was."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", hub.write_token)
    hub.page = 1000
    hub.forget_counts()
    try:
        yield
    finally:
        hub.mend()
