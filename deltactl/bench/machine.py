"""The machine: what it is, and what it can do at best with two checkpoints."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from deltactl.bench.timing import Timed
from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.core.digest import hasher
from deltactl.core.native import KERNEL
from deltactl.core.threads import cores
from deltactl.files.atomic import remove
from deltactl.files.parallel import map_largest_first

_SPAN = 1 << 26  # bytes that one thread reads in a row
_CHUNK = 1 << 20  # bytes that are read at once, so that they stay in cache


def facts() -> dict[str, Any]:
    """Processor, cores, memory in bytes, versions, and whether the inner loops are the compiled
    ones; nothing that tells one machine's name."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "architecture": platform.machine(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "compiled": KERNEL is not None,
    }


def available_memory() -> int:
    """Bytes that programs can have without pushing others out, as far as the system says."""
    text = _field("/proc/meminfo", "MemAvailable")
    if text is not None:
        return int(text.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _field(file: str, name: str) -> str | None:
    """The first value of that name in one of the system's files of ``name : value`` lines."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), None)


class Limits:
    """What no tool can beat here, on one pair of checkpoints."""

    def __init__(self, a: Checkpoint, b: Checkpoint, scratch: Path) -> None:
        self._a, self._b = files_of(a), files_of(b)
        self._copies = scratch / "copies"

    def works(self) -> dict[str, Timed]:
        """By name: of both ``read`` and ``read_and_hash``; of one, with and without a sync of what
        was written, ``copy_and_hash``."""
        both, copy = [*self._a, *self._b], partial(copy_and_hash, self._b, self._copies)
        return {
            "read": Timed(partial(read, both)),
            "read_and_hash": Timed(partial(read_and_hash, both)),
            "copy_and_hash": Timed(copy, self._clear),
            "copy_sync_and_hash": Timed(partial(copy, sync=True), self._clear),
        }

    def _clear(self) -> None:
        remove(self._copies)
        self._copies.mkdir()


def files_of(checkpoint: Checkpoint) -> list[Path]:
    """The files that hold a checkpoint's weights."""
    if not checkpoint.is_directory:
        return [checkpoint.path]
    return [checkpoint.path / shard.file for shard in checkpoint.shards]


def read(files: Sequence[Path]) -> None:
    """Read every byte on all cores: as fast as this machine hands out what it has in memory."""
    _spread(files, lambda: lambda _: None)


def read_and_hash(files: Sequence[Path]) -> None:
    """The same, with BLAKE3 of every byte: the least that a tool has to do that proves both."""
    _spread(files, lambda: hasher().update)


def copy_and_hash(files: Sequence[Path], target: Path, *, sync: bool = False) -> None:
    """``cp`` into a directory, then BLAKE3 of the copies: the least that a rebuild has to do.

    ``sync``: wait until they are on the disk, as a rebuild does.
    """
    subprocess.run(["cp", "--", *files, target], check=True)
    copies = [target / file.name for file in files]
    for path in copies if sync else ():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    read_and_hash(copies)


def _spread(files: Sequence[Path], make_use: Callable[[], Callable[[memoryview], object]]) -> None:
    def work(span: tuple[Path, int, int]) -> None:
        path, at, end = span
        use, buffer = make_use(), memoryview(bytearray(_CHUNK))
        with open(path, "rb", buffering=0) as file:
            file.seek(at)
            while at < end and (count := file.readinto(buffer[: min(_CHUNK, end - at)])):
                use(buffer[:count])
                at += count

    map_largest_first(work, [*_spans(files)], lambda span: span[2] - span[1])


def _spans(files: Sequence[Path]) -> Iterator[tuple[Path, int, int]]:
    """Pieces of about equal size: of one file after the other, so that no thread is left alone."""
    for path in files:
        size = path.stat().st_size
        for at in range(0, size, _SPAN):
            yield path, at, min(at + _SPAN, size)
