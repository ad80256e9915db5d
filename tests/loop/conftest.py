"""An environment for the tests of a module, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from deltactl.loop.environment import Environment

collect_ignore = [] if find_spec("vllm") else ["real"]


@pytest.fixture
def environment() -> Iterator[Environment]:
    with Environment(idle=2.0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
