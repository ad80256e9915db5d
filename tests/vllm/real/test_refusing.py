"""Servers that take no updates at all, by vLLM's configuration."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.mark.parametrize(
    ("parallel", "found"),
    [
        ({"data_parallel_size": 2, "enable_eplb": False}, 2),
        ({"data_parallel_size": 1, "enable_eplb": True}, "--enable-eplb"),
        ({"data_parallel_size": 1}, None),
    ],
)
def test_replicas_and_experts_that_are_moved_about(
    parallel: dict[str, object], found: object
) -> None:
    from deltactl.vllm.engine import _refusal

    refusal = _refusal(SimpleNamespace(parallel_config=SimpleNamespace(**parallel)))
    assert (refusal and refusal.found) == found
