"""The worker extension of the tests' servers: reads weights back, and breaks things on demand."""

from __future__ import annotations

import hashlib
from typing import Any

from deltactl.vllm.worker import WorkerExtension


class DebugExtension(WorkerExtension):
    """Beside what users get; loaded by name into the server of a test, nowhere else."""

    model_runner: Any

    def test_checksums(self) -> dict[str, Any]:
        """SHA-256 of the bytes of every runtime parameter and buffer of this rank, by name.

        Storage as it lies, and shape and dtype: two servers with equal sums hold the same bits.
        """
        import torch

        model = self.model_runner.get_model()
        found = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        for name, tensor in named:
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            head = f"{tuple(tensor.shape)} {tensor.dtype} ".encode()
            found[name] = hashlib.sha256(head + raw.numpy().tobytes()).hexdigest()
        return found

    def test_empty_parameters(self) -> list[str]:
        """Parameters without elements: their weights are where nobody reads them."""
        model = self.model_runner.get_model()
        return [name for name, parameter in model.named_parameters() if not parameter.numel()]
