"""Time and memory of mirrors, and of a half one: a byte of each element and a sum of each block.

A capture of the same live tensors against each, in turn, on all cores. Time is that of a capture,
in which training waits, against that with the mirror in memory. Bytes for each element: held in
memory between steps, and at the most, with a capture that is being published. Dropped means that
the mirror's file was written out and dropped from the system's cache before.

A mirror is also the snapshot that the step is digested and encoded from while training goes on. A
half one is none: it also notes the new elements, and the digest is taken while training waits.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from deltactl.codec.bits import Bits
from deltactl.core.digest import hasher
from deltactl.core.threads import cores
from deltactl.trainer.capture.capture import Capturer
from deltactl.trainer.capture.mirror import DISK, MEMORY, Mirror
from deltactl.trainer.model.tensors import CHUNK, live_tensors

TIMED = ("AdamW, 1e-06", "drawn anew")
IN_MEMORY, ON_DISK = "mirror in memory", "mirror on disk"
DROPPED, HALF, DIGEST = "mirror on disk, dropped", "half mirror", "its digest"
BLOCK = 1024
"""Elements of a sum, as in half_scan.c."""

_CHUNK = CHUNK // 2
_SOURCE = Path(__file__).with_name("half_scan.c")


def compiled(directory: Path) -> ctypes.CDLL:
    """half_scan.c, in ``directory``. Raises OSError, CalledProcessError where none can be made."""
    out = directory / "half_scan.shared"
    flags = ["-std=gnu11", "-O3", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", out, _SOURCE], check=True, capture_output=True)
    library = ctypes.CDLL(str(out))
    p, count = ctypes.c_void_p, ctypes.c_int64
    library.half_scan.argtypes = (p, count, ctypes.c_uint64, p, p, p, p, p, p)
    library.half_scan.restype = count
    return library


@dataclass(frozen=True, slots=True)
class Noted:
    """What a scan found from element ``start`` on: positions from there, bits before, as far as
    the bytes tell, and after, shape (k,), and of each block whether it is to be read again. As in
    a capture positions are None, and the bits all of the elements', where that takes less."""

    start: int
    positions: Bits | None
    before: Bits
    after: Bits
    again: Bits

    @property
    def nbytes(self) -> int:
        positions = 0 if self.positions is None else self.positions.nbytes
        return positions + self.before.nbytes + self.after.nbytes


class HalfMirror:
    """Of one tensor of whole blocks."""

    def __init__(self, library: ctypes.CDLL, elements: int) -> None:
        self._scan = library.half_scan
        self.held = np.zeros(elements, np.uint8)
        self.sums = np.zeros(elements // BLOCK, np.uint64)

    def scan(self, new: Bits, start: int) -> Noted:
        """Compare elements from ``start`` on, and hold what is to be held of them."""
        positions = np.empty(new.size, np.int32)
        before, after = np.empty(new.size, np.uint16), np.empty(new.size, np.uint16)
        again = np.empty(new.size // BLOCK, np.bool_)
        held, sums = self.held[start:], self.sums[start // BLOCK :]
        at = [a.ctypes.data for a in (held, sums, positions, before, after, again)]
        count = self._scan(new.ctypes.data, new.size, start, *at)
        if 2 * count >= new.size:
            whole = new.copy()
            whole[positions[:count]] = before[:count]
            return Noted(start, None, whole, new.copy(), again)
        found = positions[:count].copy(), before[:count].copy(), after[:count].copy()
        return Noted(start, *found, again)


@dataclass(frozen=True, slots=True)
class Row:
    """One way: seconds of a capture, and bytes an element, see the module."""

    way: str
    seconds: float
    held: float
    most: float


class _Bench:
    """The ways, over ``copies`` tensors of the same elements."""

    def __init__(self, bits: Bits, copies: int, scratch: Path, pool: Executor) -> None:
        tensors = {f"{i}": torch.from_numpy(bits.copy()) for i in range(copies)}
        self._bits = [tensor.numpy() for tensor in tensors.values()]
        self._live = live_tensors(tensors, None)
        self._pool = pool
        library = compiled(scratch)
        self._halves = [HalfMirror(library, bits.size) for _ in self._bits]
        self.mirrors = {
            way: Mirror(kind, scratch)
            for way, kind in {IN_MEMORY: MEMORY, ON_DISK: DISK, DROPPED: DISK}.items()
        }
        self._capturers = {way: Capturer(mirror) for way, mirror in self.mirrors.items()}
        captures = {way: partial(self._capture, each) for way, each in self._capturers.items()}
        self.ways: dict[str, Callable[[], int]] = {
            **captures, HALF: self._scan_all, DIGEST: self._digest,
        }  # fmt: skip
        """Each gives the bytes that it noted."""

    def _capture(self, capturer: Capturer) -> int:
        changes = capturer.capture(self._live).changes.values()
        chunks = [chunk for change in changes for chunk in change.chunks]
        positions = [c.positions.nbytes for c in chunks if c.positions is not None]
        return sum(positions) + sum(chunk.before.nbytes for chunk in chunks)

    def _scan_all(self) -> int:
        spans = [(i, at) for i, b in enumerate(self._bits) for at in range(0, b.size, _CHUNK)]
        return sum(noted.nbytes for noted in self._pool.map(self._scan, spans))

    def _scan(self, span: tuple[int, int]) -> Noted:
        which, at = span
        return self._halves[which].scan(self._bits[which][at : at + _CHUNK], at)

    def _digest(self) -> int:
        list(self._pool.map(lambda bits: hasher().update(bits.view(np.uint8)).digest(), self._bits))
        return 0

    def held(self, way: str) -> int:
        """Bytes that the way holds in memory between steps."""
        if way == HALF:
            return sum(half.held.nbytes + half.sums.nbytes for half in self._halves)
        return self.mirrors[way].nbytes if way == IN_MEMORY else 0

    def put(self, bits: Bits) -> None:
        """Let the tensors hold these elements."""
        for each in self._bits:
            each[:] = bits

    def close(self) -> None:
        """Let go of threads and files."""
        for capturer in self._capturers.values():
            capturer.close()
            capturer.mirror.close()


def costs(old: Bits, new: Bits, copies: int, rounds: int, scratch: Path) -> list[Row]:
    """A row for each way, the mirror in memory first. The tensors: ``copies`` of the elements,
    whole blocks, which turn from old to new and back."""
    with ThreadPoolExecutor(cores()) as pool:
        bench = _Bench(old, copies, scratch, pool)
        seconds: dict[str, list[float]] = {way: [] for way in bench.ways}
        noted = dict.fromkeys(bench.ways, 0)
        for number in range(rounds + 1):  # the first takes all
            bench.put(new if number % 2 else old)
            for way in list(bench.ways)[:: 1 if number % 2 else -1]:
                if way == DROPPED and number:
                    _drop(bench.mirrors[way])
                began = time.perf_counter()
                noted[way] = bench.ways[way]()
                seconds[way].append(time.perf_counter() - began)
        each = copies * old.size
        held = {way: bench.held(way) for way in bench.ways}
        bench.close()
    return [
        Row(way, median(took[1:]), held[way] / each, (held[way] + noted[way]) / each)
        for way, took in seconds.items()
    ]


def _drop(mirror: Mirror) -> None:
    """Let nothing of a mirror's file be in memory."""
    for held in mirror.tensors.values():
        base: Any = held.data
        while isinstance(base, np.ndarray):
            base = base.base
        base.obj.flush()
        base.obj.madvise(mmap.MADV_DONTNEED)
    assert mirror._file is not None
    os.posix_fadvise(mirror._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
