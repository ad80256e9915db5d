"""What the headers of a chain's links say together; no payload is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deltactl.chain.chain import Link
from deltactl.chain.reading import read_chain
from deltactl.chain.store import Bucket
from deltactl.codec import ENCODINGS
from deltactl.core.dtypes import elements_of, nbytes_of
from deltactl.core.errors import NotFound
from deltactl.core.progress import Progress, silent
from deltactl.format.anchor import AnchorHeader
from deltactl.format.delta_header import DeltaHeader
from deltactl.format.header import Record, utf8
from deltactl.ops.stats.link import row_of
from deltactl.ops.stats.measured import raw_bytes
from deltactl.ops.stats.report import (
    ChainStats,
    LinkStats,
    Stats,
    Status,
    TensorStats,
    share_kept,
    total,
)


def stats_bucket(bucket: Bucket, progress: Progress = silent) -> Stats:
    """What the headers of a chain's links say together.

    Objects that should be links and are none are named in ``chain.problems``. Raises NotFound where
    there is no chain, and what the bucket raises.
    """
    chain = read_chain(bucket)
    if not chain.links and not chain.problems:
        hint = "of two checkpoints: deltactl stats A B"
        raise NotFound("the bucket holds no chain", file=chain.url, hint=hint)
    progress("reading", chain.bytes_read, chain.bytes_read)
    history = _History()
    for link in chain.links:
        history.add(link)
    deltas = [link for link in chain.links if link.kind == "delta"]
    changed = sum(link.changed_elements or 0 for link in deltas)
    newest = [link.total_elements for link in chain.links if link.total_elements is not None]
    return Stats(
        source="bucket",
        encoding=None,
        changed_elements=changed,
        total_elements=newest[-1] if newest else None,
        sparsity=share_kept(changed, total(link.total_elements for link in deltas)),
        tensors=history.rows(),
        sizes=history.sizes,
        chain=ChainStats(
            links=tuple(map(_link_stats, chain.links)),
            problems=tuple(problem.facts() for problem in chain.problems),
        ),
    )


def _link_stats(link: Link) -> LinkStats:
    return LinkStats(
        step=link.step,
        kind=link.kind,
        encoding=link.encoding,
        nbytes=link.bytes,
        changed=link.changed_elements,
        sparsity=link.sparsity,
    )


@dataclass(slots=True)
class _Lived:
    """One tensor on its way through a chain's links. ``shape``: None if no link says it."""

    dtype: str | None
    shape: tuple[int, ...] | None
    alive: bool = True
    changed: int = 0
    seen: int | None = 0
    changed_steps: int = 0

    @property
    def nbytes(self) -> int | None:
        if self.dtype is None or self.shape is None:
            return None
        return nbytes_of(self.dtype, self.shape)

    @property
    def elements(self) -> int | None:
        if self.dtype is None or self.shape is None:
            return None
        return elements_of(self.dtype, self.shape)


class _History:
    """Adds up, link by link, what each tensor went through, from the headers alone."""

    def __init__(self) -> None:
        self._tensors: dict[str, _Lived] = {}
        self._sizes: list[Mapping[str, int | None]] = []

    def add(self, link: Link) -> None:
        """Take in the next link in order."""
        if isinstance(link.header, AnchorHeader):
            self._anchor(link.header)
        else:
            self._delta(link.header)

    def _anchor(self, header: AnchorHeader) -> None:
        names = {tensor.name for tensor in header.tensors}
        for name, lived in self._tensors.items():
            lived.alive = name in names
        for tensor in header.tensors:
            self._exists(tensor.name, tensor.dtype, tensor.shape)

    def _exists(self, name: str, dtype: str | None, shape: tuple[int, ...] | None) -> _Lived:
        lived = self._tensors.setdefault(name, _Lived(dtype, shape))
        lived.alive = True
        if shape is not None:
            lived.dtype, lived.shape = dtype, shape
        return lived

    def _delta(self, header: DeltaHeader) -> None:
        for record in header.records.values():
            lived = self._exists(record.name, record.dtype, record.shape)
            lived.alive = record.kind != "removed"
            lived.changed += record.changed
            lived.changed_steps += 1
        alive = [lived for lived in self._tensors.values() if lived.alive]
        for lived in alive:
            lived.seen = total((lived.seen, lived.elements))
        sizes = {name: self._size(header, name) for name in ENCODINGS}
        self._sizes.append({"dense": total(lived.nbytes for lived in alive)} | sizes)

    def _size(self, header: DeltaHeader, encoding: str) -> int | None:
        records = header.records.values()
        if encoding == header.encoding:
            return sum(record.nbytes for record in records)
        return sum(map(_raw_bytes, records)) if encoding == "raw" else None

    @property
    def sizes(self) -> dict[str, int | None]:
        names = ("dense", *ENCODINGS)
        return {name: total(of_delta[name] for of_delta in self._sizes) for name in names}

    def rows(self) -> tuple[TensorStats, ...]:
        """In order of name."""
        return tuple(_lived_row(n, self._tensors[n]) for n in sorted(self._tensors, key=utf8))


def _raw_bytes(record: Record) -> int:
    if row_of(record).status != "changed":
        return record.nbytes
    assert record.dtype is not None
    return raw_bytes(record.changed, record.dtype, record.elements or 0)


def _lived_row(name: str, lived: _Lived) -> TensorStats:
    status: Status = "changed" if lived.changed_steps else "unchanged"
    return TensorStats(
        name=name,
        status=status if lived.alive else "removed",
        dtype=lived.dtype,
        shape=lived.shape,
        elements=lived.elements,
        changed=lived.changed,
        seen=lived.seen,
        changed_steps=lived.changed_steps,
    )
