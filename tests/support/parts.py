"""The parts of one tensor in a delta, written and read without a file."""

from __future__ import annotations

from math import prod
from random import Random

import numpy as np

from deltactl.codec import ENCODINGS
from deltactl.codec.base import BLOCK, Decoder, EncodedBlock, StoredPart, Target, touch_sum_of
from deltactl.codec.bits import touch_sum
from deltactl.files.atomic import Spool
from tests.support.adversarial import Bits, width_of


def encoded(
    encoding: str, dtype: str, old: Bits, new: Bits, block: int = BLOCK
) -> dict[str, StoredPart]:
    """The parts of a tensor as a reader finds them. To be called with blocks of that size."""
    codec = ENCODINGS[encoding]
    with Spool() as spool:
        blocks = []
        for start in range(0, old.size, block):
            before, after = old[start : start + block], new[start : start + block]
            at = np.flatnonzero(before != after)
            if at.size:
                streams = codec.encode(before, at, before[at], after[at], dtype)
                segments = tuple(map(spool.append, streams))
                blocks.append(EncodedBlock(start // block, at.size, segments))
        parts = codec.parts(Target("", "w", dtype, old.size), blocks, spool)
        stored = {part.suffix: (part, b"".join(part.pieces)) for part in parts}
    assert tuple(stored) == codec.suffixes
    for part, data in stored.values():
        assert len(data) == prod(part.shape) * width_of(part.dtype)
    return {
        suffix: StoredPart(part.dtype, part.shape, np.frombuffer(data, np.uint8))
        for suffix, (part, data) in stored.items()
    }


def decoded(decoder: Decoder, old: Bits, block: int = BLOCK) -> Bits:
    """The tensor after the changes; every block is asked for, twice, and in no order, in each of
    the ways that it can be."""
    new = old.copy()
    starts = list(range(0, old.size, block))
    Random(1).shuffle(starts)
    for start in starts * 2:
        base = old[start : start + block]
        changes = decoder.block(start // block, base)
        at = changes.positions
        assert at.dtype == np.int64
        assert np.all(np.diff(at) > 0)
        assert touch_sum_of(changes, base, start) == touch_sum(at, base.take(at), start)
        half = base.size // 2
        parts = [changes.within(0, half), changes.within(half, base.size - half)]
        assert np.array_equal(np.concatenate([np.sort(part) for part in parts]), at)
        new[start : start + block] = base
        new[start : start + block][at] = changes.new_bits(base.take(at))
        as_bits = new[start : start + block].copy()
        new[start : start + block] = base
        # In parts, the last of which is empty or short.
        size = max(1, base.size // 3)
        for first in range(0, base.size + 1, size):
            changes.put(new[start + first : start + min(first + size, base.size)], first)
        assert np.array_equal(new[start : start + block], as_bits)
    return new
