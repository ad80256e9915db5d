"""What runs inside vLLM: the plugin, the map from a checkpoint to live weights, and the engine.

vLLM imports this package in each of its processes, whatever backend they use, so it imports nothing
by itself. ``--worker-extension-cls deltactl.vllm.WorkerExtension`` names what is loaded lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltactl.vllm.worker import WorkerExtension

__all__ = ["BACKEND", "WorkerExtension", "register"]

BACKEND = "deltactl"
"""The name in ``--weight-transfer-config '{"backend":"deltactl"}'``."""


def register() -> None:
    """Make the backend known to vLLM, which calls this in each of its processes.

    Idempotent. The engine's module is imported when an engine is made, and the layers of a CPU
    server are changed (``deltactl.vllm.layout.cpu_layout``) when they are imported and this backend
    is configured: elsewhere nothing is paid and nothing differs.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from deltactl.vllm.layout import cpu_layout

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "deltactl.vllm.engine", "Engine")
    cpu_layout.install()


def __getattr__(name: str) -> Any:
    if name == "WorkerExtension":
        from deltactl.vllm.worker import WorkerExtension

        return WorkerExtension
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
