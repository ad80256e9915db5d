"""What ``stats`` finds: counts by tensor, layer and kind of module, sizes, and times to ship."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from deltactl.core.errors import UsageError
from deltactl.core.facts import as_json, facts_of
from deltactl.ops.stats.histograms import ExponentCounts, StepCounts
from deltactl.ops.stats.names import layer_of, module_of, natural

BANDWIDTHS = (1e8, 1e9, 1e10)
"""Bits a second that times are given for where nothing else is asked for."""

Status = Literal["unchanged", "changed", "replaced", "added", "removed"]
Source = Literal["pair", "delta", "bucket"]
Sizes = Mapping[str, int | None]
"""Payload bytes by encoding; None where they are not known."""


def ship_seconds(nbytes: int, bits_per_second: float) -> float:
    """How long so many bytes take at a bandwidth, latency not counted. Raises UsageError."""
    if not 0 < bits_per_second < inf:
        raise UsageError("a bandwidth is above zero and finite", found=bits_per_second)
    return nbytes * 8 / bits_per_second


def share_kept(changed: int, seen: int | None) -> float | None:
    """The sparsity: 1.0 where nothing changed; None where it is not known of how many."""
    if seen is None:
        return None
    return 1 - changed / seen if seen else 1.0


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One tensor.

    ``elements``: of the result (of the base for a removed one), None where TRL's delta does not
    say. ``changed``: elements, in a bucket summed over its deltas. ``seen``: what ``changed`` is
    counted among, in a bucket ``elements`` times the deltas. ``changed_steps``: in a bucket, how
    many deltas changed it, else None.
    """

    name: str
    status: Status
    dtype: str | None
    shape: tuple[int, ...] | None
    elements: int | None
    changed: int
    seen: int | None
    changed_steps: int | None = None

    @property
    def sparsity(self) -> float | None:
        return share_kept(self.changed, self.seen)

    def facts(self) -> dict[str, Any]:
        """JSON-ready values."""
        names = ("name", "status", "dtype", "shape", "elements", "changed", "sparsity")
        return facts_of(self, *names, "changed_steps")


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Tensors together: those of a layer, or of a kind of module; without removed ones."""

    name: str
    tensors: int
    elements: int | None
    changed: int
    sparsity: float | None


@dataclass(frozen=True, slots=True)
class LinkStats:
    """One link of a bucket; None for what an anchor does not have, or is not known."""

    step: int
    kind: str
    encoding: str | None
    nbytes: int
    changed: int | None
    sparsity: float | None

    def facts(self) -> dict[str, Any]:
        """JSON-ready values."""
        each = self.nbytes / self.changed if self.changed else None
        return facts_of(
            self,
            *("step", "kind", "encoding", "bytes", "changed_elements", "sparsity"),
            bytes=self.nbytes,
            changed_elements=self.changed,
            bytes_per_changed_element=each,
        )


@dataclass(frozen=True, slots=True)
class ChainStats:
    """What a bucket has beside: its links in order, and facts of objects that should be such."""

    links: tuple[LinkStats, ...]
    problems: tuple[dict[str, Any], ...]

    def facts(self) -> dict[str, Any]:
        """JSON-ready values."""
        known = [link.sparsity for link in self.links if link.sparsity is not None]
        return {
            "anchors": self._together("anchor"),
            "deltas": self._together("delta"),
            "sparsity": {
                "mean": sum(known) / len(known) if known else None,
                "min": min(known, default=None),
                "max": max(known, default=None),
            },
            "links": as_json(self.links),
            "problems": list(self.problems),
        }

    def _together(self, kind: str) -> dict[str, int]:
        sizes = [link.nbytes for link in self.links if link.kind == kind]
        return {"links": len(sizes), "bytes": sum(sizes)}


@dataclass(frozen=True, slots=True)
class Stats:
    """How sparse a pair of checkpoints, a delta or a bucket's deltas are.

    ``encoding``: a delta's own. ``total_elements``: of the result, in a bucket of the newest step.
    ``sparsity``: the share of elements that kept their bits, in a bucket over all deltas.
    ``sizes``: payload bytes that the changes take in each encoding, and the whole (``dense``), in a
    bucket over all deltas; headers are not counted. ``steps``, ``exponents``: None where they are
    not known.
    """

    source: Source
    encoding: str | None
    changed_elements: int
    total_elements: int | None
    sparsity: float | None
    tensors: tuple[TensorStats, ...]
    sizes: Sizes
    steps: StepCounts | None = None
    exponents: ExponentCounts | None = None
    chain: ChainStats | None = None

    @property
    def layers(self) -> tuple[GroupStats, ...]:
        """By layer, in order of their numbers."""
        return _grouped(self.tensors, layer_of)

    @property
    def modules(self) -> tuple[GroupStats, ...]:
        """By kind of module."""
        return _grouped(self.tensors, module_of)

    def ship(self, bandwidths: Iterable[float] = BANDWIDTHS) -> list[dict[str, Any]]:
        """For each bandwidth, in bits a second: the seconds that each of ``sizes`` takes."""
        return [
            {
                "bits_per_second": rate,
                "seconds": {
                    name: None if size is None else ship_seconds(size, rate)
                    for name, size in self.sizes.items()
                },
            }
            for rate in bandwidths
        ]

    def facts(self, bandwidths: Sequence[float] = BANDWIDTHS) -> dict[str, Any]:
        """The object that ``deltactl stats --json`` prints."""
        return facts_of(
            self,
            *("source", "encoding", "changed_elements", "total_elements", "sparsity", "sizes"),
            *("ship", "ulp_steps", "exponents", "modules", "layers", "tensors", "chain"),
            ship=self.ship(bandwidths),
            ulp_steps=self.steps,
        )


def _grouped(tensors: Iterable[TensorStats], key: Callable[[str], str]) -> tuple[GroupStats, ...]:
    groups: dict[str, list[TensorStats]] = {}
    for tensor in tensors:
        if tensor.status != "removed":
            groups.setdefault(key(tensor.name), []).append(tensor)
    return tuple(_group(name, groups[name]) for name in sorted(groups, key=natural))


def _group(name: str, tensors: Sequence[TensorStats]) -> GroupStats:
    changed = sum(tensor.changed for tensor in tensors)
    return GroupStats(
        name=name,
        tensors=len(tensors),
        elements=total(tensor.elements for tensor in tensors),
        changed=changed,
        sparsity=share_kept(changed, total(tensor.seen for tensor in tensors)),
    )


def total(values: Iterable[int | None]) -> int | None:
    """The sum, None if one of them is not known."""
    known = 0
    for value in values:
        if value is None:
            return None
        known += value
    return known
