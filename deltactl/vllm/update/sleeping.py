"""What of a server's memory sleeps: vLLM has given it back, and whoever reads it ends the process.

``/sleep`` takes weights and KV cache, ``/wake_up?tags=...`` brings back one or both; at level 2 the
weights come back empty. vLLM's workers keep no record of it, but the allocator of their memory
does, allocation by allocation, and a backend of another kind says whether it has suspended all.
"""

from __future__ import annotations

import sys
from typing import Any

WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's tags."""

_ALLOCATORS = (
    ("vllm.device_allocator.cumem", "CuMemAllocator"),
    ("vllm.device_allocator.xpumem", "XpuMemAllocator"),
)


def asleep(worker: Any = None) -> tuple[str, ...]:
    """The tags of what sleeps in this process; ``worker``: vLLM's, where it is at hand."""
    backend = getattr(worker, "_sleep_mode_backend", None)
    kind = type(backend).__name__
    if backend is not None and kind != "CuMemBackend" and backend.state() == "SUSPENDED":
        return WEIGHTS, CACHE
    tags = {data.tag for data in _allocations() if getattr(data, "is_asleep", False)}
    return tuple(tag for tag in (WEIGHTS, CACHE) if tag in tags)


def _allocations() -> list[Any]:
    """Those of the allocators that are in use; none is made for the asking."""
    found: list[Any] = []
    for module, name in _ALLOCATORS:
        allocator = getattr(sys.modules.get(module), name, None)
        instance = getattr(allocator, "instance", None)
        if instance is not None:
            found += list(instance.pointer_to_data.values())
    return found
