"""What an update does to the model of one rank: the map, staged bits and sums, tied together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deltactl.core.checkpoint import open_checkpoint
from deltactl.core.errors import Conflict
from deltactl.vllm.contract import Identity, Staged, Values

if TYPE_CHECKING:
    import torch

    from deltactl.vllm.weight_map import WeightMap


class ModelWork:
    """The ``Work`` of one rank of ``ranks`` on ``model``, which was loaded from ``directory``.

    ``since``: nanoseconds since the epoch, before the loading began. Files that changed later may
    not be those that were loaded, and are not taken for them.
    """

    def __init__(self, model: torch.nn.Module, directory: Path, ranks: int, since: int) -> None:
        self._model, self._directory, self._ranks, self._since = model, directory, ranks, since
        self._map: WeightMap | None = None
        self._ignored: tuple[str, ...] = ()
        self._unmapped: dict[str, str] = {}

    def record(self) -> Any:
        """See Work."""
        from deltactl.vllm.weight_map import TensorSpec, record

        with open_checkpoint(self._directory) as opened:
            specs = [TensorSpec(t.name, t.dtype, t.shape) for t in opened.tensors.values()]
        self._map = record(self._model, specs, ranks=self._ranks)
        return self._map.summary()

    def agree(self, records: list[Any], rank: int) -> None:
        """See Work."""
        from deltactl.vllm.ownership import owners

        if self._ranks > 1:
            self.map.settle(owners(records), rank)

    @property
    def map(self) -> WeightMap:
        """The map, recorded."""
        assert self._map is not None
        return self._map

    def identify(self) -> Identity:
        """See Work."""
        from deltactl.vllm.host import identify

        self._check_unchanged()
        found = identify(self._directory)
        self._check_unchanged()
        return Identity(found.state, {n: t.touch_sum for n, t in found.tensors.items()})

    def _check_unchanged(self) -> None:
        """Raise Conflict if the directory, or a file of weights in it, changed after loading began.

        By the time of the last change of status, which nobody can set: a directory that was put in
        the place of another has a new one.
        """
        from deltactl.vllm.identity import file_times

        with open_checkpoint(self._directory) as opened:
            times = file_times(opened)
        newest = max((int(str(row[-1])) for row in times), default=0)
        if newest < self._since:
            return
        raise Conflict(
            "the model directory has changed since the server was started on it",
            file=self._directory,
            hint="start the server anew on a directory that nobody writes to",
        )

    def sums(self, names: list[str]) -> Values:
        """See Work."""
        from deltactl.vllm.live import owned_sums

        found = owned_sums(self.map, [name for name in names if name in self.map.tensors])
        return np.array([found.get(name, 0) for name in names], np.uint64).view(np.int64)

    def prove(self, found: Mapping[str, int], expected: Mapping[str, int]) -> None:
        """See Work."""
        from deltactl.vllm.live import keep_proven

        keep_proven(self.map, found, expected)

    def describe(self) -> dict[str, Any]:
        """See Work."""
        return {
            "tensors": len(self.map.tensors),
            "unmapped": dict(self.map.unmapped),
            "ignored": sorted(self.map.ignored),
        }

    def stage(self, request: Mapping[str, Any]) -> Staged:
        """See Work."""
        raise NotImplementedError(str(time.time_ns()))
