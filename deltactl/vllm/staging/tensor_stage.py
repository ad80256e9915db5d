"""One tensor staged through all links: against live bits, or those that a link brings whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from deltactl.codec.bits import Bits, Positions, elements
from deltactl.core.dtypes import element_bytes
from deltactl.core.errors import Conflict
from deltactl.vllm.layout.regions import Located, MappedTensor
from deltactl.vllm.layout.weight_map import Storage
from deltactl.vllm.staging import live_weights
from deltactl.vllm.staging.dense_regions import (
    Scattered,
    Stretch,
    differences,
    owned_count,
    owned_sum,
)
from deltactl.vllm.staging.merging import Flags, Gathered, Layer, merged_blocks


@dataclass(slots=True)
class StagedTensor:
    """What is to be written of one tensor; ``layers``: with the sums that were taken."""

    layers: Sequence[Layer] = ()
    scattered: list[Scattered] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)

    def add(self, found: Iterable[Scattered | Stretch]) -> None:
        """Sort what was found."""
        for one in found:
            if isinstance(one, Stretch):
                self.stretches.append(one)
            else:
                self.scattered.append(one)


def stage_tensor(
    mapped: MappedTensor, storages: Sequence[Storage], layers: Sequence[Layer], base: Bits | None
) -> StagedTensor:
    """Follow the layers, and lay out what they make of the tensor in the end.

    ``base``: all its bits before the first layer, for encodings that need them. Raises Conflict
    where the rank has two copies of an element with other bits, Malformed.
    """
    run = _Run(mapped, storages, layers, base)
    sparse: list[Layer] = []
    for layer in layers:
        if layer.whole is None:
            sparse.append(layer)
            continue
        run.change(sparse)
        run.replace(layer)
        sparse = []
    run.change(sparse)
    return run.finish()


class _Run:
    """Where one has got to in following the layers."""

    def __init__(
        self,
        mapped: MappedTensor,
        storages: Sequence[Storage],
        layers: Sequence[Layer],
        base: Bits | None,
    ) -> None:
        self._mapped, self._storages, self._base = mapped, storages, base
        self._found = StagedTensor(layers)
        self._brought: Bits | None = None  # all bits, once a layer has carried the tensor whole

    def change(self, layers: Sequence[Layer]) -> None:
        """Follow sparse layers, one after another."""
        if not layers:
            return
        if self._brought is not None:
            self._base = self._brought = self._brought.copy()
        spec = self._mapped.spec
        for merged in merged_blocks(layers, spec, spec.elements, self._gather, self._base):
            if self._brought is not None:
                self._brought[merged.positions] = merged.new
                continue
            for place in merged.found.places:
                old, new = merged.found.bits[place.chosen], merged.new[place.chosen]
                self._found.scattered.append(Scattered(place.storage, place.positions, old, new))

    def replace(self, layer: Layer) -> None:
        """Follow a layer that carries the tensor whole: of those before the sums alone count."""
        assert layer.whole is not None
        before = self._owned_sum()
        self._found.scattered.clear()
        self._brought = self._base = elements(layer.whole, self._mapped.spec.dtype)
        layer.owned.add(before, owned_sum(self._mapped, self._brought), owned_count(self._mapped))

    def finish(self) -> StagedTensor:
        """What is to be written."""
        if self._brought is not None:
            self._found.add(differences(self._mapped, self._storages, self._brought, keep_old=True))
        return self._found

    def _owned_sum(self) -> int:
        """The touch sum of all elements that this rank owns, after the layers so far."""
        if self._brought is not None:
            return owned_sum(self._mapped, self._brought)
        flags = zip(self._mapped.regions, self._mapped.owned, strict=True)
        regions = [region for region, owned in flags if owned]
        total = sum(live_weights.region_sum(self._storages[r.storage], r) for r in regions)
        return total + sum(layer.owned.new - layer.owned.old for layer in self._found.layers)

    def _gather(self, positions: Positions) -> Gathered | None:
        places = self._mapped.locate(positions)
        if not places:
            return None
        held, owned = np.zeros(positions.size, np.bool_), np.zeros(positions.size, np.bool_)
        if self._brought is not None:
            bits = self._brought[positions]
        else:
            bits = np.zeros(positions.size, f"<u{element_bytes(self._mapped.spec.dtype)}")
        for place in places:
            if self._brought is None:
                self._read(place, positions, held, bits)
            held[place.chosen] = True
            if self._mapped.owned[place.region]:
                owned[place.chosen] = True
        return Gathered(bits, held, owned, places)

    def _read(self, place: Located, asked: Positions, held: Flags, bits: Bits) -> None:
        """Put live bits where they belong; those of an element held twice have to be the same."""
        storage = self._storages[place.storage]
        positions = live_weights.positions_in(storage, place.positions)
        found = live_weights.gather(storage, positions).cpu().numpy().view(bits.dtype)
        twice = held[place.chosen]
        wrong = twice & (bits[place.chosen] != found)
        if wrong.any():
            raise Conflict(
                "the server has two copies of an element of the tensor, and they differ",
                tensor=self._mapped.spec.name,
                found=f"element {int(asked[place.chosen][wrong][0])}",
                hint="write every tensor anew: deltactl apply BUCKET@STEP --server URL --repair",
            )
        bits[place.chosen] = found
