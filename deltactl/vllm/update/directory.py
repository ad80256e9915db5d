"""Which state a model's directory holds, hashed once and remembered for as long as that is sound.

A server reports its step by it, and compares its live weights with the sums over all elements. Of a
large model this takes minutes of reading, so what was found is kept: with the files' inodes, sizes
and times, and only where those tell of every later change. A file that is written to in the moment
in which it is hashed can end up with the times that were noted; so nothing is kept of files that
were young when the hashing began.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltactl.checkpoint.checkpoint import Checkpoint, Tensor, open_checkpoint
from deltactl.codec.bits import elements, touch_sum_of_all
from deltactl.core.digest import TensorState, hasher, state_digest
from deltactl.core.dtypes import element_bytes
from deltactl.core.errors import Conflict
from deltactl.files.atomic import atomic_file
from deltactl.files.cache import forget_others, held_place
from deltactl.files.parallel import hash_threads, map_largest_first
from deltactl.files.untrusted import os_errors

_CHUNK = 1 << 20  # bytes: a multiple of every element's width
_YOUNG = 2_000_000_000  # ns: the coarsest clocks of file systems tick every two seconds
_FILE = "identity"
_FORMAT = 1
_KEPT = 15  # of other models: a megabyte each at most

Times = list[list[object]]
"""Of each file of weights its name, device, inode, size, time of change and of status change."""


@dataclass(frozen=True, slots=True)
class TensorIdentity:
    """One tensor of a checkpoint. ``digest``: of its bytes; ``touch_sum``: over all elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    touch_sum: int


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint holds: its state digest and its tensors, by name."""

    state: str
    tensors: dict[str, TensorIdentity]


def identify(model: Path) -> Identity:
    """The identity of a checkpoint on disk; reads every byte, on all cores, unless that is known.

    Once for all processes of the machine: the others wait. Raises what open_checkpoint does, and
    Conflict where somebody writes to the files meanwhile.
    """
    with held_place("identities", str(model.resolve())) as place, open_checkpoint(model) as opened:
        times = file_times(opened)
        known = _read(place / _FILE, times)
        if known is not None:
            return known
        begun = time.time_ns()
        found = _hash(opened)
        if file_times(opened) != times:
            raise Conflict(
                "the model's files were written to while they were read",
                file=model,
                hint="wait until they are whole, then try again",
            )
        if _settled(times, begun):
            _write(place / _FILE, times, found)
            forget_others(place, [_FILE], _KEPT)
        return found


def file_times(checkpoint: Checkpoint) -> Times:
    """What changes with every write to the checkpoint's files of weights, as it is now."""
    found: Times = []
    for shard in checkpoint.shards:
        path = checkpoint.path / shard.file if checkpoint.is_directory else checkpoint.path
        with os_errors(path):
            status = path.stat()
        times = [status.st_mtime_ns, status.st_ctime_ns]
        found.append([shard.file, status.st_dev, status.st_ino, status.st_size, *times])
    return found


def unwritten_since(checkpoint: Checkpoint, times: Times) -> bool:
    """Whether no file of an open checkpoint has been written to since these were its times.

    A file whose name another has taken is as it was: what is mapped is out of everybody's reach.
    """
    for shard, row in zip(checkpoint.shards, times, strict=True):
        path = checkpoint.path / shard.file if checkpoint.is_directory else checkpoint.path
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        same = [status.st_dev, status.st_ino] == row[1:3]
        if same and [status.st_size, status.st_mtime_ns] != row[3:5]:
            return False
    return True


def _settled(times: Times, begun: int) -> bool:
    """Whether every file was so old when the hashing began that a write since shows."""
    return all(isinstance(t, int) and t < begun - _YOUNG for row in times for t in row[-2:])


def _hash(checkpoint: Checkpoint) -> Identity:
    tensors = list(checkpoint.tensors.values())
    sizes = [tensor.nbytes for tensor in tensors]

    def identity(tensor: Tensor) -> TensorIdentity:
        digest, total = hasher(hash_threads(tensor.nbytes, sizes)), 0
        for at in range(0, tensor.nbytes, _CHUNK):
            piece = tensor.data[at : at + _CHUNK]
            digest.update(piece)
            first = at // element_bytes(tensor.dtype)
            total += touch_sum_of_all(elements(piece, tensor.dtype), first)
        shape = tensor.shape
        return TensorIdentity(tensor.name, tensor.dtype, shape, digest.hexdigest(), total % 2**64)

    found = map_largest_first(identity, tensors, lambda tensor: tensor.nbytes)
    return _identity(found)


def _identity(tensors: list[TensorIdentity]) -> Identity:
    state = state_digest(TensorState(t.name, t.dtype, t.shape, t.digest) for t in tensors)
    return Identity(state, {tensor.name: tensor for tensor in tensors})


# What is kept: a digest, and on the next line the text that it is of.


def _write(path: Path, times: Times, found: Identity) -> None:
    rows = [asdict(tensor) for tensor in found.tensors.values()]
    text = json.dumps({"format": _FORMAT, "files": times, "tensors": rows}).encode()
    with atomic_file(path) as file:
        file.write(_digest(text) + b"\n" + text)


def _read(path: Path, times: Times) -> Identity | None:
    """What was kept, if it is whole and the files are as they were."""
    try:
        digest, _, text = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest != _digest(text):
        return None
    document: dict[str, Any] = json.loads(text)
    if document.get("format") != _FORMAT or document["files"] != times:
        return None
    rows = [{**row, "shape": tuple(row["shape"])} for row in document["tensors"]]
    return _identity([TensorIdentity(**row) for row in rows])


def _digest(text: bytes) -> bytes:
    found: bytes = hasher().update(text).hexdigest().encode()
    return found
