"""An environment for the tests of a module, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from deltactl.demo.loop.environment import Environment


@pytest.fixture
def environment() -> Iterator[Environment]:
    with Environment() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
