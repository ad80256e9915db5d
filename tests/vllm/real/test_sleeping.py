"""What sleeps, by vLLM's own allocator. No memory is mapped or given back: there is no device."""

from __future__ import annotations

import os
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from deltactl.vllm.update.sleeping import asleep
from tests.support.vllm_in_process import ENVIRONMENT

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that holds memory of every tag."""
    os.environ.update(ENVIRONMENT)
    import torch
    from vllm.device_allocator import AllocationData, cumem

    monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=lambda *_: None))
    for name in ("create_and_map", "unmap_and_release"):
        monkeypatch.setattr(cumem, name, lambda handle: None)
    monkeypatch.setattr(cumem, "PIN_MEMORY", False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    made = cumem.CuMemAllocator()
    tags = ("weights", "kv_cache", "runtime")
    made.pointer_to_data = {n: AllocationData((0, 8, n, 0), tag) for n, tag in enumerate(tags)}
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", made)
    return made


@pytest.mark.parametrize("level", [1, 2])
def test_weights_and_cache_sleep_and_wake_one_after_the_other(allocator: Any, level: int) -> None:
    assert asleep() == ()
    kept = ("runtime", "cudagraph")
    allocator.sleep(("weights", *kept) if level == 1 else kept)
    assert asleep() == ("weights", "kv_cache")
    allocator.wake_up(["weights"])
    assert asleep() == ("kv_cache",)
    allocator.wake_up(["kv_cache"])
    assert asleep() == ()
    allocator.sleep(kept)
    allocator.wake_up()
    assert asleep() == ()
