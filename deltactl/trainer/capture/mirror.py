"""The mirror: the state that was last captured, bit for bit, in memory or in a file."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from deltactl.checkpoint.checkpoint import Checkpoint, Shard, Tensor
from deltactl.codec.bits import Bytes
from deltactl.core.dtypes import nbytes_of
from deltactl.core.errors import UsageError
from deltactl.format.header import utf8

MEMORY: Final = "memory"
DISK: Final = "disk"

_ALIGN = 64
_SHARD_BYTES = 5_000_000_000  # of one file of an anchor


Spec = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""


class Mirror:
    """A copy of the published tensors, as large as one checkpoint.

    ``kind``: "memory", or "disk" for a nameless file in ``directory``, mapped. Then it takes none
    of the host's memory that the system could not have back at any time; but as changes are spread
    over all of it, most of the file is written anew at each step. The tensors' ``data`` are to be
    written to.
    """

    def __init__(self, kind: str, directory: Path) -> None:
        if kind not in (MEMORY, DISK):
            raise UsageError("unknown kind of mirror", expected=f"{MEMORY} or {DISK}", found=kind)
        self._file = tempfile.TemporaryFile(dir=directory) if kind == DISK else None  # noqa: SIM115
        self._directory = directory
        self.tensors: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(held.data.size for held in self.tensors.values())

    @property
    def total_elements(self) -> int:
        return sum(held.bits.size for held in self.tensors.values())

    def add(self, specs: Iterable[Spec]) -> None:
        """Make room for tensors; their bits are not those of anything yet."""
        specs = list(specs)
        sizes = [nbytes_of(dtype, shape) for _, dtype, shape in specs]
        padded = [size + -size % _ALIGN for size in sizes]
        room, at = self._room(sum(padded)), 0
        for (name, dtype, shape), size, step in zip(specs, sizes, padded, strict=True):
            self.tensors[name] = Tensor(name, dtype, shape, room[at : at + size])
            at += step

    def _room(self, size: int) -> Bytes:
        if self._file is None or not size:
            return np.empty(size, np.uint8)
        start = os.fstat(self._file.fileno()).st_size
        end = start + size
        end += -end % mmap.ALLOCATIONGRANULARITY
        if hasattr(os, "posix_fallocate"):  # or a full disk is a SIGBUS later
            os.posix_fallocate(self._file.fileno(), start, end - start)
        else:
            os.ftruncate(self._file.fileno(), end)
        return np.frombuffer(mmap.mmap(self._file.fileno(), size, offset=start), np.uint8)

    def put(self, held: Tensor) -> None:
        """Put back a tensor that was taken out."""
        self.tensors[held.name] = held

    def take(self, name: str) -> Tensor:
        """Take a tensor out."""
        return self.tensors.pop(name)

    def checkpoint(self) -> Checkpoint:
        """The mirror as a checkpoint, in files of about 5 GB; valid as long as it is not written
        to."""
        return Checkpoint(self._directory, self.tensors, self._shards(), is_directory=True)

    def _shards(self) -> tuple[Shard, ...]:
        groups: list[list[str]] = [[]]
        size = 0
        for name in sorted(self.tensors, key=utf8):
            size += self.tensors[name].data.size
            if groups[-1] and size > _SHARD_BYTES:
                groups.append([])
                size = self.tensors[name].data.size
            groups[-1].append(name)
        count = len(groups)
        return tuple(
            Shard(f"model-{n:05d}-of-{count:05d}.safetensors", tuple(group), {"format": "pt"})
            for n, group in enumerate(groups, 1)
        )

    def close(self) -> None:
        """Let go of it all."""
        self.tensors = {}
        if self._file is not None:
            self._file.close()
