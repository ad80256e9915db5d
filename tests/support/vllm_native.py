"""A weight-transfer backend for comparison: vLLM's own sparse loader, fed with TRL's deltas.

The file is read, and staged as NaN-masked tensors of full size, while the server is paused. Linears
stay unpacked, as the loader cannot patch packed ones. ``plugin`` makes vLLM find the backend, under
the name "native".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

_ENTRY_POINTS = "[vllm.general_plugins]\nnative = tests.support.vllm_native:register\n"


def plugin(directory: Path) -> Path:
    """Write what an installed package would tell of its entry points; for PYTHONPATH."""
    about = directory / "deltactl_native-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: deltactl-native\nVersion: 0\n")
    (about / "entry_points.txt").write_text(_ENTRY_POINTS)
    return directory


def register() -> None:
    """What vLLM calls in each process."""
    if "native" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("native", NativeEngine)
        utils.dispatch_cpu_unquantized_gemm = _plain


def _plain(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to say."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``path``: a delta in the encoding raw; ``shapes``: of the checkpoint's tensors, by name."""

    path: str
    shapes: dict[str, list[int]]


class NativeEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads the delta of one step at a time."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Read a delta and load it."""
        with safe_open(update_info.path, "pt") as delta:
            names = [key.removesuffix(".idx") for key in delta.keys() if key.endswith(".idx")]  # noqa: SIM118
            patches = [
                CheckpointWeightPatch(
                    name,
                    tuple(update_info.shapes[name]),
                    torch.bfloat16,
                    delta.get_tensor(f"{name}.val"),
                    delta.get_tensor(f"{name}.idx"),
                )
                for name in names
            ]
            load_checkpoint_weight_patches(self.model, patches)

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Nothing to release."""
