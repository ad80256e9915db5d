"""The worker extension of the tests' servers: reads weights back, and breaks things on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from deltactl.core.errors import DeltactlError, Transient
from deltactl.vllm.staging import live_weights
from deltactl.vllm.worker import WorkerExtension


class DebugExtension(WorkerExtension):
    """Beside what users get; loaded by name into the server of a test, nowhere else."""

    model_runner: Any

    def test_checksums(self) -> dict[str, Any]:
        """SHA-256 of the bytes of every runtime parameter and buffer of this rank, by name.

        Of shape and dtype too: two servers with equal sums hold the same bits.
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

    def test_break_staging(self, rank: int) -> None:
        """The next staging on that rank fails."""
        if self.rank == rank:
            _fail_once(self.weight_transfer_engine.serving._work, "stage")

    def test_break(self, points: list[str], rank: int) -> None:
        """Of the update that is staged the parts named fail on that rank: "write" half-way,
        "read back" after it, "check" says no, "roll_back" does nothing and says so."""
        if self.rank != rank:
            return
        prepared = self.weight_transfer_engine.serving._update.staged
        broken: Mapping[str, tuple[str, Callable[[], bool]]] = {
            "write": ("replace", lambda: _write_half(prepared)),
            "read back": ("replace", partial(_lose, prepared.replace)),
            "check": ("replace", lambda: False),
            "roll_back": ("roll_back", lambda: False),
        }
        for point in points:
            setattr(prepared, *broken[point])

    def test_spoil_reloads(self) -> None:
        """From now on each reload leaves int8 layers as vLLM's own does without deltactl: their
        parameters are right, and oneDNN reads scales that are noise."""
        work = self.weight_transfer_engine.serving._work
        real, model = work._reload, self.model_runner.get_model()

        def reload(*args: Any) -> None:
            real(*args)
            for module in model.modules():
                kernel = getattr(getattr(module, "scheme", None), "kernel", None)
                if kernel is not None:
                    kernel.dnnl_handler.scales.fill_(float("nan"))

        work._reload = reload

    def test_flip(self, rank: int, staged: bool) -> None:
        """Flip the lowest bit of a live element on that rank: one that the staged update changes,
        or one that no part of it comes near."""
        if self.rank != rank:
            return
        serving = self.weight_transfer_engine.serving
        patch = serving._update.staged.staged.patches._patches[0]
        chosen = int(patch.positions[0])
        if not staged:
            taken = set(patch.positions.tolist())
            chosen = next(n for n in range(patch.storage.bits.numel()) if n not in taken)
        patch.storage.bits[chosen] ^= 1


def _fail_once(work: Any, name: str) -> None:
    real = getattr(work, name)

    def fail(*args: object) -> None:
        setattr(work, name, real)
        raise Transient("made to fail by a test")

    setattr(work, name, fail)


def _write_half(prepared: Any) -> bool:
    for patch in prepared.staged.patches._patches:
        half = len(patch.positions) // 2
        live_weights.scatter(patch.storage, patch.positions[:half], patch.new[:half])
    raise MemoryError("made to fail half-way by a test")


def _lose(replace: Callable[[], bool]) -> bool:
    replace()
    raise DeltactlError(live_weights.LOST)
