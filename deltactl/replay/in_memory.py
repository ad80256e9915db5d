"""Deltas without files to write: decoded for the sake of the time it takes, applied in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltactl.checkpoint.checkpoint import Checkpoint
from deltactl.codec.base import BLOCK
from deltactl.codec.bits import Bytes, elements
from deltactl.core.digest import TensorState, hasher
from deltactl.files.parallel import hash_threads, map_largest_first
from deltactl.format.delta import Delta
from deltactl.replay.states import Stack, final_stacks


def decode_all(base: Checkpoint, delta: Delta) -> int:
    """Decode all that a delta holds of sparse tensors, on all cores, and keep none of it.

    Returns the number of changes. Raises Conflict where the delta cannot stand on ``base``,
    Malformed.
    """
    sparse = [stack for stack in final_stacks(base, [delta]).values() if stack.layers]
    return sum(map_largest_first(_decode, sparse, lambda stack: stack.layers[0].record.changed))


def _decode(stack: Stack) -> int:
    decoder, bits = stack.layers[0].decoder, elements(stack.data, stack.dtype)
    for number in decoder.numbers():
        decoder.block(number, bits[number * BLOCK : (number + 1) * BLOCK])
    return decoder.count


def apply_in_memory(
    base: Checkpoint, deltas: Sequence[Delta], tensors: dict[str, Bytes]
) -> tuple[TensorState, ...]:
    """Put what ``deltas`` lead to from ``base`` into ``tensors``: name to bytes, shape (n,).

    An array that is there and of the right size is written over, so that who applies step after
    step need not allocate a model each time; others are made, and tensors that are no more are
    dropped. Returns the digests of what was written, in order of name; to compare them with what
    the last delta names is the caller's part. Raises Conflict, Malformed, and then ``tensors``
    holds nothing of use.
    """
    stacks = final_stacks(base, deltas)
    for name in tensors.keys() - stacks.keys():
        del tensors[name]
    for name, stack in stacks.items():
        if name not in tensors or tensors[name].size != stack.nbytes:
            tensors[name] = np.empty(stack.nbytes, np.uint8)
    sizes = [stack.nbytes for stack in stacks.values()]

    def apply(stack: Stack) -> TensorState:
        digest = hasher(hash_threads(stack.nbytes, sizes))
        for offset, chunk in stack.chunks():
            data = chunk.view(np.uint8)
            digest.update(data.data)
            tensors[stack.name][offset : offset + data.size] = data
        return TensorState(stack.name, stack.dtype, stack.shape, digest.hexdigest())

    found = map_largest_first(apply, list(stacks.values()), lambda stack: stack.nbytes)
    return tuple(found)
