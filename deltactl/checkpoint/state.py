"""The state of a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Callable

from deltactl.checkpoint.checkpoint import Checkpoint, Tensor
from deltactl.core.digest import TensorState, digest_of, state_digest
from deltactl.core.progress import Meter, Progress, silent
from deltactl.files.parallel import hash_threads, map_largest_first
from deltactl.files.untrusted import os_errors


def tensor_state(
    tensor: Tensor, threads: int = 1, told: Callable[[int], object] | None = None
) -> TensorState:
    """The state of one tensor; reads every byte, and ``told`` how many."""
    digest = digest_of(tensor.data, threads, told)
    return TensorState(tensor.name, tensor.dtype, tensor.shape, digest)


def tensor_states(
    checkpoint: Checkpoint, *, progress: Progress = silent, what: str = "hashing"
) -> tuple[TensorState, ...]:
    """The digests of all tensors, in order of name; reads every byte, on all cores."""
    tensors = list(checkpoint.tensors.values())
    sizes = [tensor.nbytes for tensor in tensors]
    meter = Meter(progress, what, sum(sizes))

    def digest(tensor: Tensor) -> TensorState:
        return tensor_state(tensor, hash_threads(tensor.nbytes, sizes), meter.add)

    return tuple(map_largest_first(digest, tensors, lambda tensor: tensor.nbytes))


def state_of(checkpoint: Checkpoint, *, progress: Progress = silent) -> str:
    """The state digest of a checkpoint; reads every byte."""
    return state_digest(tensor_states(checkpoint, progress=progress))


def fingerprint(checkpoint: Checkpoint) -> tuple[tuple[str, int, int, int], ...]:
    """Name, inode, size and time of change of each file of weights, as they are now.

    Where it has changed somebody has written to the checkpoint. Digests do not show that: of a file
    that is rewritten while it is read they are those of a mixture.
    """
    found = []
    for shard in checkpoint.shards:
        path = checkpoint.path / shard.file if checkpoint.is_directory else checkpoint.path
        with os_errors(path):
            status = path.stat()
        found.append((shard.file, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)
