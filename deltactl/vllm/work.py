"""What an update does to the model of one rank: maps, staged bits and sums, tied together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deltactl.vllm.contract import Identity, Staged
from deltactl.vllm.peers import Sums

if TYPE_CHECKING:
    import torch


class ModelWork:
    """The ``Work`` of one rank on ``model``, which was loaded from ``directory``."""

    def __init__(self, model: torch.nn.Module, directory: Path, model_config: Any) -> None:
        self._model, self._directory, self._model_config = model, directory, model_config

    def identify(self) -> Identity:
        """See Work."""
        raise NotImplementedError

    def record(self) -> dict[str, Any]:
        """See Work."""
        raise NotImplementedError

    def agree(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """See Work."""
        raise NotImplementedError

    def stage(self, request: Mapping[str, Any]) -> Staged:
        """See Work."""
        raise NotImplementedError

    def audit(self, names: list[str]) -> Sums:
        """See Work."""
        return np.zeros(len(names), np.uint64)

    def unaudited(self) -> list[str]:
        """See Work."""
        return []
